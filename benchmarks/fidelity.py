"""Measure how well `swiftkv simulate` predicts a real server:

    python benchmarks/fidelity.py --requests 300 --out benchmarks/out/fidelity.json

A node serves a random model on the CPU. First comes a warm-up, part of it at the same load, in which the engine learns
how long its steps take. Then requests of random lengths come at random times, at --load of what the engine can do;
nothing of them is cached. The same arrivals, at the times at which they were sent, are then simulated twice: with the
step times and gateway times that the node had measured before the first of them, and with the mean of those that it
reported every --poll-s while it served them. The first is a prediction; the second leaves out how much faster or slower
the machine became meanwhile. Rows: time to the first token, per token and to the end, of the server and of the
simulations, and by how much these are off; then the engine's own error of its predicted step times, the mean of its
reports. The machine must have nothing else to do. (tests/simulate/test_replay.py checks that the simulator plans every
step as the engine does if steps take as long.)
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
from lean_client import exchange, request_bytes
from lending_node import (
    EXTRA,
    Node,
    Tokens,
    make_shape,
    model,
    nodes_up,
    parser,
    quantile,
    say,
    table,
    time_per_output_token,
    write_report,
)

from swiftkv._core import StepTime, StepWork
from swiftkv.bench.client import Target, TimedAnswer
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival
from swiftkv.planning.models import SizedPlan
from swiftkv.simulate.simulator import Outcome, longest_alone, make_scheduler, simulate
from swiftkv.simulate.step_times import make_gateway_time, make_step_time, parse_step_times, read_step_times

VOCAB = (300, 500)
MODEL = "real"
_TIMEOUT_S = 900.0  # after the last request
_LENGTHS = (16, 1500)  # of prompts
_ANSWERS = (2, 80)


@dataclass(frozen=True)
class Figures:
    """One quantity of all requests, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figures:
        return cls(statistics.fmean(seconds), quantile(seconds, 0.5), quantile(seconds, 0.99))


def draw(count: int, rng: np.random.Generator) -> list[Arrival]:
    """Return requests whose times are those of a load of 1 request a second on average."""
    lengths = np.clip(rng.lognormal(5.5, 0.9, count), *_LENGTHS).astype(int)
    answers = rng.integers(*_ANSWERS, count)
    times_s = np.cumsum(rng.exponential(1.0, count))
    return [
        Arrival(float(t), int(n), int(m), tuple(10 * i + k for k in range(-(-int(n) // BLOCK_TOKENS))))
        for i, (t, n, m) in enumerate(zip(times_s, lengths, answers, strict=True))
    ]


def alone_s(step_time: StepTime, arrival: Arrival) -> float:
    """Return how long the engine needs for a request whose answer shares its steps with three others."""
    prompt, answers = StepWork(), StepWork()
    prompt.add_row(0, arrival.input_tokens)
    for _ in range(4):
        answers.add_row(arrival.input_tokens, 1)
    return step_time.predict(prompt) + arrival.output_tokens * step_time.predict(answers) / 4


async def replay(node: Node, arrivals: Sequence[Arrival], tokens: Tokens) -> list[TimedAnswer]:
    """Send each request at its time, even if earlier ones have not been answered."""
    target = Target(f"{node.url}/v1/completions", MODEL, extra_body=EXTRA)
    requests = [request_bytes(target, tokens.fresh(each.input_tokens), each.output_tokens) for each in arrivals]
    begin_s = asyncio.get_running_loop().time()

    async def one(arrival: Arrival, request: bytes) -> TimedAnswer:
        await asyncio.sleep(begin_s + arrival.time_s - asyncio.get_running_loop().time())
        return await exchange(target, request)

    async with asyncio.timeout(arrivals[-1].time_s + _TIMEOUT_S):
        answers = await asyncio.gather(*(one(*each) for each in zip(arrivals, requests, strict=True)))
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(errors[0])
    return answers


@dataclass
class Watch:
    """Polls a node's metrics, and parses them afterwards, because parsing takes a core for 30 ms."""

    node: Node
    metrics: list[str] = field(default_factory=list)

    async def until(self, done: asyncio.Future[list[TimedAnswer]], every_s: float) -> None:
        async with httpx.AsyncClient() as client:
            while not done.done():
                await asyncio.wait([done], timeout=every_s)
                self.metrics.append((await client.get(f"{self.node.url}/metrics")).text)

    def terms(self) -> dict[str, float]:
        """Return the mean of each term of the step times."""
        known = [parse_step_times(text)[MODEL] for text in self.metrics]
        return {term: statistics.fmean(each[term] for each in known) for term in known[-1]}

    def errors(self) -> list[float]:
        """Return the engine's own mean errors of its predicted step times."""
        begin = "swiftkv:step_time_error_ratio{"
        lines = (line for text in self.metrics for line in text.splitlines())
        return [float(line.split()[-1]) for line in lines if line.startswith(begin)]


async def watched(
    node: Node, arrivals: Sequence[Arrival], tokens: Tokens, every_s: float
) -> tuple[list[TimedAnswer], Watch]:
    """Replay requests, and poll the node's step times meanwhile."""
    watch = Watch(node)
    answers = asyncio.ensure_future(replay(node, arrivals, tokens))
    await watch.until(answers, every_s)
    return answers.result(), watch


def simulated(node: Node, arrivals: Sequence[Arrival], terms: dict[str, float]) -> Outcome:
    """Simulate the arrivals with the step times, and the times of the gateway, that a node has reported."""
    plan = node.plan(MODEL)
    assert isinstance(plan, SizedPlan)
    known = {MODEL: terms}
    step_time = make_step_time(MODEL, known)
    scheduler = make_scheduler(node.config.models[0], plan, None)
    scheduler.remember_step_time(step_time.coefficients)
    outcome = simulate(scheduler, longest_alone(plan), lambda step: step_time.predict(step.work), arrivals)
    return outcome.behind(make_gateway_time(MODEL, known))


def show(answers: Sequence[TimedAnswer], outcomes: dict[str, Outcome]) -> dict[str, dict[str, dict[str, float]]]:
    """Print the table, and return by how much each simulation is off."""
    several = [answer for answer in answers if answer.num_output_tokens > 1]
    real = {
        "first token": Figures.of([answer.ttft_s for answer in answers]),
        "per token": Figures.of([time_per_output_token(answer) for answer in several]),
        "whole answer": Figures.of([answer.latency_s for answer in answers]),
    }
    virtual = {
        name: {
            "first token": Figures.of(outcome.ttft_s.tolist()),
            "per token": Figures.of(outcome.tpot_s.tolist()),
            "whole answer": Figures.of(outcome.e2e_s.tolist()),
        }
        for name, outcome in outcomes.items()
    }
    off: dict[str, dict[str, dict[str, float]]] = {name: {} for name in outcomes}
    rows = []
    for quantity, server in real.items():
        for key, word in (("mean_s", "mean"), ("p50_s", "P50"), ("p99_s", "P99")):
            cells = [f"{1e3 * getattr(server, key):,.1f}"]
            for name, of in virtual.items():
                ratio = getattr(of[quantity], key) / getattr(server, key) - 1
                off[name].setdefault(quantity, {})[key] = ratio
                cells += [f"{1e3 * getattr(of[quantity], key):,.1f}", f"{ratio:+.1%}"]
            rows.append((f"{quantity}, {word}, ms", *cells))
    heads = [head for name in outcomes for head in (name, "off by")]
    say(table(("", "server", *heads), rows))
    return off


def main() -> None:
    options = parser(__doc__ or "", default_model="a random model of 16 layers, 1,024 wide")
    options.add_argument("--requests", type=int, default=300, help="requests that are compared")
    options.add_argument(
        "--warm-up", type=int, default=40, help="requests that are sent first, to find what the engine can do"
    )
    options.add_argument(
        "--settle", type=int, default=100, help="requests that are sent after these at --load, and not compared"
    )
    options.add_argument("--load", type=float, default=0.7, help="the load, as a share of what the engine can do")
    options.add_argument(
        "--poll-s", type=float, default=5.0, help="seconds from one look at the node's step times to the next"
    )
    args = options.parse_args()
    rng = np.random.default_rng(args.seed)
    tokens = Tokens(args.seed, VOCAB)
    with tempfile.TemporaryDirectory(prefix="fidelity-") as directory:
        checkpoint = args.checkpoint or make_shape(Path(directory), 16, 4, 8192, hidden_size=1024)
        node = Node("fidelity", {}, [model(MODEL, checkpoint, "1GiB")])
        with nodes_up(node):
            warm_up = [replace(arrival, time_s=0.3 * i) for i, arrival in enumerate(draw(args.warm_up, rng))]
            asyncio.run(replay(node, warm_up, tokens))

            def at_load(arrivals: list[Arrival]) -> list[Arrival]:
                """Return the requests at --load of what the node says that it can do."""
                step_time = make_step_time(MODEL, read_step_times(node.url))
                per_request_s = statistics.fmean(alone_s(step_time, arrival) for arrival in arrivals)
                return [replace(a, time_s=a.time_s * per_request_s / args.load) for a in arrivals]

            asyncio.run(replay(node, at_load(draw(args.settle, rng)), tokens))
            before = read_step_times(node.url)
            arrivals = at_load(draw(args.requests, rng))
            say(f"{len(arrivals)} requests in {arrivals[-1].time_s:,.0f} s")
            answers, watch = asyncio.run(watched(node, arrivals, tokens, args.poll_s))
            first_s = min(answer.start_s for answer in answers)
            sent = [replace(a, time_s=b.start_s - first_s) for a, b in zip(arrivals, answers, strict=True)]
            order = sorted(range(len(sent)), key=lambda i: sent[i].time_s)
            terms = {"predicted": before[MODEL], "by the times of the run": watch.terms()}
            outcomes = {name: simulated(node, [sent[i] for i in order], of) for name, of in terms.items()}
            off = show([answers[i] for i in order], outcomes)
            say(f"mean error of predicted step times, as the engine has it: {statistics.fmean(watch.errors()):.1%}")
    write_report(args, off=off, terms=terms, step_time_error=watch.errors())


if __name__ == "__main__":
    main()
