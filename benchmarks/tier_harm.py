"""Measure what tiers cost where nothing that they keep is used again:

    python benchmarks/tier_harm.py --rounds 5 --out benchmarks/out/tier_harm.json

Three nodes serve the same model: one without tiers, one with host memory and files that get every block
(`write_through`), one with host memory and files that get blocks used twice (`write_through_selective`). In each round
each node gets --prompts fresh prompts, --at-once at a time, while the others are held still; the order changes from
round to round. Before the next node's turn, all written bytes are synced to the disk. A virtual machine may get memory
from its host only when that is first written, which makes files that grow into it slow. So both tiers are small: soon
they evict as much as they are given, as all tiers do that run for long. Free memory is touched once before all that.

Prints tokens per second, of prompts and answers, and the time between tokens, each beside the node without tiers:
medians, and for the throughput the mean ratio with its standard error.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    only,
    parser,
    quantile,
    say,
    small_checkpoint,
    table,
    write_report,
)

NAME = "small"
_OFF = "none"
_PERCENTILES = (0.5, 0.99)


@dataclass
class Figures:
    """The tokens per second of one node in each round, and all times between tokens."""

    tokens_per_s: list[float] = field(default_factory=list)
    itls_s: list[list[float]] = field(default_factory=list)


async def load(node: Node, prompts: list[list[int]], num_output_tokens: int, at_once: int) -> tuple[float, list[float]]:
    """Send the prompts; return tokens per second, and the times between tokens."""
    turns = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> list[float]:
        async with turns:
            return (await ask(node.target(NAME), prompt, num_output_tokens)).itls_s

    began_s = time.monotonic()
    itls_s = await asyncio.gather(*(one(prompt) for prompt in prompts))
    num_tokens = sum(map(len, prompts)) + len(prompts) * num_output_tokens
    return num_tokens / (time.monotonic() - began_s), [itl_s for of_one in itls_s for itl_s in of_one]


def touch_free_memory() -> None:
    """Write to most of the free memory, and give it back."""
    num_bytes = psutil.virtual_memory().free * 3 // 4
    say(f"touching {num_bytes / 2**30:.1f} GiB of memory")
    with mmap.mmap(-1, num_bytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1


def report(figures: dict[str, Figures]) -> None:
    off = figures[_OFF]
    rows = []
    for label, of in figures.items():
        ratios = [on / without for on, without in zip(of.tokens_per_s, off.tokens_per_s, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        row = [label, f"{statistics.median(of.tokens_per_s):.0f}", f"{statistics.median(ratios):.3f}"]
        row.append(f"{statistics.mean(ratios):.3f} ± {error:.3f}")
        for part in _PERCENTILES:
            at = [quantile(itls_s, part) for itls_s in of.itls_s]
            beside = [on / quantile(itls_s, part) for on, itls_s in zip(at, off.itls_s, strict=True)]
            row += [f"{1000 * statistics.median(at):.1f}", f"{statistics.median(beside):.3f}"]
        rows.append(row)
    heads = ["tiers", "tokens/s", "of none", "mean of none"]
    for part in _PERCENTILES:
        heads += [f"P{100 * part:.0f} between tokens, ms", "of none"]
    say(table(heads, rows))


def main() -> None:
    options = parser(__doc__, rounds=5, default_model=SMALL_MODEL)
    options.add_argument("--prompts", type=int, default=16, help="prompts to each node in each round")
    options.add_argument("--at-once", type=int, default=4)
    options.add_argument("--prompt-tokens", type=int, default=512)
    options.add_argument("--answer-tokens", type=int, default=128)
    options.add_argument("--memory", default="1GiB", help="size of each pool")
    options.add_argument("--host", default="256MiB", help="size of the host memory")
    options.add_argument("--size", default="256MiB", help="size of the storage tier")
    options.add_argument("--storage", type=Path, help="directory for the files; default: a temporary one")
    args = options.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="tier-") as temporary:

        def node(name: str, **tiers: Any) -> Node:
            length = args.prompt_tokens + args.answer_tokens
            return Node(name, {}, [model(NAME, checkpoint, args.memory, max_model_len=length, **tiers)])

        def tiered(policy: str) -> Node:
            path = str(Path(temporary) / policy)
            storage = {"backend": "file", "path": path, "size": args.size, "min_free": 0, "write_policy": policy}
            return node(policy, tiers={"host": {"size": args.host}, "storage": storage})

        nodes = [node(_OFF), tiered("write_through"), tiered("write_through_selective")]
        figures = {each.name: Figures() for each in nodes}
        tokens = Tokens(args.seed, (300, nodes[0].plan(NAME).vocab_size))
        with nodes_up(*nodes):
            for each in nodes:
                each.hold()
            touch_free_memory()
            for number in range(args.rounds + 1):  # the first warms up
                for each in (*nodes[number % len(nodes) :], *nodes[: number % len(nodes)]):
                    prompts = [tokens.fresh(args.prompt_tokens) for _ in range(args.prompts)]
                    with only(each, nodes):
                        per_s, itls_s = asyncio.run(load(each, prompts, args.answer_tokens, args.at_once))
                    os.sync()
                    say(f"round {number}, {each.name}: {per_s:.0f} tokens/s")
                    if number > 0:
                        figures[each.name].tokens_per_s.append(per_s)
                        figures[each.name].itls_s.append(itls_s)
    report(figures)
    write_report(args, figures={name: vars(of) for name, of in figures.items()})


if __name__ == "__main__":
    main()
