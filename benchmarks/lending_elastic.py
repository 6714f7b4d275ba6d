"""Measure lending, taking back, borrowing and recalling an extent, in pools of a thousand to a million blocks:

    python benchmarks/lending_elastic.py --out benchmarks/out/elastic.json

swiftkv's pools are block-major, so all four touch metadata only. They are compared with a layer-major pool, which has
to move the blocks of all layers but the first when it grows or shrinks by a block (SwiftCache, section 3.4 and Figure
5): a real flat buffer, moved by memmove, with `--layer-block-bytes` small enough that a million blocks fit in memory.
The last column has the time that it would take with Qwen3-0.6B's layer blocks of 65,536 bytes, at the bandwidth of the
largest pool here. Figures are median microseconds per extent; a flat column is O(1).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from lending_node import parser, say, table, write_report

from swiftkv._core import GroupSpec, Link, Scheduler

NUM_LAYERS = 28
REAL_LAYER_BLOCK_BYTES = 65536
BLOCK_SIZE = 16
NO_STOP = np.array([], np.int32)


@dataclass(frozen=True)
class Figures:
    """Microseconds per extent, which is one block; of `layer_major`, per block that the pool gains or loses."""

    num_blocks: int
    lend_free: float
    take_back: float
    lend_cached: float
    borrow: float
    recall: float
    grow_layer_major: float
    shrink_layer_major: float
    moved_bytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return 2 * self.moved_bytes / (self.grow_layer_major + self.shrink_layer_major) * 1e6


def time_us(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return (time.perf_counter() - begin_s) * 1e6


def elastic(num_blocks: int, num_extents: int, rounds: int) -> tuple[float, float, float]:
    """Lend and take back `num_extents` at a time, from an empty pool and from one that is full of prefixes."""
    spec, link = GroupSpec(NUM_LAYERS, num_blocks), Link(0, num_blocks, 1)
    scheduler = Scheduler([spec], BLOCK_SIZE, 64, 1 << 20, num_blocks * BLOCK_SIZE, lend_links=[link])

    def lend_and_take_back() -> tuple[float, float]:
        begin_s = time.perf_counter()
        extents = scheduler.lend(0, num_extents)
        lent_s = time.perf_counter()
        scheduler.take_back(0, extents)
        back_s = time.perf_counter()
        assert len(extents) == num_extents
        return (lent_s - begin_s) / num_extents * 1e6, (back_s - lent_s) / num_extents * 1e6

    lend_free, take_back = map(statistics.median, zip(*(lend_and_take_back() for _ in range(rounds)), strict=True))
    lend_cached = []
    for number in range(rounds):
        fill(scheduler, num_blocks, number)
        lend_cached.append(lend_and_take_back()[0])
    return lend_free, take_back, statistics.median(lend_cached)


def fill(scheduler: Scheduler, num_blocks: int, seed: int) -> None:
    """Compute prompts until the pool is full of their cached blocks."""
    rng = np.random.default_rng(seed)
    request_id = seed * 10_000_000
    while (free := scheduler.stats().groups[0].free) > 0:
        request_id += 1
        num_tokens = min(free, 4096) * BLOCK_SIZE - 1
        prompt = rng.integers(0, 150_000, num_tokens, dtype=np.int32)
        scheduler.add_request(request_id, prompt, 1, 0, NO_STOP, b"", False)
        while (plan := scheduler.schedule()) is not None:
            scheduler.commit(np.ones(len(plan.logits_rows), np.int32))
        if scheduler.stats().groups[0].free >= free:  # blocks that are not full are not kept
            break


def borrowed(num_blocks: int, num_extents: int, rounds: int) -> tuple[float, float]:
    """Borrow and recall `num_extents` at a time, while all the other extents of a peer of that size are held."""
    link = Link(0, num_blocks, 1, NUM_LAYERS * 1024)
    spec = GroupSpec(NUM_LAYERS, 1024, layer_block_bytes=1024)
    scheduler = Scheduler([spec], BLOCK_SIZE, 64, 2048, 1024 * BLOCK_SIZE, borrow_links=[link])
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    some, others = order[:num_extents].copy(), order[num_extents:].copy()
    if len(others):
        scheduler.borrow(0, others)
    borrow_us, recall_us = [], []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        scheduler.borrow(0, some)
        held_s = time.perf_counter()
        scheduler.recall(0, some)
        returned = scheduler.take_returned(0)
        end_s = time.perf_counter()
        assert len(returned) == num_extents
        borrow_us.append((held_s - begin_s) / num_extents * 1e6)
        recall_us.append((end_s - held_s) / num_extents * 1e6)
    return statistics.median(borrow_us), statistics.median(recall_us)


class LayerMajorPool:
    """A pool of shape (layers, blocks, layer block), in a buffer with room for one block more."""

    def __init__(self, num_blocks: int, layer_block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self._width = layer_block_bytes
        self.buffer = np.zeros(NUM_LAYERS * (num_blocks + 1) * layer_block_bytes, np.uint8)
        self.buffer[:: max(1, layer_block_bytes)] = 1  # so that its pages exist

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that one change by one block moves."""
        return (NUM_LAYERS - 1) * self.num_blocks * self._width

    def grow(self) -> None:
        """Grow by a block: each layer moves to make room, the last one first."""
        for layer in range(NUM_LAYERS - 1, 0, -1):
            self._move(layer, self.num_blocks, self.num_blocks + 1)

    def shrink(self) -> None:
        """Shrink by a block: each layer closes the gap after the layer before it."""
        for layer in range(1, NUM_LAYERS):
            self._move(layer, self.num_blocks + 1, self.num_blocks)

    def _move(self, layer: int, old_pitch: int, new_pitch: int) -> None:
        start = self.buffer.ctypes.data
        old, new = start + layer * old_pitch * self._width, start + layer * new_pitch * self._width
        ctypes.memmove(new, old, self.num_blocks * self._width)


def check_layer_major() -> None:
    """Check that a pool which grows and shrinks holds the same as before."""
    pool = LayerMajorPool(64, 8)
    pool.buffer[:] = np.random.default_rng(0).integers(0, 256, len(pool.buffer), np.uint8)
    before = pool.buffer[: NUM_LAYERS * 64 * 8].reshape(NUM_LAYERS, 64, 8).copy()
    pool.grow()
    assert (pool.buffer.reshape(NUM_LAYERS, 65, 8)[:, :64] == before).all()
    pool.shrink()
    assert (pool.buffer[: before.size].reshape(before.shape) == before).all()


def measure(num_blocks: int, num_extents: int, layer_block_bytes: int, rounds: int) -> Figures:
    lend_free, take_back, lend_cached = elastic(num_blocks, num_extents, rounds)
    borrow, recall = borrowed(num_blocks, num_extents, rounds)
    pool = LayerMajorPool(num_blocks, layer_block_bytes)
    pool.grow()
    pool.shrink()
    grow, shrink = [], []
    for _ in range(rounds):
        grow.append(time_us(pool.grow))
        shrink.append(time_us(pool.shrink))
    medians = statistics.median(grow), statistics.median(shrink)
    return Figures(num_blocks, lend_free, take_back, lend_cached, borrow, recall, *medians, pool.moved_bytes)


def row(figures: Figures, layer_block_bytes: int, bandwidth: float) -> list[str]:
    real_s = figures.moved_bytes / layer_block_bytes * REAL_LAYER_BLOCK_BYTES / bandwidth
    ours = (figures.lend_free, figures.lend_cached, figures.take_back, figures.borrow, figures.recall)
    theirs = (figures.grow_layer_major, figures.shrink_layer_major)
    return [
        f"{figures.num_blocks:,}",
        *(f"{value:.3f}" for value in ours),
        *(f"{value:,.0f}" for value in theirs),
        f"{real_s:,.2f} s",
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--blocks", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    arguments.add_argument(
        "--extents", type=int, default=64, help="extents that are lent, taken back, borrowed or recalled at a time"
    )
    arguments.add_argument(
        "--layer-block-bytes", type=int, default=64, help="bytes of a layer block in the layer-major pool"
    )
    args = arguments.parse_args()
    check_layer_major()
    rows = []
    for num_blocks in args.blocks:
        rows.append(measure(num_blocks, args.extents, args.layer_block_bytes, args.rounds))
        say(f"{num_blocks:,} blocks: done, layer-major moved at {rows[-1].bandwidth / 1e9:.1f} GB/s")
    heads = ["blocks", "lend, free", "lend, cached", "take back", "borrow", "recall"]
    heads += ["layer-major grows", "shrinks", "with layer blocks of 64 KiB"]
    say(f"\nMicroseconds per extent; layer-major: per block, layer blocks of {args.layer_block_bytes} bytes\n")
    bandwidth = rows[-1].bandwidth  # smaller pools lie in the processor's caches
    say(table(heads, (row(figures, args.layer_block_bytes, bandwidth) for figures in rows)))
    write_report(args, pools=[{**vars(figures), "bandwidth": figures.bandwidth} for figures in rows])


if __name__ == "__main__":
    main()
