"""Replay the prompts of a trace through the C++ core, and count the part of their tokens that is cached:

    python benchmarks/replay.py ../shared/traces/mooncake_conversation.jsonl --markdown

No model runs: requests come one after the other, in the trace's order, and each is prefilled and ended by its first
token. So answers are in no cache. The model is a hybrid of MiMo-V2.5-Pro's shape: 70 layers, of which 60 look back over
128 tokens. A budget is the bytes of so many tokens of a dense twin, whose 70 layers have full attention. Columns:

- dense: the twin
- ours: the hybrid, whose groups share one pool
- regions: the hybrid, with its pool divided as `blocks_in_pool` does
- share: the hybrid, whose window group gets that part of the bytes; all in a table of their own, and the best
- interval: ours, with that `retention_interval`
- every tail, latest tail, undivided: rules of `replay_rules.py`, which are not part of the core, in an undivided pool.
  Windows keep a tail at the end of each 512 tokens, of each prompt, or where the core keeps one
- clairvoyant: likewise, but it knows later prompts
- endless: a cache that forgets nothing
- behind: how far ours is below the best of the columns that do not know later prompts

The trace has an id for each 512 tokens of a prompt, and another id for the rest at its end, whatever tokens the next
turn has there. So the next turn would differ from a prompt after its last whole 512 tokens, and never continue it from
its end, where the tails are kept. Therefore prompts are cut there, plus less than a block; in the hit rate they have
the trace's lengths. With --rest, the rest follows each prompt as a request of its own that does not count, as an answer
would: it takes room, and leaves one more boundary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lending_node import say, table, write_report
from replay_rules import Clairvoyant, Sizes, end_and_branch, every_tail, latest_tail, replay_recency
from watched_node import plain_table

from swiftkv import _core
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival, read_trace
from swiftkv.cache.division import OwnRegions, PoolDivision, SharedExtents
from swiftkv.cache.geometry import KVGroup, windows_at_once

BUDGETS_M = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SHARES = (0.02, 0.05, 0.10, 0.12, 0.20, 0.30, 0.50)
INTERVALS = (2048,)
RULES = ("every tail", "latest tail", "undivided", "clairvoyant")
ASKED_FOR = {1.0: 4.0, 2.0: 3.3, 4.0: 1.9}
"""The least ratio of our hit rate to the twin's, by budget in millions of tokens."""
_FULL_LAYERS, _LAYERS = 10, 70
_WINDOW = 128
_HEADS, _K_DIM, _V_DIM = 8, 192, 128
_MAX_NUM_SEQS = 1
_NO_STOP = np.array([], np.int32)


@dataclass(frozen=True)
class Outcome:
    """The outcome for all prompts of the trace."""

    blocks: tuple[int, ...]  # of each KV group
    hit_tokens: int
    hit_rate: float
    window_missed_tokens: int
    """The tokens whose KV of full attention was cached while the window's tail was not."""
    seconds: float


def hybrid(block_size: int) -> tuple[KVGroup, KVGroup]:
    full, rest = tuple(range(_FULL_LAYERS)), tuple(range(_FULL_LAYERS, _LAYERS))
    return (
        KVGroup(full, _HEADS, _K_DIM, "bfloat16", block_size, v_head_dim=_V_DIM),
        KVGroup(rest, _HEADS, _K_DIM, "bfloat16", block_size, "window", _WINDOW, _V_DIM),
    )


def dense_twin(block_size: int) -> KVGroup:
    return KVGroup(tuple(range(_LAYERS)), _HEADS, _K_DIM, "bfloat16", block_size, v_head_dim=_V_DIM)


def divide(pool_bytes: int, groups: tuple[KVGroup, KVGroup], share: float) -> tuple[int, int]:
    """Return the blocks of each group if the window group gets `share` of the pool."""
    full, window = groups
    num_window = int(pool_bytes * share) // window.block_bytes
    return (pool_bytes - num_window * window.block_bytes) // full.block_bytes, num_window


def cut(prompt: np.ndarray, block_size: int) -> np.ndarray:
    """Return the tokens of a prompt: those of whole ids, and less than a block of the rest."""
    rest = len(prompt) % BLOCK_TOKENS
    return prompt[: max(1, len(prompt) - rest + min(rest, block_size - 1))]


def serve(scheduler: _core.Scheduler, prompt: np.ndarray) -> None:
    """Prefill a prompt and end it. It is alone, so all prompts may have the same request number."""
    scheduler.add_request(0, prompt, 1, 0, _NO_STOP, b"model", False)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
    assert not scheduler.has_work()


@dataclass(frozen=True)
class Replay:
    """The trace, and the settings with which the core replays it."""

    arrivals: Sequence[Arrival]
    block_size: int
    chunk: int
    has_rest: bool  # whether the rest of each prompt follows it

    @property
    def num_tokens(self) -> int:
        return sum(arrival.input_tokens for arrival in self.arrivals)

    def run(self, division: PoolDivision, blocks: Sequence[int], interval: int | None = None) -> Outcome:
        begin_s = time.monotonic()
        scheduler = _core.Scheduler(
            [
                _core.GroupSpec(g.num_layers, blocks[i], g.window, blocks_per_extent=division.blocks_per_extent(i))
                for i, g in enumerate(division.groups)
            ],
            block_size=self.block_size,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=self.chunk,
            max_model_len=max(arrival.input_tokens for arrival in self.arrivals) + 2,
            retention_interval=interval,
        )
        hits = missed = 0
        for arrival in self.arrivals:
            whole = arrival.prompt()
            prompt = cut(whole, self.block_size)
            before = scheduler.stats()
            serve(scheduler, prompt)
            after = scheduler.stats()
            hits += after.prefix_hit_tokens_total - before.prefix_hit_tokens_total
            missed += after.window_missed_tokens_total - before.window_missed_tokens_total
            if self.has_rest and len(whole) > len(prompt):
                serve(scheduler, whole)
        return Outcome(tuple(blocks), hits, hits / self.num_tokens, missed, time.monotonic() - begin_s)

    def run_rules(self, pool_bytes: int) -> dict[str, Outcome]:
        """Return the columns of `replay_rules.py`."""
        full, window = hybrid(self.block_size)
        node_bytes = BLOCK_TOKENS // self.block_size * full.block_bytes
        tail, kept = (count * window.block_bytes for count in (window.tail_blocks, window.blocks_at_rest(BLOCK_TOKENS)))
        paths = [arrival.blocks[: arrival.input_tokens // BLOCK_TOKENS] for arrival in self.arrivals]
        runs = {
            "every tail": lambda: replay_recency(paths, Sizes(node_bytes, tail), pool_bytes, every_tail),
            "latest tail": lambda: replay_recency(paths, Sizes(node_bytes, kept), pool_bytes, latest_tail),
            "undivided": lambda: replay_recency(paths, Sizes(node_bytes, kept), pool_bytes, end_and_branch),
            "clairvoyant": lambda: Clairvoyant(paths, Sizes(node_bytes, tail), pool_bytes).replay(),
        }
        return {name: self._outcome_of(run) for name, run in runs.items()}

    def _outcome_of(self, run: Callable[[], list[int]]) -> Outcome:
        begin_s = time.monotonic()
        hits = 0
        for arrival, found in zip(self.arrivals, run(), strict=True):
            most = (len(cut(arrival.prompt(), self.block_size)) - 1) // self.block_size * self.block_size
            hits += min(found * BLOCK_TOKENS, most)
        return Outcome((), hits, hits / self.num_tokens, 0, time.monotonic() - begin_s)

    def endless(self) -> Outcome:
        ids = {block for arrival in self.arrivals for block in arrival.blocks}
        enough = len(ids) * BLOCK_TOKENS // self.block_size
        return self.run(OwnRegions((dense_twin(self.block_size),), None), [enough])


def replay_budget(
    replay: Replay, budget_tokens: int, shares: Sequence[float], intervals: Sequence[int]
) -> dict[str, Outcome]:
    """Return the columns of one budget."""
    groups, twin = hybrid(replay.block_size), dense_twin(replay.block_size)
    pool_bytes = budget_tokens * twin.bytes_per_token
    dense = OwnRegions((twin,), None)
    shared = SharedExtents(groups, splits_prompts=True)
    regions = OwnRegions(groups, windows_at_once(_MAX_NUM_SEQS, enable_chunked_prefill=True))
    ours = shared.group_blocks(pool_bytes)
    outcomes = {
        "dense": replay.run(dense, dense.group_blocks(pool_bytes)),
        "ours": replay.run(shared, ours),
        "regions": replay.run(regions, regions.group_blocks(pool_bytes)),
    }
    outcomes |= {f"share {share:g}": replay.run(regions, divide(pool_bytes, groups, share)) for share in shares}
    outcomes |= {f"interval {interval:,}": replay.run(shared, ours, interval) for interval in intervals}
    return outcomes if replay.has_rest else outcomes | replay.run_rules(pool_bytes)  # rules do not support the rest


def of_kind(outcomes: dict[str, Outcome], kind: str) -> dict[str, Outcome]:
    """Return the columns of a kind, share or interval, by the number in their names."""
    return {name.removeprefix(kind): outcome for name, outcome in outcomes.items() if name.startswith(kind)}


def best_share(outcomes: dict[str, Outcome]) -> tuple[str, Outcome]:
    return max(of_kind(outcomes, "share ").items(), key=lambda item: item[1].hit_rate)


def behind(outcomes: dict[str, Outcome]) -> float:
    """Return by what part ours is below the best column that does not know later prompts; 0 if ours is the best."""
    return 1 - outcomes["ours"].hit_rate / max(of.hit_rate for name, of in outcomes.items() if name != "clairvoyant")


def row_of(budget_m: float, outcomes: dict[str, Outcome], endless: Outcome) -> list[str]:
    dense, ours = outcomes["dense"].hit_rate, outcomes["ours"].hit_rate
    share, best = best_share(outcomes)
    missed = outcomes["ours"].window_missed_tokens / max(1, outcomes["ours"].hit_tokens)
    asked_for = ASKED_FOR.get(budget_m)
    return [
        f"{budget_m:g}M",
        f"{dense:.3f}",
        f"{ours:.3f}",
        f"{outcomes['regions'].hit_rate:.3f}",
        f"{best.hit_rate:.3f} ({share})",
        *(f"{outcome.hit_rate:.3f}" for outcome in of_kind(outcomes, "interval ").values()),
        *(f"{outcomes[name].hit_rate:.3f}" if name in outcomes else "" for name in RULES),
        f"{endless.hit_rate:.3f}",
        f"{missed:.2f}",
        f"{behind(outcomes):.1%}",
        f"{ours / dense:.2f}" if dense else "",
        f"≥ {asked_for:g}" if asked_for else "",
    ]


def shares_row(budget_m: float, outcomes: dict[str, Outcome]) -> list[str]:
    return [f"{budget_m:g}M", *(f"{outcome.hit_rate:.3f}" for outcome in of_kind(outcomes, "share ").values())]


def heads_of(intervals: Sequence[int]) -> list[str]:
    of_intervals = [f"interval {interval:,}" for interval in intervals]
    last = ["endless", "missed / hit", "behind", "ours / dense", "asked for"]
    return ["budget", "dense", "ours", "regions", "best share", *of_intervals, *RULES, *last]


def draw(results: dict[float, dict[str, Outcome]], endless: Outcome, file: Path) -> None:
    """Draw hit rates over budgets. Needs matplotlib: `pip install swiftkv[bench]`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = [name for name in next(iter(results.values())) if not name.startswith("share ")]
    for name in names:
        rates = [outcomes[name].hit_rate for outcomes in results.values()]
        axes.plot(list(results), rates, marker="o", markersize=4, label=name)
    best = [best_share(outcomes)[1].hit_rate for outcomes in results.values()]
    axes.plot(list(results), best, "--", label="best share")
    axes.axhline(endless.hit_rate, color="grey", linewidth=0.8, linestyle=":", label="endless")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(results), [f"{budget_m:g}M" for budget_m in results])
    axes.set_ylim(0, None)
    axes.set_xlabel("pool, in tokens of the dense twin")
    axes.set_ylabel("part of the prompt tokens that was cached")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    say(f"{file}")


def figures_of(results: dict[float, dict[str, Outcome]]) -> dict[str, Any]:
    return {f"{budget_m:g}M": {key: vars(of) for key, of in found.items()} for budget_m, found in results.items()}


def options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("trace", type=Path, help="JSON lines, as soak.py takes them")
    made.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=BUDGETS_M,
        help="sizes of the pool, in millions of tokens of the dense twin",
    )
    made.add_argument("--shares", type=float, nargs="+", default=SHARES, help="shares of the pool for sliding windows")
    made.add_argument(
        "--intervals", type=int, nargs="+", default=INTERVALS, help="values of retention_interval, in tokens"
    )
    made.add_argument("--requests", type=int, help="requests to take from the start of the trace; default: all")
    made.add_argument("--block-size", type=int, default=64)
    made.add_argument("--chunk", type=int, default=2048, help="the most tokens of a prompt that one step takes")
    made.add_argument("--rest", action="store_true", help="store the rest of prompts, too")
    made.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    made.add_argument("--plot", type=Path, help="draw the hit rates here")
    made.add_argument("--out", type=Path, help="write every figure here, as JSON")
    return made


def main() -> None:
    args = options().parse_args()
    if args.block_size > BLOCK_TOKENS or BLOCK_TOKENS % args.block_size:
        raise SystemExit(f"--block-size must divide {BLOCK_TOKENS}")
    replay = Replay(read_trace(args.trace)[: args.requests], args.block_size, args.chunk, args.rest)
    endless = replay.endless()
    say(f"{len(replay.arrivals):,} prompts of {replay.num_tokens:,} tokens; endless: {endless.hit_rate:.4f}")
    results = {}
    for budget_m in args.budgets:
        found = replay_budget(replay, int(budget_m * 1e6), args.shares, args.intervals)
        results[budget_m] = found
        rates = ", ".join(f"{key} {outcome.hit_rate:.4f}" for key, outcome in found.items())
        say(f"{budget_m:g}M in {sum(outcome.seconds for outcome in found.values()):.0f} s: {rates}")
    rows = [row_of(budget_m, found, endless) for budget_m, found in results.items()]
    share_rows = [shares_row(budget_m, found) for budget_m, found in results.items()]
    show = table if args.markdown else plain_table
    say("\n" + show(heads_of(args.intervals), rows))
    say("\n" + show(["budget", *(f"share {share:g}" for share in args.shares)], share_rows))
    write_report(args, endless=vars(endless), budgets=figures_of(results))
    if args.plot is not None:
        draw(results, endless, args.plot)


if __name__ == "__main__":
    main()
