"""Measure scheduling policies in virtual time, with the real scheduler and no model:

    python benchmarks/policies.py mooncake_conversation.jsonl

Clients send the prompts of a trace, each its next one when it has the answer to the one before (a closed loop). A step
takes as long as a law says: 22 ms, 1.27 ms a token and 0.25 us for each token that a token looks back on, what
Qwen3-0.6B's shape takes on two cores. Lengths are those of the trace over --shrink. The figures do not depend on the
machine. Columns: seconds to the first token (mean, P50, P90, P99, longest), the same in relation to fcfs, the part of
prompt tokens that was cached, and prompt tokens a second of virtual time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from lending_node import quantile, say, table

from swiftkv import _core
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival, read_trace
from swiftkv.policies import SchedulingPolicy

_NO_STOP = np.array([], np.int32)
_MAX_MODEL_LEN = 16_384


@dataclass(frozen=True)
class Outcome:
    ttft_s: tuple[float, ...]
    hit_rate: float
    prompt_tokens_per_s: float

    @property
    def figures(self) -> tuple[float, ...]:
        parts = (quantile(self.ttft_s, part) for part in (0.5, 0.9, 0.99, 1.0))
        return float(np.mean(self.ttft_s)), *parts


def step_s(work: _core.StepWork) -> float:
    return 0.0225 + 1.27e-3 * work.num_tokens + 2.5e-7 * (work.prompt_pairs + work.decode_context)


class ClosedLoop:
    """Clients around one scheduler in virtual time."""

    def __init__(self, policy: SchedulingPolicy, args: argparse.Namespace) -> None:
        self._scheduler = _core.Scheduler(
            [_core.GroupSpec(1, args.pool_tokens // args.block_size)],
            block_size=args.block_size,
            max_num_seqs=args.seqs,
            max_num_batched_tokens=2048,
            max_model_len=_MAX_MODEL_LEN,
            scheduling_policy=policy,
            target_tpot_s=args.target_s,
        )
        self._shrink = args.shrink
        self._now_s = 0.0
        self._sent_s: dict[int, float] = {}
        self._ttft_s: list[float] = []
        self._num_tokens = 0

    def run(self, arrivals: Sequence[Arrival], num_clients: int) -> Outcome:
        rest = iter(enumerate(arrivals))
        for _, (number, arrival) in zip(range(num_clients), rest, strict=False):
            self._send(number, arrival)
        while (plan := self._scheduler.schedule(self._now_s)) is not None:
            duration_s = step_s(plan.work)
            self._now_s += duration_s
            result = self._scheduler.commit(np.zeros(len(plan.logits_rows), np.int32), duration_s)
            for number in result.request_ids.tolist():
                if (sent_s := self._sent_s.pop(number, None)) is not None:
                    self._ttft_s.append(self._now_s - sent_s)
            for _, (number, arrival) in zip(range(int((result.finish_reasons > 0).sum())), rest, strict=False):
                self._send(number, arrival)
        stats = self._scheduler.stats()
        hit_rate = stats.prefix_hit_tokens_total / stats.prefix_query_tokens_total
        return Outcome(tuple(self._ttft_s), hit_rate, self._num_tokens / self._now_s)

    def _send(self, number: int, arrival: Arrival) -> None:
        ids = np.repeat(np.array(arrival.blocks, np.int32), BLOCK_TOKENS // self._shrink)
        max_tokens = max(1, arrival.output_tokens // self._shrink)
        prompt = ids[: max(1, min(arrival.input_tokens // self._shrink, _MAX_MODEL_LEN - max_tokens - 1))]
        self._sent_s[number] = self._now_s
        self._num_tokens += len(prompt)
        self._scheduler.add_request(
            number,
            prompt,
            max_tokens,
            0,
            _NO_STOP,
            b"model",
            False,
            arrival_s=self._now_s,
            deadline_s=self._now_s + 10,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seqs", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--shrink", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=128_000)
    parser.add_argument("--target-s", type=float, help="target_tpot; default: off")
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    args = parser.parse_args()
    arrivals = read_trace(args.trace)[: args.requests]
    policies: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
    outcomes = {policy: ClosedLoop(policy, args).run(arrivals, args.clients) for policy in policies}
    base = outcomes["fcfs"].figures
    rows = []
    for policy, outcome in outcomes.items():
        seconds = [f"{value:.2f}" for value in outcome.figures]
        ratios = [f"x {value / at:.2f}" for value, at in zip(outcome.figures, base, strict=True)]
        rates = (f"{outcome.hit_rate:.1%}", f"{outcome.prompt_tokens_per_s:,.0f}")
        rows.append((policy, *(f"{s} ({r})" for s, r in zip(seconds, ratios, strict=True)), *rates))
    say(table(("", "mean", "P50", "P90", "P99", "longest", "cached", "tok/s"), rows))
    if args.out is not None:
        args.out.write_text(json.dumps({policy: asdict(outcome) for policy, outcome in outcomes.items()}) + "\n")


if __name__ == "__main__":
    main()
