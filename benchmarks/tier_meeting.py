"""Compare, in virtual time, loading turn 2 of a conversation, computing it, and the planner's choice:

    python benchmarks/tier_meeting.py

The scheduler, with its prediction of steps, and the planner are real; there is no model and no storage. A step takes as
long as `STEP_TIME_S` says, times how much slower the machine is than when steps were measured. Storage reads backwards
from the last block, `PART_BYTES` at a time, and the engine notices this between two steps. The speeds are multiples of
the one at which computing and loading take equally long. The hybrid has full attention in one layer of six; of the
windows of the others, storage has the tail at the end of turn 1.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from swiftkv._core import GroupSpec, Scheduler, StepPlan, StepTime, StepWork
from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import KVGroup
from swiftkv.tier.load_choice import num_needed
from swiftkv.tier.rates import LoadPlanner, num_not_loaded

BLOCK_TOKENS = 16
PART_BYTES = 8 << 20
THRESHOLD_TOKENS = 256  # `prefetch_threshold`
STEP_TIME_S = [0.5e-3, 5e-8, 5e-8, 1e-4, 0.0, 30e-3]  # of STEP_TIME_TERMS: 2,000 tokens a second, and weights
REST_TOKENS = 24  # new tokens of turn 2, which are stored nowhere
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
SLOWNESS = (0.67, 1.0, 1.5)
_REQUEST_ID = 1


def _group(layers: Sequence[int], **kind: Any) -> KVGroup:
    return KVGroup(tuple(layers), num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=BLOCK_TOKENS, **kind)


MODELS = {
    "dense": (_group(range(28)),),
    "hybrid": (
        _group([layer for layer in range(28) if layer % 6 == 5]),
        _group([layer for layer in range(28) if layer % 6 != 5], kind="window", window=512),
    ),
}


@dataclass(frozen=True)
class Machine:
    """An engine with one model, and its storage."""

    groups: tuple[KVGroup, ...]
    bytes_per_s: float
    slowness: float = 1.0  # the real time of steps over the predicted one

    def step_s(self, plan: StepPlan) -> float:
        """Return how long a step of one prompt takes."""
        work = StepWork()
        [end] = plan.context_lens.tolist()
        work.add_row(end - len(plan.token_ids), len(plan.token_ids))
        return self.slowness * StepTime(STEP_TIME_S).predict(work)

    def load_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of those blocks from `begin` on that a prefix of `end` blocks needs."""
        return sum(num_needed(group, begin, end) * group.block_bytes for group in self.groups)

    def arrivals_s(self, groups: npt.NDArray[np.int32]) -> Iterator[tuple[int, float]]:
        """Yield the number of blocks read and the time, after each part; `groups` has the group of each block."""
        read_bytes = part_bytes = 0
        for count, group in enumerate(groups.tolist(), 1):
            read_bytes += self.groups[group].block_bytes
            part_bytes += self.groups[group].block_bytes
            if part_bytes >= PART_BYTES or count == len(groups):
                part_bytes = 0
                yield count, read_bytes / self.bytes_per_s


def make_scheduler(groups: Sequence[KVGroup], num_blocks: int) -> Scheduler:
    """Return a scheduler that knows how long steps take, with room for two prompts of `num_blocks` blocks."""
    scheduler = Scheduler(
        [GroupSpec(group.num_layers, 2 * num_blocks + 8, group.window, group.layer_block_bytes) for group in groups],
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        max_model_len=(num_blocks + 4) * BLOCK_TOKENS,
    )
    scheduler.remember_step_time(STEP_TIME_S)
    return scheduler


def first_token_s(machine: Machine, num_blocks: int, first: int) -> float:
    """Return when a prompt has its first token, if its blocks from `first` on are loaded.

    The blocks before these are computed meanwhile; with `first` = 0 the prompt waits.
    """
    scheduler = make_scheduler(machine.groups, num_blocks)
    prompt = np.arange(num_blocks * BLOCK_TOKENS + REST_TOKENS, dtype=np.int32)
    scheduler.add_request(
        _REQUEST_ID,
        prompt,
        max_tokens=1,
        min_tokens=0,
        stop_token_ids=np.array([], np.int32),
        namespace=b"",
        skip_prefix_match=False,
    )
    indices, groups, blocks = (np.array([], np.int32) for _ in range(3))
    if first < num_blocks:
        scheduler.hold(_REQUEST_ID)
        indices, groups, blocks, *_ = scheduler.begin_load(_REQUEST_ID, num_blocks, first)
    if 0 < first < num_blocks:
        scheduler.meet(_REQUEST_ID, num_blocks)
    order = np.lexsort((groups, indices))[::-1]
    groups, blocks = groups[order], blocks[order]
    arrivals = list(machine.arrivals_s(groups))
    now_s, num_read = 0.0, 0
    while True:
        while arrivals and arrivals[0][1] <= now_s:
            end = arrivals.pop(0)[0]
            scheduler.end_load(groups[num_read:end], blocks[num_read:end], True)
            num_read = end
        if first == 0 and not arrivals:
            scheduler.let_go(_REQUEST_ID)
        plan = scheduler.schedule(now_s)
        if plan is None:
            now_s = arrivals[0][1]
            continue
        step_s = machine.step_s(plan)
        now_s += step_s
        result = scheduler.commit(np.zeros(len(plan.logits_rows), np.int32), duration_s=step_s)
        if len(result.token_ids):
            return now_s


def chosen_first(machine: Machine, num_blocks: int) -> int:
    """Return the first block that the engine loads; `num_blocks` if it computes all."""
    scheduler = make_scheduler(machine.groups, num_blocks)
    planner = LoadPlanner()
    planner.note_read(1 << 20, (1 << 20) / machine.bytes_per_s, 0.0)

    def compute_s(begin: int, end: int) -> float:
        return scheduler.prefill_s(begin * BLOCK_TOKENS, end * BLOCK_TOKENS) or 0.0

    num_computed = planner.num_to_compute(
        num_blocks, lambda count: machine.load_bytes(count, num_blocks), 0, lambda count: compute_s(0, count)
    )
    if num_computed is not None and (num_blocks - num_computed) * BLOCK_TOKENS >= THRESHOLD_TOKENS:
        return num_not_loaded(num_computed, compute_s)
    is_worth_it = planner.is_worth_loading(machine.load_bytes(0, num_blocks), 0, compute_s(0, num_blocks))
    return 0 if is_worth_it else num_blocks


def of_the_better(
    groups: tuple[KVGroup, ...], num_blocks: int, multiple: float, slowness: float
) -> tuple[float, float]:
    """Return the times of the choice, and of doing both without loss, as parts of the faster way alone.

    Without loss, the computed part takes its part of the time of computing all, and the loaded one likewise.
    """
    all_bytes = Machine(groups, 1.0).load_bytes(0, num_blocks)
    equal = all_bytes / first_token_s(Machine(groups, 1.0), num_blocks, num_blocks)
    machine = Machine(groups, multiple * equal, slowness)
    loading_s, computing_s = (first_token_s(machine, num_blocks, first) for first in (0, num_blocks))
    best_s = min(
        max(count / num_blocks * computing_s, machine.load_bytes(count, num_blocks) / all_bytes * loading_s)
        for count in range(num_blocks + 1)
    )
    chosen_s = first_token_s(machine, num_blocks, chosen_first(machine, num_blocks))
    return chosen_s / min(loading_s, computing_s), best_s / min(loading_s, computing_s)


def main() -> None:
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--history", type=int, nargs="+", default=[512, 1024, 4096, 16384], help="tokens of turn 1")
    options.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    args = options.parse_args()
    print("time of the better of loading and computing; in brackets without any loss")
    for name in args.models:
        for history in args.history:
            print(f"{name}, history of {history} tokens")
            for multiple in MULTIPLES:
                num_blocks = ceil_div(history, BLOCK_TOKENS)
                ratios = (of_the_better(MODELS[name], num_blocks, multiple, slowness) for slowness in SLOWNESS)
                cells = "".join(f"{chosen:8.2f} ({best:.2f})" for chosen, best in ratios)
                print(f"storage {multiple:5.2f} as fast as computing; steps {SLOWNESS} as long as expected:{cells}")


if __name__ == "__main__":
    main()
