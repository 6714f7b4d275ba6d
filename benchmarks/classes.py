"""Measure in virtual time what a higher class gains by displacing running work of a lower one:

    python benchmarks/classes.py

Requests of `default` come at random, beside more work of a lower class than the engine can do. Steps take as long as in
policies.py. In the rows "in order" the lower work is of the same class with a lower `priority`: it waits behind the
others, but is not displaced once it runs. The figures do not depend on the machine. Columns: seconds to the first token
of `default` (P50, P99), its answers per second and those of the lower class, how many requests of the lower class were
displaced, and the part of all tokens that was computed again because of that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import count

import numpy as np
from lending_node import quantile, say, table
from policies import step_s

from swiftkv import _core
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival
from swiftkv.simulate.simulator import Outcome, simulate

_MAX_MODEL_LEN = 8192
_SHORT_OF = {"slots": (8, 200_000), "memory": (64, 12_000)}
"""The number of slots and of tokens in the pool, for each of the two that is scarce."""
_LOWER = {"in order": 1, "flex": _core.PRIORITIES_PER_CLASS, "batch": 2 * _core.PRIORITIES_PER_CLASS}
"""The priority of the lower class; that of `default` is 0."""


def arrivals(args: argparse.Namespace, lower_priority: int) -> list[Arrival]:
    """Return requests by time: for each of `default` one of the lower class, with a longer prompt and answer."""
    rng = np.random.default_rng(args.seed)
    ids = count()

    def one(time_s: float, mean_input: int, mean_output: int, priority: int) -> Arrival:
        num_input = int(np.clip(rng.lognormal(np.log(mean_input), 0.8), 16, 4000))
        num_output = int(np.clip(rng.lognormal(np.log(mean_output), 0.8), 2, 1500))
        blocks = tuple(next(ids) for _ in range(-(-num_input // BLOCK_TOKENS)))
        return Arrival(time_s, num_input, num_output, blocks, priority=priority)

    def both() -> Iterator[Arrival]:
        time_s = 0.0
        for _ in range(args.requests):
            time_s += rng.exponential(1 / args.rate)
            yield one(time_s, 200, 60, 0)
            yield one(time_s, 1000, 250, lower_priority)

    return list(both())


def serve(args: argparse.Namespace, short_of: str, lower: str) -> tuple[str, ...]:
    num_seqs, pool_tokens = _SHORT_OF[short_of]
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, pool_tokens // 16)],
        block_size=16,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=_MAX_MODEL_LEN,
        scheduling_policy=args.policy,
        target_tpot_s=0.25,
    )
    trace = arrivals(args, _LOWER[lower])
    outcome = simulate(scheduler, _MAX_MODEL_LEN, step_s, trace)
    is_default = np.array([arrival.priority == 0 for arrival in trace])
    return short_of, lower, *figures(outcome, is_default, sum(scheduler.stats().num_displaced_total))


def figures(outcome: Outcome, is_default: np.ndarray, num_displaced: int) -> Iterator[str]:
    ttft_s = outcome.ttft_s[is_default].tolist()
    yield f"{quantile(ttft_s, 0.5):.2f}"
    yield f"{quantile(ttft_s, 0.99):.2f}"
    while_both_came_s = float(outcome.arrival_s.max())
    for of_class in (is_default, ~is_default):
        yield f"{(outcome.end_s[of_class] <= while_both_came_s).sum() / while_both_came_s:.2f}"
    yield str(num_displaced)
    least = outcome.input_tokens - outcome.cached_tokens + outcome.output_tokens - 1
    yield f"{(outcome.computed_tokens - least).sum() / outcome.computed_tokens.sum():.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each class")
    parser.add_argument("--rate", type=float, default=0.5, help="requests of each class a second")
    parser.add_argument("--policy", default="hrrn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [serve(args, short_of, lower) for short_of in _SHORT_OF for lower in _LOWER]
    say(table(("short of", "lower class", "P50", "P99", "default/s", "lower/s", "displaced", "computed again"), rows))


if __name__ == "__main__":
    main()
