"""Measure in virtual time how long a tenant waits beside one that floods the node, with the real scheduler, no model:

    python benchmarks/tenants.py mooncake_conversation.jsonl

Two tenants of equal weight send conversations of a trace to one model, at random times. The steady one sends --load of
the node's capacity, which is the throughput of a closed loop of 100 clients. The other one sends nothing, as much, or
--flood times as much; each case runs with the tenants as flows of their own, and as one flow. Steps take as long as in
policies.py. With --rounds the conversations are divided, and their times drawn, in several ways, and the requests of
all rounds count together, because the P99 of one round is that of a burst or two. Columns: the steady tenant's seconds
to the first token, and for its P99 the ratio to that beside an equal neighbour; the part of both tenants' prompt tokens
that was cached; the steady tenant's part of what was served while it sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from lending_node import quantile, say, table
from policies import serve, shortened, trace_parser

from swiftkv.bench.traces import Arrival, read_trace
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.simulator import Outcome

_CLIENTS = 100
STEADY, OTHER = 0, 1
_EQUAL = "as much"


@dataclass(frozen=True)
class Run:
    """The outcome of one mixture of requests."""

    steady: np.ndarray  # whether each request is the steady tenant's, [N]
    outcome: Outcome

    @property
    def ttft_s(self) -> list[float]:
        """The times to the first token of the steady tenant's requests."""
        return list(self.outcome.ttft_s[self.steady])

    @property
    def hit_rate(self) -> float:
        return float(self.outcome.cached_tokens.sum() / self.outcome.input_tokens.sum())

    @property
    def part(self) -> float:
        """The steady tenant's part of what was served before its last request came."""
        outcome = self.outcome
        served = outcome.end_s <= outcome.arrival_s[self.steady].max()
        tokens = outcome.input_tokens - outcome.cached_tokens + 2 * outcome.output_tokens
        return float(tokens[served & self.steady].sum() / tokens[served].sum())


def poisson(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """Return the requests with random times, `rate` in a second."""
    times_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(arrivals)))
    return [replace(arrival, time_s=float(time_s)) for arrival, time_s in zip(arrivals, times_s, strict=True)]


def divided(trace: Sequence[Arrival], args: argparse.Namespace, seed: int) -> list[list[Arrival]]:
    """Divide the conversations of a trace at random into groups of --requests, in the trace's order.

    All conversations begin with the same block; the second one tells them apart.
    """
    rng = np.random.default_rng(seed)
    group_of: dict[int, int] = {}
    groups: list[list[Arrival]] = [[] for _ in range(1 + args.flood)]
    for arrival in trace:
        conversation = arrival.blocks[min(1, len(arrival.blocks) - 1)]
        group = groups[group_of.setdefault(conversation, int(rng.integers(len(groups))))]
        if len(group) < args.requests:
            group.append(shortened(arrival, args.shrink))
    return groups


def mixture(steady: Sequence[Arrival], other: Sequence[Arrival], args: argparse.Namespace, is_fair: bool) -> Run:
    of_other = [replace(arrival, flow=OTHER) for arrival in other]
    arrivals = sorted([*steady, *of_other], key=lambda arrival: arrival.time_s)
    is_steady = np.array([arrival.flow == STEADY for arrival in arrivals])
    if not is_fair:
        arrivals = [replace(arrival, flow=STEADY) for arrival in arrivals]
    return Run(is_steady, serve(args.policy, arrivals, args))


def a_round(trace: Sequence[Arrival], args: argparse.Namespace, seed: int) -> dict[tuple[str, bool], Run]:
    """Return the runs by the other tenant's load, and by whether the two are flows of their own."""
    groups = divided(trace, args, seed)
    steady, equal, flood = groups[0], groups[1], [arrival for group in groups[1:] for arrival in group]
    capacity = len(steady) / serve(args.policy, steady, args, _CLIENTS).end_s.max()
    rate = args.load * capacity
    say(f"{args.policy}: capacity {capacity:.3f} requests a second; each tenant {rate:.3f}")
    steady = poisson(steady, rate, seed + 1)
    neighbours: dict[str, list[Arrival]] = {
        "nothing": [],
        _EQUAL: poisson(equal, rate, seed + 2),
        f"{args.flood} times as much": poisson(flood, rate * args.flood, seed + 3),
    }
    return {
        (name, is_fair): mixture(steady, other, args, is_fair)
        for name, other in neighbours.items()
        for is_fair in ((True, False) if other else (True,))
    }


def main() -> None:
    parser = trace_parser(__doc__)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1000, help="requests of the steady tenant")
    parser.add_argument(
        "--load",
        type=float,
        default=0.35,
        help="load of the steady tenant, and of an equal neighbour, as a share of what the engine can do",
    )
    parser.add_argument("--flood", type=int, default=10)
    parser.add_argument("--policy", choices=get_args(SchedulingPolicy), default="hrrn")
    parser.add_argument("--target-s", type=float, default=0.25, help="target_tpot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    rounds = [a_round(trace, args, args.seed + number) for number in range(args.rounds)]
    ttft_s = {key: [time_s for of in rounds for time_s in of[key].ttft_s] for key in rounds[0]}
    base_s = quantile(ttft_s[_EQUAL, True], 0.99)
    rows = []
    for key, times_s in ttft_s.items():
        name, is_fair = key
        p99_s = quantile(times_s, 0.99)
        figures_s = (float(np.mean(times_s)), quantile(times_s, 0.5), quantile(times_s, 0.9), p99_s)
        ratio = "" if name == "nothing" else f"x {p99_s / base_s:.2f}"
        cached, part = (
            float(np.mean(each)) for each in zip(*((of[key].hit_rate, of[key].part) for of in rounds), strict=True)
        )
        seconds = [f"{value:.2f}" for value in figures_s]
        rows.append((name, "shares" if is_fair else "none", *seconds, ratio, f"{cached:.1%}", f"{part:.0%}"))
    say(table(("the other sends", "fairness", "mean", "P50", "P90", "P99", "ratio", "cached", "its part"), rows))


if __name__ == "__main__":
    main()
