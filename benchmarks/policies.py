"""Measure scheduling policies in virtual time, with the real scheduler and no model:

    python benchmarks/policies.py mooncake_conversation.jsonl

Clients send the prompts of a trace; each sends its next one when it has the answer to the one before (a closed loop). A
step takes 22 ms, 1.27 ms a token and 0.25 us for each token that a token looks back on, as Qwen3-0.6B's shape does on
two cores. Lengths are those of the trace divided by --shrink. The figures do not depend on the machine. Columns:
seconds to the first token (mean, P50, P90, P99, longest), their ratios to fcfs, the part of prompt tokens that was
cached, and prompt tokens a second of virtual time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
from lending_node import quantile, say, table

from swiftkv import _core
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival, read_trace
from swiftkv.policies import SchedulingPolicy
from swiftkv.simulate.simulator import Outcome, simulate

COLUMNS = ("", "mean", "P50", "P90", "P99", "longest", "cached", "tok/s")
_MAX_MODEL_LEN = 16_384
_COLOURS: dict[SchedulingPolicy, str] = {"fcfs": "#9aa5b1", "spf": "#f0b35b", "hrrn": "#2f7ebc", "turns": "#4f9d69"}


def step_s(plan: _core.StepPlan) -> float:
    work = plan.work
    return 0.0225 + 1.27e-3 * work.num_tokens + 2.5e-7 * (work.prompt_pairs + work.decode_context)


def shortened(arrival: Arrival, factor: int) -> Arrival:
    output_tokens = max(1, arrival.output_tokens // factor)
    input_tokens = max(1, min(arrival.input_tokens // factor, _MAX_MODEL_LEN - output_tokens - 1))
    return replace(arrival, input_tokens=input_tokens, output_tokens=output_tokens, block_tokens=BLOCK_TOKENS // factor)


def serve(
    policy: SchedulingPolicy, arrivals: Sequence[Arrival], args: argparse.Namespace, num_clients: int | None = None
) -> Outcome:
    """Serve requests as they arrive, or as `num_clients` clients send them, each its next one after an answer."""
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, args.pool_tokens // args.block_size)],
        block_size=args.block_size,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=2048,
        max_model_len=_MAX_MODEL_LEN,
        scheduling_policy=policy,
        target_tpot_s=args.target_s,
    )
    return simulate(scheduler, _MAX_MODEL_LEN, step_s, arrivals, num_clients)


def trace_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of programs that serve a trace in virtual time."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seqs", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--shrink", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=128_000)
    return parser


def ttft_figures(ttft_s: Sequence[float]) -> list[float]:
    return [float(np.mean(ttft_s)), *(quantile(ttft_s, part) for part in (0.5, 0.9, 0.99, 1.0))]


def rates(num_cached: float, num_tokens: float, elapsed_s: float) -> list[str]:
    """Return the part of prompt tokens that was cached, and the prompt tokens a second."""
    return [f"{num_cached / num_tokens:.1%}", f"{num_tokens / elapsed_s:,.0f}"]


def compared(outcomes: dict[SchedulingPolicy, Outcome]) -> str:
    """Return a table with a row for each policy."""
    figures = {policy: ttft_figures(outcome.ttft_s.tolist()) for policy, outcome in outcomes.items()}
    rows = []
    for policy, outcome in outcomes.items():
        pairs = zip(figures[policy], figures["fcfs"], strict=True)
        of_all = rates(outcome.cached_tokens.sum(), outcome.input_tokens.sum(), outcome.end_s.max())
        rows.append((policy, *(f"{value:.2f} (x {value / base:.2f})" for value, base in pairs), *of_all))
    return table(COLUMNS, rows)


def draw(outcomes: dict[SchedulingPolicy, Outcome], title: str, file: Path) -> None:
    """Draw how many requests had their first token by when. Needs matplotlib: `pip install swiftkv[bench]`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for policy, colour in _COLOURS.items():
        ttft_s = np.sort(outcomes[policy].ttft_s)
        axes.plot(ttft_s, 100 * np.arange(1, len(ttft_s) + 1) / len(ttft_s), color=colour, label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("% of the requests")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper left", frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = trace_parser(__doc__)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--target-s", type=float, help="target_tpot; default: off")
    parser.add_argument("--out", type=Path, help="write the times to the first token here, as JSON")
    parser.add_argument("--plot", type=Path, help="draw the times to the first token here")
    args = parser.parse_args()
    arrivals = [shortened(arrival, args.shrink) for arrival in read_trace(args.trace)[: args.requests]]
    policies: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
    outcomes = {policy: serve(policy, arrivals, args, args.clients) for policy in policies}
    say(compared(outcomes))
    if args.plot is not None:
        draw(outcomes, f"chats, {args.clients} clients", args.plot)
    if args.out is not None:
        args.out.write_text(
            json.dumps({policy: outcome.ttft_s.tolist() for policy, outcome in outcomes.items()}) + "\n"
        )


if __name__ == "__main__":
    main()
