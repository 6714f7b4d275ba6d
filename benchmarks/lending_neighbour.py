"""Measure what a lender's own users notice of a master that streams from its memory:

    python benchmarks/lending_neighbour.py --checkpoint CKPT --out benchmarks/out/neighbour.json

There are two nodes of a master and a worker. In one the master's pool is small and most of its conversation lies with
the worker, so every step streams it; in the other lending is off and the master's pool holds it all. In both the master
answers the same requests over and over, and the worker its own, one at a time. Nodes are measured in turns, round by
round, and the other one is held still. The master has one core and the worker another, as they would have a GPU each;
with --shared-cores the system decides.

Prints time to first token and time per output token of the worker's requests: the median over rounds of the ratio of
medians, and the ratio of P99 over all rounds; and how much the master loaded and stored meanwhile, because without
streaming the figures would look good, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from copy_rate import copy_rate
from lending_node import (
    SMALL_MODEL,
    Node,
    StreamSeconds,
    Tokens,
    ask,
    model,
    nodes_up,
    only,
    parser,
    pin,
    quantile,
    say,
    small_checkpoint,
    table,
    time_per_output_token,
    write_report,
)

NUM_DECODED = 32
"""The number of tokens that the worker decodes in each request."""
MASTER_DECODED = 48
MAX_MODEL_LEN = 4096


def make_node(checkpoint: Path, lending: bool, args: argparse.Namespace) -> Node:
    num_threads = len(os.sched_getaffinity(0)) if args.shared_cores else 1
    threads: dict[str, Any] = {"threads": num_threads, "max_model_len": MAX_MODEL_LEN}
    pool = args.small_pool if lending else "1GiB"
    master = model("master", checkpoint, pool, "master", **threads)
    worker = model("worker", checkpoint, "1GiB", lending={"budget": "70%"}, **threads)
    return Node("lending" if lending else "off", {"lending": lending}, [master, worker])


@dataclass
class Measured:
    """The worker's requests in one node, by round, and the master's streaming meanwhile."""

    node: Node
    history: list[int]
    ttft_s: list[list[float]] = field(default_factory=list)
    tpot_s: list[list[float]] = field(default_factory=list)
    master_tpot_s: list[float] = field(default_factory=list)
    stream: list[StreamSeconds] = field(default_factory=list)

    async def round(self, num_requests: int, num_prompt: int, tokens: Tokens) -> None:
        before = await asyncio.to_thread(self.node.stream_seconds, "master")
        load = asyncio.create_task(self._keep_master_busy(tokens))
        ttft_s, tpot_s = [], []
        try:
            for _ in range(num_requests):
                answer = await ask(self.node.target("worker"), tokens.fresh(num_prompt), NUM_DECODED)
                ttft_s.append(answer.ttft_s)
                tpot_s.append(time_per_output_token(answer))
                if load.done():
                    load.result()
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        after = await asyncio.to_thread(self.node.stream_seconds_at_rest, "master")
        self.stream.append(after - before)
        self.ttft_s.append(ttft_s)
        self.tpot_s.append(tpot_s)

    async def _keep_master_busy(self, tokens: Tokens) -> None:
        """Send turns of one conversation without a pause: history that is cached, a few fresh tokens, an answer."""
        while True:
            answer = await ask(self.node.target("master"), self.history + tokens.fresh(64), MASTER_DECODED)
            self.master_tpot_s.append(time_per_output_token(answer))

    def last_round(self) -> str:
        ttft_ms, tpot_ms = (1e3 * statistics.median(of[-1]) for of in (self.ttft_s, self.tpot_s))
        stream = self.stream[-1]
        return (
            f"worker: first token {ttft_ms:7.1f} ms, per token {tpot_ms:6.2f} ms; master: {stream.steps:.0f} steps "
            f"streamed, loads {stream.load_s:.2f} s, stores {stream.store_s:.2f} s"
        )

    def summary(self) -> dict[str, Any]:
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "master_tpot_s": self.master_tpot_s,
            "stream": [vars(stream) for stream in self.stream],
        }


def compare(lending: list[list[float]], off: list[list[float]]) -> tuple[float, float]:
    """Return the median over rounds of the ratio of medians; the ratio of P99 over all rounds."""
    pairs = zip(lending, off, strict=True)
    medians = statistics.median(statistics.median(mine) / statistics.median(other) for mine, other in pairs)
    return medians, quantile(list(chain(*lending)), 0.99) / quantile(list(chain(*off)), 0.99)


def main() -> None:
    arguments = parser(__doc__, rounds=6, default_model=SMALL_MODEL)
    arguments.add_argument("--requests", type=int, default=6, help="requests to the worker, in each round and node")
    arguments.add_argument("--prompt", type=int, default=256, help="tokens of the worker's prompts")
    arguments.add_argument("--history", type=int, default=3072, help="tokens of the master's conversation")
    arguments.add_argument("--small-pool", default="192MiB", help="size of the pool of the master that borrows")
    arguments.add_argument("--shared-cores", action="store_true", help="let all processes run on all cores")
    args = arguments.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    tokens = Tokens(args.seed)
    history = tokens.fresh(args.history)
    cores = sorted(os.sched_getaffinity(0))
    nodes = [make_node(checkpoint, lending, args) for lending in (True, False)]
    sides = [Measured(node, history) for node in nodes]
    with nodes_up(*nodes):
        group = nodes[0].plan("master").groups[0]
        nodes[0].wait_until_borrowed("master", nodes[0].promised_bytes("master"))
        if not args.shared_cores and len(cores) > 1:
            for node in nodes:
                pin(node.engine("master"), cores[:1])
                pin(node.engine("worker"), cores[1:])
        for node in nodes:
            node.hold()
        rates = copy_rate(group, 512)
        say(f"one thread loads layer blocks of {group.layer_block_bytes >> 10} KiB at {rates[0] / 1e9:.1f} GB/s")
        for node in nodes:
            with only(node, nodes):
                say(f"{node.name}: the master reads its {args.history:,} tokens")
                asyncio.run(ask(node.target("master"), history, 8))
                asyncio.run(ask(node.target("worker"), tokens.fresh(args.prompt), 8))
        for number in range(args.rounds):
            for side in sides if number % 2 else sides[::-1]:
                with only(side.node, nodes):
                    asyncio.run(side.round(args.requests, args.prompt, tokens))
                say(f"round {number + 1}  {side.node.name:8s} {side.last_round()}")
    report(sides, args)


def report(sides: list[Measured], args: argparse.Namespace) -> None:
    lending, off = sides
    rows, ratios = [], {}
    for label, key in (("time to first token", "ttft_s"), ("time per output token", "tpot_s")):
        ratios[key] = compare(getattr(lending, key), getattr(off, key))
        values = [list(chain(*getattr(side, key))) for side in sides]
        cells = [f"{1e3 * statistics.median(of):.1f}" for of in values]
        cells += [f"{1e3 * quantile(of, 0.99):.1f}" for of in values]
        rows.append([f"{label}, ms", *cells, *(f"{ratio:.3f}" for ratio in ratios[key])])
    heads = [
        "the worker's",
        "median, streamed from",
        "median, not",
        "P99, streamed from",
        "P99, not",
        "medians",
        "P99s",
    ]
    say("\nAsked for: ratios of at most 1.05\n\n" + table(heads, rows))
    steps, load_s = sum(of.steps for of in lending.stream), sum(of.load_s for of in lending.stream)
    if not steps:
        raise SystemExit("the master streamed nothing: nothing was measured")
    own_ms = [1e3 * statistics.median(side.master_tpot_s) for side in sides]
    say(
        f"\nThe master streamed in {steps:.0f} steps, {1e3 * load_s / steps:.1f} ms of loads each; "
        f"its own time per token {own_ms[0]:.1f} ms, {own_ms[1]:.1f} ms without lending"
    )
    write_report(args, ratios=ratios, lending=lending.summary(), off=off.summary())


if __name__ == "__main__":
    main()
