"""Measure how well `swiftkv simulate` predicts a real server:

    python benchmarks/fidelity.py --requests 300 --out benchmarks/out/fidelity.json

A node serves a random model on the CPU. After a warm-up, in which the engine learns how long its steps take, requests
of random lengths come at random times, at --load of what the engine can do, and nothing of them is cached. Then the
same arrivals, at the times at which they were sent, are simulated with the step times that the engine had learnt when
the last answer was there. Rows: time to the first token, per token and to the end, of the server and of the simulation,
and by how much the simulation is off. The machine must have nothing else to do. (That the simulator plans every step as
the engine does, if steps take as long, is a test: tests/simulate/test_replay.py.)
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
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
from swiftkv.bench.client import Answer, Target, send
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival
from swiftkv.planning.models import SizedPlan
from swiftkv.simulate.simulator import Outcome, longest_alone, make_scheduler, simulate
from swiftkv.simulate.step_times import make_step_time, read_step_times

VOCAB = (300, 500)
MODEL = "real"
_HTTP_TIMEOUT_S = 900.0
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
    """Return how long the engine needs for a request that shares its answer's steps with three others."""
    prompt, answers = StepWork(), StepWork()
    prompt.add_row(0, arrival.input_tokens)
    for _ in range(4):
        answers.add_row(arrival.input_tokens, 1)
    return step_time.predict(prompt) + arrival.output_tokens * step_time.predict(answers) / 4


async def replay(node: Node, arrivals: Sequence[Arrival], tokens: Tokens) -> list[Answer]:
    """Send each request at its time, however many are under way."""
    target = Target(f"{node.url}/v1/completions", MODEL, extra_body=EXTRA)
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        prompts = [tokens.fresh(arrival.input_tokens) for arrival in arrivals]
        begin_s = asyncio.get_running_loop().time()

        async def one(arrival: Arrival, prompt: list[int]) -> Answer:
            await asyncio.sleep(begin_s + arrival.time_s - asyncio.get_running_loop().time())
            return await send(client, target, prompt, arrival.output_tokens)

        answers = await asyncio.gather(*(one(a, p) for a, p in zip(arrivals, prompts, strict=True)))
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(errors[0])
    return answers


def simulated(node: Node, arrivals: Sequence[Arrival], step_time: StepTime) -> Outcome:
    plan = node.plan(MODEL)
    assert isinstance(plan, SizedPlan)
    scheduler = make_scheduler(node.config.models[0], plan, None)
    scheduler.remember_step_time(step_time.coefficients)
    return simulate(scheduler, longest_alone(plan), lambda step: step_time.predict(step.work), arrivals)


def show(answers: Sequence[Answer], outcome: Outcome) -> dict[str, dict[str, float]]:
    """Print the table, and return by how much the simulation is off."""
    several = [answer for answer in answers if answer.num_output_tokens > 1]

    def seconds(values: npt.NDArray[np.float64]) -> list[float]:
        return [float(value) for value in values]

    pairs = {
        "first token": ([answer.ttft_s for answer in answers], seconds(outcome.ttft_s)),
        "per token": ([time_per_output_token(answer) for answer in several], seconds(outcome.tpot_s)),
        "whole answer": ([answer.latency_s for answer in answers], seconds(outcome.e2e_s)),
    }
    rows, off = [], {}
    for name, both in pairs.items():
        real, virtual = map(Figures.of, both)
        off[name] = {key: getattr(virtual, key) / getattr(real, key) - 1 for key in ("mean_s", "p50_s", "p99_s")}
        for key, word in (("mean_s", "mean"), ("p50_s", "P50"), ("p99_s", "P99")):
            cells = (f"{1e3 * getattr(figures, key):,.1f}" for figures in (real, virtual))
            rows.append((f"{name}, {word}, ms", *cells, f"{off[name][key]:+.1%}"))
    say(table(("", "server", "simulation", "off by"), rows))
    return off


def main() -> None:
    options = parser(__doc__ or "", default_model="a random one of 16 layers, 1,024 wide")
    options.add_argument("--requests", type=int, default=300)
    options.add_argument("--warm-up", type=int, default=40, help="requests before")
    options.add_argument("--load", type=float, default=0.7, help="about, of what the engine can do")
    args = options.parse_args()
    rng = np.random.default_rng(args.seed)
    tokens = Tokens(args.seed, VOCAB)
    with tempfile.TemporaryDirectory(prefix="fidelity-") as directory:
        checkpoint = args.checkpoint or make_shape(Path(directory), 16, 4, 8192, hidden_size=1024)
        node = Node("fidelity", {}, [model(MODEL, checkpoint, "1GiB")])
        with nodes_up(node):
            warm_up = [replace(arrival, time_s=0.3 * i) for i, arrival in enumerate(draw(args.warm_up, rng))]
            asyncio.run(replay(node, warm_up, tokens))
            learnt = make_step_time(MODEL, read_step_times(node.url))
            arrivals = draw(args.requests, rng)
            per_request_s = statistics.fmean(alone_s(learnt, arrival) for arrival in arrivals)
            arrivals = [replace(a, time_s=a.time_s * per_request_s / args.load) for a in arrivals]
            say(f"{len(arrivals)} requests in {arrivals[-1].time_s:,.0f} s")
            answers = asyncio.run(replay(node, arrivals, tokens))
            learnt = make_step_time(MODEL, read_step_times(node.url))
            first_s = min(answer.start_s for answer in answers)
            sent = [replace(a, time_s=b.start_s - first_s) for a, b in zip(arrivals, answers, strict=True)]
            order = sorted(range(len(sent)), key=lambda i: sent[i].time_s)
            outcome = simulated(node, [sent[i] for i in order], learnt)
            off = show([answers[i] for i in order], outcome)
    write_report(args, off=off, step_time_s=learnt.coefficients)


if __name__ == "__main__":
    main()
