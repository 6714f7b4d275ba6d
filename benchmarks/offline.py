"""Measure in virtual time how many tokens of a batch an engine computes beside the requests of clients:

    python benchmarks/offline.py azure_llm_code_2023.csv --shrink 4

Clients send the requests of a trace; a batch has lines of the same lengths, and does not end. Each way of running lines
is tried with more and more of them in flight, until more than --most-missed of the clients' requests miss their targets
twice in a row: once may be noise. Targets, engine, step times and noise are those of overload.py. Ways: strict
priority, as in vLLM (a waiting request of a client goes first, and steps take as many tokens as they may); the same
with steps that are bounded in time; and swiftkv's own: the class `batch`, which gives way, and the gateway's rule for
how many lines run. The figures do not depend on the machine. Columns: lines in flight; the part of online requests that
missed; offline tokens a second of lines that ended, until the last request of a client ended; and their ratio to strict
priority.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from lending_node import say, table
from overload import Setting, Verdict, at_load, study_parser, target_of
from policies import shortened

from swiftkv import _core
from swiftkv.bench.traces import Arrival, read_trace, spread_ties
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.batches.room import Load, Room
from swiftkv.simulate.doors import OpenDoor
from swiftkv.simulate.simulator import EngineRun

_KINDS = ("input", "cached", "output", "computed")
_FIRST_BLOCK = 1 << 28  # lines share no beginning with a client's prompt


@dataclass(frozen=True)
class Way:
    """A way to run lines beside clients."""

    name: str
    policy: SchedulingPolicy
    line_priority: int
    bounds_steps: bool
    has_rule: bool


STRICT, BOUNDED, OURS = (
    Way("strict priority", "priority", 1, bounds_steps=False, has_rule=False),
    Way("strict priority, bounded steps", "priority", 1, bounds_steps=True, has_rule=False),
    Way("swiftkv", "hrrn", 2 * _core.PRIORITIES_PER_CLASS, bounds_steps=True, has_rule=True),
)


class MixedRun(EngineRun):
    """An engine with clients' requests in `arrivals`, and after them the lines of a batch, whose times are ignored."""

    def __init__(self, num_online: int, room: Room, way: Way, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._room, self._way = room, way
        self._lines = list(enumerate(self._arrivals))[num_online:]
        for _ in self._lines:
            self._waiting.pop()
        self._lines.reverse()
        self.num_online = num_online
        self._in_flight: set[int] = set()

    @property
    def has_work(self) -> bool:
        return super().has_work or (bool(self._lines) and self._places() > 0)

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._let_in and not np.isnan(self._end_s[: self.num_online]).any()

    def enter(self, now_s: float) -> None:
        super().enter(now_s)
        while self._lines and self._places() > 0:
            request_id, line = self._lines.pop()
            self._arrival_s[request_id] = now_s
            self._in_flight.add(request_id)
            self._add(request_id, line)

    def end_step(self, now_s: float, duration_s: float) -> None:
        super().end_step(now_s, duration_s)
        self._in_flight = {i for i in self._in_flight if np.isnan(self._end_s[i])}

    def _places(self) -> int:
        offline = len(self._in_flight)
        if not self._way.has_rule:
            return self._room.max_in_flight - offline
        stats = self._scheduler.stats()
        in_engine = stats.num_running + stats.num_waiting
        group = stats.groups[0]
        usage = group.used / max(1, group.used + group.cached + group.free)
        beginning = sum(np.isnan(self._first_token_s[i]) for i in self._in_flight)
        return self._room.num_lines(Load(stats.num_waiting, in_engine - offline, offline, beginning, usage))


def study(
    way: Way, num_lines: int, setting: Setting, online: Sequence[Arrival], lines: Sequence[Arrival]
) -> dict[str, float]:
    """Return the part of the online requests that missed, and the tokens a second of lines that ended meanwhile."""
    make_run = partial(MixedRun, len(online), Room(setting.max_num_seqs, num_lines), way)
    behind = [replace(line, priority=way.line_priority, time_s=online[-1].time_s) for line in lines]
    setting = replace(setting, policy=way.policy, step_limit_s=setting.step_limit_s if way.bounds_steps else None)
    outcome = setting.serve([*online, *behind], OpenDoor(setting.target_ttft_s), make_run)
    target_s = np.array([setting.target_ttft_s(arrival) for arrival in online])
    count = len(online)
    arrays = (*("arrival_s", "first_token_s", "end_s"), *(f"{kind}_tokens" for kind in _KINDS))
    of_clients = replace(outcome, **{name: getattr(outcome, name)[:count] for name in arrays})
    ended = ~np.isnan(outcome.end_s[count:])
    tokens = (outcome.input_tokens + outcome.output_tokens)[count:][ended].sum()
    missed = Verdict(of_clients, target_s).is_missed
    return {"missed": float(missed.mean()), "tokens_per_s": float(tokens / np.nanmax(of_clients.end_s))}


def most(way: Way, counts: Iterable[int], most_missed: float, run: Any) -> tuple[int, dict[str, float]]:
    """Return how many lines give the most tokens while few enough of the clients' requests miss, and the figures."""
    best: tuple[int, dict[str, float]] = (0, run(way, 0))
    has_missed = False
    for count in counts:
        found = run(way, count)
        say(f"{way.name}, {count} lines: {found['missed']:.2%} missed, {found['tokens_per_s']:,.0f} tokens a second")
        had_missed, has_missed = has_missed, found["missed"] > most_missed
        if had_missed and has_missed:
            break
        if not has_missed and found["tokens_per_s"] > best[1]["tokens_per_s"]:
            best = count, found
    return best


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--lines", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 56])
    parser.add_argument("--most-missed", type=float, default=0.01)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    trace = [shortened(arrival, args.shrink) for arrival in spread_ties(read_trace(args.trace), rng)]
    arrivals = trace[: args.requests]
    # Twice as many as the engine could compute until the last client's request at the lowest load.
    drawn = rng.choice(len(trace), round(2 * args.requests / min(args.loads)))
    lines = [
        replace(trace[i], blocks=tuple(_FIRST_BLOCK + 1000 * n + k for k in range(len(trace[i].blocks))))
        for n, i in enumerate(drawn)
    ]

    target_ttft_s = target_of(args)
    setting = Setting("hrrn", args.seqs, args.pool_tokens, args.noise, args.seed, target_ttft_s)
    busy_s = setting.serve(at_load(arrivals, 100.0, 1.0), OpenDoor()).busy_s
    rows, results = [], {}
    for load in args.loads:
        online = at_load(arrivals, load, busy_s)

        def run(way: Way, count: int, online: Sequence[Arrival] = online) -> dict[str, float]:
            return study(way, count, setting, online, lines)

        found = {way.name: most(way, args.lines, args.most_missed, run) for way in (STRICT, BOUNDED, OURS)}
        base = found[STRICT.name][1]["tokens_per_s"]
        for name, (count, of) in found.items():
            ratio = f"x {of['tokens_per_s'] / base:.2f}" if base else ""
            rows.append((f"{load:g}", name, f"{count}", f"{of['missed']:.2%}", f"{of['tokens_per_s']:,.0f}", ratio))
        results[f"{load:g}"] = found
    say(table(("load", "", "lines", "missed", "offline tok/s", "of strict priority"), rows))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
