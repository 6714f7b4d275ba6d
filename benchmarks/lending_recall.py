"""Measure how fast a lender gets its memory back, and how fast the borrower sees that a budget has changed:

    python benchmarks/lending_recall.py --checkpoint CKPT --out benchmarks/out/recall.json

A worker lends 256 MiB, full of the master's cached blocks. Then its budget is set to 0 over the admin API, while the
master is idle, while it decodes, and while it prefills; and is set back. The time until the admin API answers is
compared with the time allowed: one step of the master, measured in the same round, and the copy of those bytes, at the
speed of one thread that copies in shared memory here.

Meanwhile another thread asks the master's coordinator for its state, over and over: the time from sending the request
to the first answer that shows the new budget's effect is the time until the borrower sees it. Target: 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import msgspec
import zmq
from copy_rate import copy_rate
from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    parser,
    say,
    small_checkpoint,
    table,
    tiny_checkpoint,
    write_report,
)

from swiftkv.bench.client import TimedAnswer, send
from swiftkv.latency import prefer_latency
from swiftkv.lease.messages import LendingState, ShowLending

LENT_BYTES = 258 << 20  # rounded down to extents, it is still 256 MiB
STATES = ("idle", "decoding", "prefilling")
SEEN_TIMEOUT_S = 30
FILL_TOKENS = 512


@dataclass(frozen=True)
class Recalled:
    """One recall and the offer after it; seconds."""

    state: str
    num_bytes: int
    took_s: float  # as the worker reports it
    answered_s: float  # the whole PATCH
    recall_seen_s: float  # until the master's coordinator shows that an extent is recalled
    offer_seen_s: float  # until it shows that an extent is borrowed again
    step_s: float  # of the master, in this state


class Watcher:
    """Asks a coordinator for its state over and over, and knows when it first showed a given state."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(LendingState)

    def state(self) -> LendingState:
        self._socket.send(msgspec.msgpack.encode(ShowLending(1)))
        if not self._socket.poll(1000 * SEEN_TIMEOUT_S):
            raise SystemExit("the coordinator does not answer")
        return self._decoder.decode(self._socket.recv())

    def borrowed_extents(self) -> int:
        """Return the number of extents that are held and not recalled."""
        return sum(link.counts["held"] for link in self.state().borrows)

    def wait_for(self, shows: Callable[[int], bool]) -> float:
        """Return the perf_counter seconds at which `shows` first held for `borrowed_extents`."""
        deadline_s = time.monotonic() + SEEN_TIMEOUT_S
        while not shows(self.borrowed_extents()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"not seen within {SEEN_TIMEOUT_S} s")
        return time.perf_counter()

    def close(self) -> None:
        self._context.destroy(linger=0)


def set_and_watch(
    node: Node, watcher: Watcher, num_bytes: int, shows: Callable[[int], bool]
) -> tuple[dict[str, Any], float, float]:
    """Set a budget. Return the answer, how long it took, and how long until the master showed it.

    Where engines keep all cores busy, the watcher must not wait for a core.
    """
    seen: list[float] = []

    def watch() -> None:
        prefer_latency()
        seen.append(watcher.wait_for(shows))

    thread = threading.Thread(target=watch)
    thread.start()
    prefer_latency()
    begin_s = time.perf_counter()
    change = node.set_budget("worker", num_bytes)
    answered_s = time.perf_counter() - begin_s
    thread.join()
    if not seen:
        raise SystemExit("the budget's effect was not seen")
    return change, answered_s, seen[0] - begin_s


class Master:
    """Puts the master into a state, and measures what a step takes there."""

    def __init__(self, node: Node, tokens: Tokens, args: argparse.Namespace) -> None:
        self._node = node
        self._tokens = tokens
        self._args = args

    def fill(self, watcher: Watcher) -> None:
        """Compute prompts until the borrowed memory is full of cached blocks."""
        while watcher.state().groups[0].borrowed_free > FILL_TOKENS // self._node.plan("master").block_size:
            asyncio.run(ask(self._node.target("master"), self._tokens.fresh(FILL_TOKENS), 1))

    async def recall(self, state: str, watcher: Watcher) -> Recalled:
        target = self._node.target("master")
        load: asyncio.Task[TimedAnswer] | None = None
        async with httpx.AsyncClient(timeout=900) as client:
            if state == "decoding":
                prompt = self._tokens.fresh(256)
                await ask(target, prompt, 1)  # the decoding that follows has no prefill before it
                load = asyncio.create_task(send(client, target, prompt, self._args.decoded))
                await asyncio.sleep(self._args.warm_s)
            elif state == "prefilling":
                load = asyncio.create_task(send(client, target, self._tokens.fresh(self._args.prefilled), 1))
                await asyncio.sleep(self._args.warm_s / 2)
            lent = self._node.promised_bytes("master")
            held = watcher.borrowed_extents()
            change, answered_s, recall_seen_s = await asyncio.to_thread(
                set_and_watch, self._node, watcher, 0, lambda extents: extents < held
            )
            if load is not None and load.done():
                raise SystemExit(f"the master was no longer {state}; give it more to do (--decoded, --prefilled)")
            _, _, offer_seen_s = await asyncio.to_thread(
                set_and_watch, self._node, watcher, lent, lambda extents: extents > 0
            )
            step_s = step_seconds(state, await load, self._args) if load is not None else 0.0
        return Recalled(
            state, change["recalled_bytes"], change["took_s"], answered_s, recall_seen_s, offer_seen_s, step_s
        )


def step_seconds(state: str, answer: TimedAnswer, args: argparse.Namespace) -> float:
    """Return the seconds of one step; for decode steps the median, because a recall disturbed one of them."""
    if answer.error:
        raise SystemExit(f"the master, {state}: {answer.error}")
    if state == "decoding":
        return statistics.median(answer.itls_s)
    return float(answer.ttft_s / -(-args.prefilled // args.chunk))


def with_worst(values_s: list[float]) -> str:
    return f"{1e3 * statistics.median(values_s):.1f} ({1e3 * max(values_s):.1f})"


def report(found: list[Recalled], rate: float) -> str:
    rows = []
    for state in STATES:
        these = [one for one in found if one.state == state]
        worst = max(these, key=lambda one: one.took_s)
        copy_s = worst.num_bytes / rate
        step_s = statistics.median(one.step_s for one in these)
        rows.append(
            [
                state,
                f"{worst.num_bytes / 2**20:.0f}",
                f"{1e3 * statistics.median(one.took_s for one in these):.1f}",
                f"{1e3 * worst.took_s:.1f}",
                f"{1e3 * step_s:.1f}",
                f"{1e3 * copy_s:.1f}",
                f"{worst.took_s / (step_s + copy_s):.2f}",
                with_worst([one.recall_seen_s for one in these]),
                with_worst([one.offer_seen_s for one in these]),
            ]
        )
    heads = ["the master is", "MiB", "recall, ms", "worst", "a step", "the copy", "worst / (step + copy)"]
    heads += ["0 seen after, ms (worst)", "256 MiB seen after"]
    return table(heads, rows)


def main() -> None:
    arguments = parser(__doc__, rounds=7, default_model=SMALL_MODEL)
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of the master")
    arguments.add_argument("--small-pool", default="192MiB", help="size of the master's pool")
    arguments.add_argument("--chunk", type=int, default=512, help="prompt tokens of one of the master's prefill steps")
    arguments.add_argument("--decoded", type=int, default=96, help="tokens that the master generates while it decodes")
    arguments.add_argument(
        "--prefilled", type=int, default=1536, help="tokens of the prompt that the master computes while it prefills"
    )
    arguments.add_argument(
        "--warm-s", type=float, default=1.0, help="seconds from a request to the change of the budget"
    )
    args = arguments.parse_args()
    options = {"threads": args.threads, "max_num_batched_tokens": args.chunk, "max_num_seqs": 16, "max_model_len": 2048}
    master = model("master", small_checkpoint(args.checkpoint), args.small_pool, "master", **options)
    worker = model("worker", tiny_checkpoint(), "512MiB", threads=1, lending={"budget": f"{LENT_BYTES}B"})
    node = Node("node", {}, [master, worker])
    found: list[Recalled] = []
    with nodes_up(node):
        node.wait_until_borrowed("master", node.promised_bytes("master"))
        rate, _ = copy_rate(node.plan("master").groups[0], 1024)
        say(f"the link, one thread: {rate / 1e9:.1f} GB/s")
        watcher = Watcher(node.leases_address("master"))
        loaded = Master(node, Tokens(args.seed), args)
        for number in range(args.rounds):
            for state in STATES:
                node.wait_until_borrowed("master", node.promised_bytes("master"))
                loaded.fill(watcher)
                found.append(asyncio.run(loaded.recall(state, watcher)))
                one = found[-1]
                say(
                    f"round {number + 1}  {state:10s} {one.num_bytes / 2**20:.0f} MiB home after "
                    f"{1e3 * one.took_s:6.1f} ms, a step {1e3 * one.step_s:6.1f} ms; "
                    f"seen after {1e3 * one.recall_seen_s:5.1f}, the offer after {1e3 * one.offer_seen_s:5.1f}"
                )
        watcher.close()
    say("\nAsked for: a recall within one step and the copy; a budget seen within 20 ms\n\n" + report(found, rate))
    write_report(args, link_bytes_per_s=rate, recalls=[asdict(one) for one in found])


if __name__ == "__main__":
    main()
