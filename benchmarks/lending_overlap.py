"""Measure how much of layer streaming's copying is hidden behind computing, in a long prefill:

    python benchmarks/lending_overlap.py --checkpoint CKPT --out benchmarks/out/overlap.json

Each round sends the same requests to three nodes, in turns, while the others are held still: one with one layer-stream
buffer, one with two, and one with lending off and a pool that holds everything. A master with a small pool borrows from
an idle worker:

- spilling: the pool does not hold the prompt; its blocks go to the worker while it is computed, chunk by chunk, and
  every later chunk reads them from there.
- borrowed prefix: the same prompt again and `--new` fresh tokens; most of the prefix lies with the worker.

`load` and `store` are the time of the copies, `exposed` is the time that computing waited for them, all as a part of
the time to first token. The target is 1 % exposed, where the link allows it: copies must take less time than the layers
they hide behind. So the report also says how fast the link is (one thread that copies in shared memory) and whether
that is enough. The ratio of the time to first token to that without lending counts everything: on a machine whose cores
share their memory bandwidth, even hidden copies slow computing down.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from copy_rate import copy_rate
from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    only,
    parser,
    say,
    small_checkpoint,
    table,
    tiny_checkpoint,
    write_report,
)

MAX_MODEL_LEN = 8192
LOADS = ("spilling", "borrowed prefix")


@dataclass(frozen=True)
class Prefill:
    """One request; times in seconds."""

    node: str
    load: str
    ttft_s: float
    queue_s: float
    prefill_s: float
    load_s: float
    store_s: float
    exposed_s: float
    steps: int
    num_peer_tokens: int  # tokens of the prefix that lay with the worker


def make_node(checkpoint: Path, buffers: int, args: argparse.Namespace) -> Node:
    """Return a node with `buffers` stream buffers; 0: without lending."""
    options = {"threads": args.threads, "max_num_batched_tokens": args.chunk, "max_num_seqs": 16}
    if buffers == 0:
        master = model("master", checkpoint, "1GiB", "master", max_model_len=MAX_MODEL_LEN, **options)
        return Node("off", {"lending": "off"}, [master])
    master = model("master", checkpoint, args.small_pool, "master", **options)
    worker = model("worker", tiny_checkpoint(), args.lent, threads=1, lending={"budget": "100%"})
    name = f"{buffers} buffer{'s' if buffers > 1 else ''}"
    return Node(name, {"lending": {"stream_buffers": buffers}}, [master, worker])


def prefill(node: Node, load: str, prompt: list[int]) -> Prefill:
    before = node.stream_seconds_at_rest("master")
    answer = asyncio.run(ask(node.target("master"), prompt, 1))
    spent = node.stream_seconds_at_rest("master") - before
    return Prefill(
        node=node.name,
        load=load,
        ttft_s=answer.ttft_s,
        queue_s=spent.queue_s,
        prefill_s=spent.prefill_s,
        load_s=spent.load_s,
        store_s=spent.store_s,
        exposed_s=spent.exposed_s,
        steps=int(spent.steps),
        num_peer_tokens=int(spent.peer_hit_tokens),
    )


def measure(nodes: list[Node], args: argparse.Namespace, tokens: Tokens) -> list[Prefill]:
    found = []
    for number in range(args.rounds):
        history, fresh = tokens.fresh(args.prompt), tokens.fresh(args.new)
        for node in nodes if number % 2 else nodes[::-1]:
            with only(node, nodes):
                time.sleep(0.2)
                for load, prompt in zip(LOADS, (history, history + fresh), strict=True):
                    found.append(prefill(node, load, prompt))
                    say(f"round {number + 1}  {node.name:10s} {load:16s} {describe(found[-1])}")
    return found


def describe(one: Prefill) -> str:
    return (
        f"first token {1e3 * one.ttft_s:7.0f} ms, load {1e3 * one.load_s:6.1f}, store {1e3 * one.store_s:6.1f}, "
        f"exposed {1e3 * one.exposed_s:6.1f}; {one.num_peer_tokens} prefix tokens with the worker"
    )


def report(found: list[Prefill], nodes: list[Node]) -> str:
    """Return the table of medians over rounds."""
    rows = []
    for load in LOADS:
        of_node = {node.name: [one for one in found if (one.node, one.load) == (node.name, load)] for node in nodes}
        for name, these in of_node.items():
            cells = [""] * 4
            if name != "off":
                cells = [
                    f"{statistics.median(getattr(one, key) / one.ttft_s for one in these):.2%}"
                    for key in ("load_s", "store_s", "exposed_s")
                ]
                pairs = zip(these, of_node["off"], strict=True)
                cells.append(f"{statistics.median(one.ttft_s / off.ttft_s for one, off in pairs):.3f}")
            rows.append([load, name, f"{1e3 * statistics.median(one.ttft_s for one in these):,.0f}", *cells])
    return table(["prefill", "", "first token, ms", "load", "store", "exposed", "first token / off"], rows)


def link_remark(found: list[Prefill], bytes_per_token: int, rate: float) -> str:
    """Explain the borrowed prefix by the link's speed. `rate`: bytes a second."""
    prefixed = [one for one in found if one.load == "borrowed prefix"]
    num_bytes = max(one.num_peer_tokens for one in prefixed) * bytes_per_token
    copy_s = num_bytes / rate
    compute_s = statistics.median(one.ttft_s for one in prefixed if one.node == "off")
    part = copy_s / compute_s
    return (
        f"{num_bytes / 2**20:,.0f} MiB of borrowed prefix take {1e3 * copy_s:.0f} ms at the link's {rate / 1e9:.1f} "
        f"GB/s, {part:.1%} of the {1e3 * compute_s:.0f} ms\nthat computing takes without lending: the link is "
        f"{'fast enough' if part < 1 else 'TOO SLOW'} to hide that"
    )


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    arguments = parser(__doc__, rounds=4, default_model=SMALL_MODEL)
    arguments.add_argument("--prompt", type=int, default=3072, help="tokens of the first prompt")
    arguments.add_argument("--new", type=int, default=512, help="fresh tokens of the second prompt")
    arguments.add_argument("--chunk", type=int, default=1024, help="the most prompt tokens of a step")
    arguments.add_argument("--small-pool", default="192MiB", help="size of the pool of the master that borrows")
    arguments.add_argument("--lent", default="640MiB", help="size of the worker's pool, all of which is lent")
    arguments.add_argument(
        "--threads",
        type=int,
        default=max(1, cores - 1),
        help="threads of the master; default: one for all cores but one",
    )
    args = arguments.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    tokens = Tokens(args.seed)
    nodes = [make_node(checkpoint, buffers, args) for buffers in (1, 2, 0)]
    with nodes_up(*nodes):
        plan = nodes[0].plan("master")
        for node in nodes[:2]:
            node.wait_until_borrowed("master", node.promised_bytes("master"))
        for node in nodes:
            node.hold()
        load_rate, store_rate = copy_rate(plan.groups[0], 1024)
        say(f"the link, one thread: loads {load_rate / 1e9:.1f} GB/s, stores {store_rate / 1e9:.1f} GB/s")
        for node in nodes:
            with only(node, nodes):
                asyncio.run(ask(node.target("master"), tokens.fresh(args.prompt), 4))
        found = measure(nodes, args, tokens)
    say(f"\n{args.threads} thread(s) compute, one copies; asked for: less than 1 % exposed\n")
    say(report(found, nodes) + "\n\n" + link_remark(found, plan.bytes_per_token, load_rate))
    rates: dict[str, Any] = {"load": load_rate, "store": store_rate}
    write_report(args, link_bytes_per_s=rates, prefills=[asdict(one) for one in found])


if __name__ == "__main__":
    main()
