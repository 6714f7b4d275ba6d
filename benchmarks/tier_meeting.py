"""Compare loading turn 2 of a conversation, computing it and what the planner chooses, in virtual time:

    python benchmarks/tier_meeting.py

The real scheduler, with its prediction of steps, and the real planner; no model and no storage. A step takes as long as
`STEP_TIME_S` says, times how much slower the machine is than when steps were measured. Storage reads from the last
block on, `PART` blocks at a time, and the engine notices between two steps. The speeds are multiples of the one at
which computing and loading take equally long.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from swiftkv._core import GroupSpec, Scheduler, StepPlan, StepTime, StepWork
from swiftkv.arithmetic import ceil_div
from swiftkv.tier.rates import LoadPlanner, num_not_loaded

BLOCK_TOKENS = 16
PART = 4
STEP_TIME_S = [0.5e-3, 5e-8, 5e-8, 1e-4, 0.0, 30e-3]  # of STEP_TIME_TERMS: 2,000 tokens a second, and weights
REST_TOKENS = 24  # of turn 2, which nobody has
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
SLOWNESS = (0.67, 1.0, 1.5)
_REQUEST_ID = 1


@dataclass(frozen=True)
class Machine:
    """An engine and its storage."""

    blocks_per_s: float
    slowness: float = 1.0  # of steps, beside what is predicted

    def step_s(self, plan: StepPlan) -> float:
        """Return how long a step takes that computes a part of one prompt."""
        work = StepWork()
        [end] = plan.context_lens.tolist()
        work.add_row(end - len(plan.token_ids), len(plan.token_ids))
        return self.slowness * StepTime(STEP_TIME_S).predict(work)

    def arrivals_s(self, num_blocks: int) -> Iterator[tuple[int, float]]:
        """Yield the numbers of blocks that are read at once, and when they have come."""
        for begin in range(0, num_blocks, PART):
            end = min(num_blocks, begin + PART)
            yield end - begin, end / self.blocks_per_s


def make_scheduler(num_blocks: int) -> Scheduler:
    """Return a scheduler that knows how long steps take, and has room for a prompt of so many blocks twice."""
    scheduler = Scheduler(
        [GroupSpec(1, 2 * num_blocks + 8, 0)],
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        max_model_len=(num_blocks + 4) * BLOCK_TOKENS,
    )
    scheduler.remember_step_time(STEP_TIME_S)
    return scheduler


def first_token_s(machine: Machine, num_blocks: int, first: int) -> float:
    """Return when a prompt has its first token of which blocks from `first` on are loaded.

    Those before are computed meanwhile; with 0 the prompt waits.
    """
    scheduler = make_scheduler(num_blocks)
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
    groups, blocks = np.array([], np.int32), np.array([], np.int32)
    if first < num_blocks:
        scheduler.hold(_REQUEST_ID)
        _, groups, blocks, _ = scheduler.begin_load(_REQUEST_ID, num_blocks, first)
    if 0 < first < num_blocks:
        scheduler.meet(_REQUEST_ID, num_blocks)
    groups, blocks = groups[::-1].copy(), blocks[::-1].copy()
    arrivals = list(machine.arrivals_s(len(blocks)))
    now_s, num_read = 0.0, 0
    while True:
        while arrivals and arrivals[0][1] <= now_s:
            end = num_read + arrivals.pop(0)[0]
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
    """Return the first block that the engine loads; `num_blocks`: it computes all."""
    scheduler = make_scheduler(num_blocks)
    planner = LoadPlanner()
    planner.note_read(1 << 20, 1 / machine.blocks_per_s, 0.0)

    def compute_s(begin: int, end: int) -> float:
        return scheduler.prefill_s(begin * BLOCK_TOKENS, end * BLOCK_TOKENS) or 0.0

    num_computed = planner.num_to_compute(
        num_blocks, lambda count: (num_blocks - count) << 20, 0, lambda count: compute_s(0, count)
    )
    if num_computed is not None:
        return num_not_loaded(num_computed, compute_s)
    return 0 if planner.is_worth_loading(num_blocks << 20, 0, compute_s(0, num_blocks)) else num_blocks


def of_the_better(num_blocks: int, multiple: float, slowness: float) -> tuple[float, float]:
    """Return what the choice takes, and what both ends without any loss would take, of the better of both alone."""
    equal = num_blocks / first_token_s(Machine(1.0), num_blocks, num_blocks)
    machine = Machine(multiple * equal, slowness)
    loading_s, computing_s = (first_token_s(machine, num_blocks, first) for first in (0, num_blocks))
    best_s = 1 / (1 / loading_s + 1 / computing_s)
    chosen_s = first_token_s(machine, num_blocks, chosen_first(machine, num_blocks))
    return chosen_s / min(loading_s, computing_s), best_s / min(loading_s, computing_s)


def main() -> None:
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--history", type=int, nargs="+", default=[512, 1024, 4096, 16384], help="tokens of turn 1")
    for history in options.parse_args().history:
        print(f"history of {history} tokens: of the better of both; in brackets without any loss")
        for multiple in MULTIPLES:
            ratios = (of_the_better(ceil_div(history, BLOCK_TOKENS), multiple, slowness) for slowness in SLOWNESS)
            cells = "".join(f"{chosen:8.2f} ({best:.2f})" for chosen, best in ratios)
            print(f"storage {multiple:5.2f} as fast as computing; steps {SLOWNESS} as long as expected:{cells}")


if __name__ == "__main__":
    main()
