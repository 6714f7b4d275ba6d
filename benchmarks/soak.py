"""Replay an hour of real traffic, and check that memory, threads, files and sockets do not grow:

    python benchmarks/soak.py conversation_trace.jsonl --minutes 60 --markdown

Replays a trace, in compressed time, against a node of a master that borrows and two workers that lend, started with
`swiftkv serve`. Traces: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each
512 tokens of the prompt (Mooncake's), or CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens` (Azure's). Lengths
are divided by --shrink, because the demo models are small; equal blocks of the trace are equal tokens. A trace that
ends begins again, with other tokens. Choose --speed so that the machine is loaded but not saturated: the program prints
the share of the machine that the node took, and how many requests were in flight at most.

First, --fill requests of the trace are sent as fast as the node takes them, their answers cut short, so that all caches
of bounded size are full, such as those of the C library in every thread. They use another salt, so that the replay
finds nothing of theirs.

Every two seconds the resident memory, threads, open files and sockets of the gateway and of each engine are noted.
After a warm-up (a sixth of the time), a line is fitted to the least of each minute. Its slope has an interval of 95 %,
made wider where the residuals of neighbours resemble each other. Asked for: the interval reaches 0, or ends below a
bound that is too small to matter; no error; no engine that was started again; and in a random sample of answers, no
token that differs from those of a node that lends nothing. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from known_answers import Known, Question, Reference, ask
from lending_node import model, parser, quantile, say, table, write_report
from watched_node import DEMO_CHECKPOINTS, MIB, Checks, Monitor, WatchedNode, plain_table, problems_at_rest

from swiftkv.bench.traces import BLOCK_TOKENS, Arrival, read_trace

CHECKPOINTS = {"chat": DEMO_CHECKPOINTS / "chat", "code": DEMO_CHECKPOINTS / "code", "more": DEMO_CHECKPOINTS / "code"}
SHARES = ("chat", "chat", "code", "more")
"""The models that conversations are divided among: half of them go to the master."""
_TOKEN_IDS = (300, 4000)
_MAX_MODEL_LEN = 4096
_SAMPLE_S = 2.0
_MAX_POINTS = 60
"""The most points to which samples are reduced before a line is fitted."""
_WIDEST = 16
"""The width of an interval, as a multiple of the bound, beyond which it says nothing."""
_WIDTH = 2.0
"""The standard errors on each side of a slope, for an interval of 95 %."""
_REQUEST_TIMEOUT_S = 300.0
_FILL_AT_ONCE = 32
_FILL_TOKENS = 2
_FILL_SALT = 1 << 15
_REST_TIMEOUT_S = 60.0
_REPORT_S = 60.0

BOUNDS = {"rss_bytes": 1.0 * MIB, "threads": 0.5, "fds": 1.0, "sockets": 1.0}
"""The growth in an hour that does not matter."""


def question_of(arrival: Arrival, shrink: int, salt: int) -> Question:
    """Return the arrival as a question with lengths over `shrink`; `salt` makes other tokens of the same blocks."""
    max_tokens = max(1, arrival.output_tokens // shrink)
    num_tokens = min(max(1, arrival.input_tokens // shrink), _MAX_MODEL_LEN - max_tokens)
    tokens: list[int] = []
    for block in arrival.blocks:
        rng = random.Random(block << 16 | salt)
        tokens += [rng.randrange(*_TOKEN_IDS) for _ in range(BLOCK_TOKENS // shrink)]
    while len(tokens) < num_tokens:
        tokens.append(_TOKEN_IDS[0] + len(tokens) % 1000)
    return Question(tuple(tokens[:num_tokens]), max_tokens)


def model_of(arrival: Arrival) -> str:
    """Return the model that gets the arrival, the same for a whole conversation. Many share their first block."""
    return SHARES[arrival.blocks[min(1, len(arrival.blocks) - 1)] % len(SHARES)] if arrival.blocks else SHARES[0]


@dataclass
class Replay:
    """Sends a trace again and again, and keeps the results and some of the answers."""

    url: str
    arrivals: Sequence[Arrival]
    shrink: int
    speed: float
    kept_part: float
    rng: random.Random
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kept: dict[str, list[Known]] = field(default_factory=dict)
    """The answers whose tokens are checked at the end, by model."""
    most_in_flight: int = 0
    _in_flight: int = 0

    async def run(self, seconds: float) -> None:
        begin_s = time.monotonic()
        next_report_s = begin_s + _REPORT_S
        trace_s = self.arrivals[-1].time_s + 1
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, limits=limits) as client, asyncio.TaskGroup() as group:
            for number in count():
                arrival = self.arrivals[number % len(self.arrivals)]
                turn = number // len(self.arrivals)
                due_s = begin_s + (arrival.time_s + turn * trace_s) / self.speed
                await asyncio.sleep(max(0.0, min(due_s, begin_s + seconds) - time.monotonic()))
                if due_s - begin_s >= seconds:
                    return
                group.create_task(self._ask(client, arrival, turn))
                if time.monotonic() > next_report_s:
                    next_report_s += _REPORT_S
                    self._report(time.monotonic() - begin_s)

    async def fill(self, num_requests: int) -> None:
        """Send `num_requests`, `_FILL_AT_ONCE` at a time."""
        places = asyncio.Semaphore(_FILL_AT_ONCE)

        async def ask_soon(client: httpx.AsyncClient, arrival: Arrival) -> None:
            question = question_of(arrival, self.shrink, _FILL_SALT)
            short = Question(question.prompt, min(question.max_tokens, _FILL_TOKENS))
            answer = await ask(client, self.url, model_of(arrival), Known(short, ()))
            places.release()
            if answer.error:
                self.errors.append(f"{model_of(arrival)}: {answer.error}")

        async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
            for number in range(num_requests):
                await places.acquire()
                group.create_task(ask_soon(client, self.arrivals[number % len(self.arrivals)]))
                if number % 1000 == 999:
                    say(f"filled with {number + 1:,} of {num_requests:,}")

    async def _ask(self, client: httpx.AsyncClient, arrival: Arrival, turn: int) -> None:
        name, question = model_of(arrival), question_of(arrival, self.shrink, turn)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        answer = await ask(client, self.url, name, Known(question, ()))
        self._in_flight -= 1
        if answer.error:
            self.errors.append(f"{name}: {answer.error}")
            return
        self.latencies_s.append(answer.latency_s)
        if self.rng.random() < self.kept_part:
            self.kept.setdefault(name, []).append(Known(question, tuple(answer.token_ids)))

    def _report(self, elapsed_s: float) -> None:
        recent = self.latencies_s[-200:]
        median_s = quantile(recent, 0.5) if recent else 0.0
        say(
            f"{elapsed_s / 60:5.1f} min: {len(self.latencies_s):,} answers, {len(self.errors)} errors, "
            f"{self._in_flight} in flight, the last took {median_s:.2f} s (median of 200)"
        )


@dataclass(frozen=True)
class Slope:
    """A line through samples: its slope in an hour, and the interval of 95 % around it."""

    mean: float
    per_hour: float
    half_width: float

    def is_flat(self, bound: float) -> bool:
        low, high = self.per_hour - self.half_width, self.per_hour + self.half_width
        return self.half_width < _WIDEST * bound and (low <= 0 or high < bound)


def fit(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line by least squares to the least of each few neighbouring samples.

    The least is what a process keeps; the memory of a step or a request comes and goes with the load. Neighbouring
    samples are alike, which makes the usual interval too narrow, so it is widened by the autocorrelation of the
    residuals.
    """
    num_points = min(_MAX_POINTS, len(values) // 2)
    if num_points < 5:
        raise SystemExit("too few samples for a slope: let it run longer")
    hours = np.array([chunk.mean() for chunk in np.array_split(np.asarray(times_s) / 3600, num_points)])
    points = np.array([chunk.min() for chunk in np.array_split(np.asarray(values, float), num_points)])
    centred = hours - hours.mean()
    per_hour = float(centred @ points / (centred @ centred))
    residuals = points - points.mean() - per_hour * centred
    variance = float(residuals @ residuals) / (num_points - 2)
    alike = float(residuals[1:] @ residuals[:-1] / (residuals @ residuals)) if variance else 0.0
    widened = math.sqrt((1 + max(alike, 0.0)) / (1 - max(alike, 0.0)))
    error = math.sqrt(variance / float(centred @ centred)) * widened
    return Slope(float(points.mean()), per_hour, _WIDTH * error)


def check_slopes(checks: Checks, monitor: Monitor, since_s: float) -> dict[str, dict[str, Slope]]:
    slopes: dict[str, dict[str, Slope]] = {}
    for name in monitor.names():
        samples = monitor.samples(name, since_s)
        for resource, bound in BOUNDS.items():
            values = [float(getattr(usage, resource)) for usage in samples]
            slope = fit([usage.time_s for usage in samples], values)
            unit, suffix = (MIB, " MiB") if resource == "rss_bytes" else (1, "")
            what = "memory" if resource == "rss_bytes" else resource
            figures = [number / unit for number in (slope.mean, slope.per_hour, slope.half_width)]
            found = f"{figures[0]:.1f}{suffix}, {figures[1]:+.2f} ± {figures[2]:.2f} an hour"
            checks.add(f"{name}: {what}", slope.is_flat(bound), found, f"reaches 0, or < {bound / unit:g}{suffix}")
            slopes.setdefault(name, {})[resource] = slope
    return slopes


def count_wrong(kept: dict[str, list[Known]]) -> int:
    """Ask a node that lends nothing the same questions, and return the number of answers that differ."""
    wrong = 0
    with Reference(sorted(set(CHECKPOINTS.values())), _MAX_MODEL_LEN) as reference:
        for name, answers in kept.items():
            right = reference.answer(CHECKPOINTS[name], [known.question for known in answers])
            wrong += sum(known.token_ids != other.token_ids for known, other in zip(answers, right, strict=True))
    return wrong


def processor_seconds(node: WatchedNode) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in node.pids().values()]
    return float(sum(of.user + of.system for of in times))


def make_node() -> WatchedNode:
    shared: dict[str, Any] = {"threads": 1, "max_model_len": _MAX_MODEL_LEN}
    lending = {"budget": "75%", "window": "10s"}
    models = [model("chat", CHECKPOINTS["chat"], "8MiB", "master", **shared)]
    models += [model(name, CHECKPOINTS[name], "24MiB", lending=lending, **shared) for name in ("code", "more")]
    return WatchedNode("soak", {"lending": {"max_wait": "120s"}}, models)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("trace", type=Path)
    arguments.add_argument("--minutes", type=float, default=60)
    arguments.add_argument("--speed", type=float, default=4.0, help="speed, as a multiple of the trace's own")
    arguments.add_argument(
        "--fill", type=int, default=12000, help="requests that are sent before the measurement begins"
    )
    arguments.add_argument("--shrink", type=int, default=16, help="divisor of all lengths")
    arguments.add_argument("--check", type=float, default=0.01, help="share of the answers whose tokens are checked")
    arguments.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = arguments.parse_args()
    arrivals = read_trace(args.trace)
    seconds = 60 * args.minutes
    replay_rng = random.Random(args.seed)
    with make_node() as node, Monitor(node.pids, _SAMPLE_S) as monitor:
        replay = Replay(node.url, arrivals, args.shrink, args.speed, args.check, replay_rng)
        asyncio.run(replay.fill(args.fill))
        first_pids, begin_s, busy_s = node.pids(), time.monotonic(), processor_seconds(node)
        asyncio.run(replay.run(seconds))
        end_s, busy_s = time.monotonic(), processor_seconds(node) - busy_s
        checks = Checks()
        slopes = check_slopes(checks, monitor, begin_s + seconds / 6)
        checks.add("engines that were started again", node.pids() == first_pids, node.pids() == first_pids, True)
        problems = problems_at_rest(node, _REST_TIMEOUT_S)
        checks.add("pools and leases", not problems, len(problems) or "sane", "sane")
    num_cores = psutil.cpu_count() or 1
    taken = busy_s / (end_s - begin_s) / num_cores
    p99_s = quantile(replay.latencies_s, 0.99) if replay.latencies_s else math.inf
    say(
        f"{len(replay.latencies_s):,} answers, P99 {p99_s:.2f} s; at most {replay.most_in_flight} in flight; "
        f"the node took {100 * taken:.0f} % of {num_cores} cores"
    )
    for error in [*replay.errors[:5], *problems[:5]]:
        say(error)
    checks.add("errors", not replay.errors, len(replay.errors), 0)
    num_kept = sum(map(len, replay.kept.values()))
    wrong = count_wrong(replay.kept)
    checks.add("wrong answers", not wrong, wrong, f"0 of {num_kept} that were checked")
    say("\n" + (table if args.markdown else plain_table)(Checks.HEADS, checks.rows))
    figures = {name: {key: vars(slope) for key, slope in of.items()} for name, of in slopes.items()}
    samples = {name: list(map(vars, monitor.samples(name))) for name in monitor.names()}
    write_report(args, checks=checks.rows, slopes=figures, latencies_s=replay.latencies_s, samples=samples)
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
