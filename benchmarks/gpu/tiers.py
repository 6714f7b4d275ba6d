"""Time copies of whole blocks between a pool and host memory, beside PCIe's limit in the same run.

PYTHONPATH=. python benchmarks/gpu/tiers.py [--out tiers.json]

`up` and `down` are what an engine does: from page-locked memory into scattered blocks of the pool, as much as one read
of storage, and from blocks into the queue; the host waits for the end of each. `both` has two threads do so at once.
`steps, kernel` and `steps, direct` copy blocks from host memory as steps do, one layer after the other, and wait for
the last. `from host memory` is the way of blocks that do not fill a chunk, or of an engine that borrows over `p2p`: it
also reads and verifies them before they go up, which one thread does in turn. The limit is a plain copy of page-locked
memory. The target for `up`, `down` and the steps is 90 % of it, with blocks of 1 MiB and more; those of Qwen3-8B have
9 MiB.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from machine import Machine, measure, print_table, write_json

from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.cache.geometry import KVGroup
from swiftkv.policies import IoBackend
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.host_medium import HostMedium, chunk_bytes_for, make_host_memory
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.reach import DeviceReach, Span
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks
from swiftkv.transport.base import Runs
from swiftkv.transport.peer import PeerTransport

BLOCK_BYTES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 9 << 20]
ROUND_BYTES = 32 << 20  # as much as one read of storage at most
POOL_ROUNDS = 16  # what a pool holds, so that successive rounds copy other blocks
REPEATS = 30
_WARMUPS = 3
_PATIENCE_S = 10.0
_NUM_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Result:
    how: str
    block_bytes: int
    moved_bytes: int
    seconds: float
    bytes_per_s: float
    of_limit: float  # the part of a plain copy's rate


class Round:
    """Blocks that are copied at once, and their places in a pool: others each time."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = max(1, ROUND_BYTES // block_bytes)
        self.num_bytes = self.num_blocks * block_bytes
        pool = torch.zeros(POOL_ROUNDS * self.num_bytes, dtype=torch.uint8, device="cuda")
        self.reach = DeviceReach([pool], block_bytes)
        self._pool = pool
        self._queue = self.reach.buffer(self.num_bytes).view(self.num_blocks, block_bytes)
        self._places = np.random.default_rng(0).permutation(POOL_ROUNDS * self.num_blocks) * block_bytes
        self.reach.landing(self.spans(0))

    def spans(self, index: int) -> list[Span]:
        first = index % POOL_ROUNDS * self.num_blocks
        places = self._places[first : first + self.num_blocks].tolist()
        return [Span(place, self.block_bytes, 1) for place in places]

    def up(self, index: int) -> None:
        self.reach.land(self.spans(index))

    def down(self, index: int) -> None:
        self.reach.take(zip(self._queue, (span.of(self._pool) for span in self.spans(index)), strict=True))

    def both(self, index: int) -> None:
        """Copy as much in each direction, from a thread each."""
        reader = threading.Thread(target=self.up, args=(index,))
        reader.start()
        self.down(index + POOL_ROUNDS // 2)
        reader.join()


class HostTier:
    """Host memory that has the blocks of a round, as engines read it."""

    def __init__(self, one: Round) -> None:
        self._round = one
        group = _group(one.block_bytes)
        keys = ObjectKeys([group], "weights", "triton")
        fd = make_host_memory(2 * one.num_bytes + (16 << 20), chunk_bytes_for([group.block_bytes], []))
        try:
            backend = SealedBackend(GuardedMedium(HostMedium.of(fd), Breaker()), keys.fingerprint)
        finally:
            os.close(fd)
        self._stored = StoredBlocks(Levels([Level("host", backend)]), keys)
        self._names = [BlockName(number.to_bytes(32, "little"), 0) for number in range(one.num_blocks)]
        content = np.random.default_rng(0).integers(0, 256, (one.num_blocks, one.block_bytes)).astype(np.uint8)
        statuses = self._stored.put(self._names, [[block.data] for block in content], _soon_s())
        assert statuses == [Status.OK] * one.num_blocks

    def read(self, index: int) -> None:
        spans = self._round.spans(index)
        statuses, _ = self._stored.get(self._names, self._round.reach.landing(spans), _soon_s())
        assert statuses == [Status.OK] * len(spans)
        self._round.reach.land(spans)


class Steps:
    """Host memory from which steps copy the blocks of a round, layer by layer."""

    def __init__(self, one: Round, io_backend: IoBackend) -> None:
        self._num_blocks, self._block_bytes = one.num_blocks, one.block_bytes
        self._width_bytes = one.block_bytes // _NUM_LAYERS
        num_places = POOL_ROUNDS * one.num_blocks
        self._pool = CudaPool([(_group(one.block_bytes), num_places)], torch.device("cuda", 0))
        self._transport = PeerTransport(self._pool, io_backend, widths_bytes=[self._width_bytes])
        memory = memoryview(mmap.mmap(-1, num_places * one.block_bytes))
        self._transport.attach_host(0, memory)
        random = np.random.default_rng(0)
        self._sources, self._targets = (random.permutation(num_places) * one.block_bytes for _ in range(2))

    def copy(self, index: int) -> None:
        first = index % POOL_ROUNDS * self._num_blocks
        rows = np.zeros((self._num_blocks, 5), np.int64)
        rows[:, 1] = self._sources[first : first + self._num_blocks]
        rows[:, 2] = self._targets[first : first + self._num_blocks]
        rows[:, 3] = 1
        runs = Runs(rows, self._width_bytes, self._block_bytes)
        for layer in range(_NUM_LAYERS):
            ticket = self._transport.submit(None, runs, layer)
        self._transport.wait(ticket)
        self._transport.settle()

    def close(self) -> None:
        self._transport.close()


def _group(block_bytes: int) -> KVGroup:
    layer_bytes = block_bytes // _NUM_LAYERS
    group = KVGroup(
        tuple(range(_NUM_LAYERS)), num_kv_heads=1, head_dim=layer_bytes // 64, dtype="bfloat16", block_size=16
    )
    assert group.block_bytes == block_bytes, (group.block_bytes, block_bytes)
    return group


def _soon_s() -> float:
    return time.monotonic() + _PATIENCE_S


def median_wall_seconds(run: Callable[[int], object]) -> float:
    """Return the median seconds of `run(i)`, which ends when its copies have, by the host's clock."""
    seconds = []
    for index in range(_WARMUPS + REPEATS):
        began_s = time.perf_counter()
        run(index)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[_WARMUPS:])


def measure_blocks(machine: Machine, block_bytes: int) -> Iterator[Result]:
    one = Round(block_bytes)
    to_device, to_host = machine.host_to_device_bytes_per_s, machine.device_to_host_bytes_per_s
    cases: list[tuple[str, Callable[[int], None], int, float]] = [
        ("up", one.up, one.num_bytes, to_device),
        ("down", one.down, one.num_bytes, to_host),
        ("both", one.both, 2 * one.num_bytes, to_device + to_host),
        ("from host memory", HostTier(one).read, one.num_bytes, to_device),
    ]
    for how, run, num_bytes, limit in cases:
        yield result(how, one, num_bytes, median_wall_seconds(run), limit)
    for io_backend in get_args(IoBackend):
        steps = Steps(one, io_backend)
        yield result(f"steps, {io_backend}", one, one.num_bytes, median_wall_seconds(steps.copy), to_device)
        steps.close()


def result(how: str, one: Round, num_bytes: int, seconds: float, limit: float) -> Result:
    rate = num_bytes / seconds
    return Result(how, one.block_bytes, num_bytes, seconds, rate, rate / limit)


def print_results(results: Sequence[Result]) -> None:
    print_table(
        ["how", "block", "moved", "GB/s", "of the limit"],
        [
            (
                r.how,
                f"{r.block_bytes // 1024} KiB",
                f"{r.moved_bytes >> 20} MiB",
                f"{r.bytes_per_s / 1e9:.1f}",
                f"{r.of_limit:.1%}",
            )
            for r in results
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    arguments = parser.parse_args()
    machine = measure()
    print(machine.report(), flush=True)
    results: list[Result] = []
    try:
        for block_bytes in BLOCK_BYTES:
            results.extend(measure_blocks(machine, block_bytes))
    finally:  # what was measured before a failure
        print_results(results)
        write_json(arguments.out, machine, [asdict(r) for r in results])
    for names in (("up", "down"), ("steps, kernel",), ("steps, direct",)):
        worst = min(r.of_limit for r in results if r.how in names and r.block_bytes >= 1 << 20)
        print(f"\n{' and '.join(names)}, from 1 MiB on, at worst: {worst:.1%} of the limit (target 90 %)")


if __name__ == "__main__":
    main()
