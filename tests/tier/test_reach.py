"""Pools on a device, whose copies end as late as they may: nothing is used or given back before they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.storage import buffers
from swiftkv.storage.backend import Parts, Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.buffers import page_locked_bytes, queue_rows, staging_bytes
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.loader import Load, Loader, PartRead, Target
from swiftkv.tier.reach import CopyLane, DeviceReach, Direction, HostReach, Reach, Span, reach_of
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks
from swiftkv.tier.writer import Writer, queue_memory
from swiftkv.transport.fence import Fence
from tests.support.lanes import CPU, LateLane, StepFence, late_reach
from tests.support.storage import TIMEOUT_S, Clock, GatedMedium, MemoryMedium, Owner

GROUP = KVGroup((0,), num_kv_heads=1, head_dim=32, dtype="float32", block_size=16)  # blocks of 4 KiB
BYTES = GROUP.block_bytes
BEFORE = 0xEE  # what the pool holds at first


class Stored:
    """Blocks in storage, each full of its number, and a pool to load them into."""

    def __init__(self, medium: MemoryMedium, num_blocks: int, num_ranks: int = 1) -> None:
        self.keys = ObjectKeys([GROUP], "weights", "triton", num_ranks)
        self.backend = SealedBackend(GuardedMedium(medium, Breaker()), self.keys.fingerprint)
        self.blocks = StoredBlocks(Levels([Level("storage", self.backend)]), self.keys)
        self.pools = [torch.full((num_blocks * BYTES,), BEFORE, dtype=torch.uint8) for _ in range(num_ranks)]
        self.owner = Owner()

    def put(self, *numbers: int) -> None:
        parts = [[part(number, rank).numpy().data for rank in range(len(self.pools))] for number in numbers]
        assert self.blocks.put(list(map(name, numbers)), parts, soon()) == [Status.OK] * len(numbers)

    def get(self, number: int) -> list[int]:
        """Return the first byte of each rank's part of a block in storage, and check that all others are equal."""
        into = [torch.zeros(BYTES, dtype=torch.uint8) for _ in self.pools]
        assert self.blocks.get([name(number)], [[each.numpy().data for each in into]], soon())[0] == [Status.OK]
        return [int(each.unique()) for each in into]

    def load(self, *numbers: int, handed_out: Fence | None = None) -> Load:
        """Return a load of these blocks into the first places of the pool."""
        spans = (Span(i * BYTES, BYTES, len(self.pools)) for i in range(len(numbers)))
        targets = [Target(name(number), i, i, span) for i, number, span in zip(range(99), numbers, spans, strict=False)]
        return Load(1, targets, soon(), handed_out or Fence(CPU))

    def wait_for(self, loader: Loader) -> list[PartRead]:
        """Return the parts of the one load of a loader."""
        parts: list[PartRead] = []
        while not parts or not parts[-1].is_last:
            count = self.owner.count
            parts += [done for done in loader.take_done() if isinstance(done, PartRead)]
            if not parts or not parts[-1].is_last:
                self.owner.wait_for_more(count)
        return parts

    def held(self, rank: int = 0) -> list[int]:
        """Return the first byte of each block of a pool, all of whose bytes must be equal."""
        blocks = self.pools[rank].view(-1, BYTES)
        assert (blocks == blocks[:, :1]).all()
        return [int(number) for number in blocks[:, 0]]


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "little"), 0)


def part(number: int, rank: int = 0) -> Tensor:
    return torch.full((BYTES,), number + 100 * rank, dtype=torch.uint8)


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def end(loader: Loader) -> None:
    loader.close()
    loader.join(TIMEOUT_S)


def with_lanes(pools: Sequence[Tensor], *lanes: LateLane) -> Reach:
    """Return a reach whose lanes are these: the first goes up, the second down."""
    left = list(lanes)
    return DeviceReach(pools, BYTES, open_lane=lambda device, direction: left.pop(0) if left else LateLane())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("reach", [HostReach, lambda pools: late_reach(pools, BYTES)], ids=["host", "device"])
def test_what_storage_reads_comes_to_its_place_in_the_pool_of_each_rank(num_ranks: int, reach: type[HostReach]) -> None:
    stored = Stored(MemoryMedium(f"places {num_ranks} {reach}"), 5, num_ranks)
    stored.put(1, 2, 3)
    loader = Loader(stored.blocks, reach(stored.pools), stored.owner.wake)
    loader.submit(stored.load(3, 1, 2))
    (read,) = stored.wait_for(loader)
    assert read.num_read == 3
    for rank in range(num_ranks):
        assert stored.held(rank) == [3 + 100 * rank, 1 + 100 * rank, 2 + 100 * rank, BEFORE, BEFORE]
    end(loader)


def test_a_queue_that_no_machine_has_memory_for_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"^tiers: there is no memory for .* \(1EiB\); lower tiers.storage.queue$"):
        HostReach([torch.zeros(1, dtype=torch.uint8)]).buffer(1 << 60)


def test_a_load_is_told_only_when_its_bytes_are_in_the_pool() -> None:
    stored = Stored(MemoryMedium("told"), 2)
    stored.put(1, 2)
    lane = LateLane()
    lane.may_copy.clear()
    loader = Loader(stored.blocks, with_lanes(stored.pools, lane), stored.owner.wake)
    loader.submit(stored.load(1, 2))
    assert lane.is_asked.wait(TIMEOUT_S)
    assert loader.take_done() == []
    assert stored.held() == [BEFORE, BEFORE]
    lane.may_copy.set()
    (read,) = stored.wait_for(loader)
    assert read.num_read == 2
    assert stored.held() == [1, 2]
    end(loader)


def test_nothing_is_copied_while_steps_may_use_what_was_there_before() -> None:
    """A step that was launched before the blocks were handed out may still read or write them."""
    stored = Stored(MemoryMedium("handed out"), 1)
    stored.put(1)
    lane, step = LateLane(), StepFence()
    loader = Loader(stored.blocks, with_lanes(stored.pools, lane), stored.owner.wake)
    loader.submit(stored.load(1, handed_out=step))
    assert step.is_waited_for.wait(TIMEOUT_S)
    assert not lane.is_asked.is_set()
    step.may_end.set()
    (read,) = stored.wait_for(loader)
    assert read.num_read == 1
    assert stored.held() == [1]
    end(loader)


class _LongStep(Fence):
    """A step that takes a hundred seconds of a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(CPU)
        self._clock = clock

    def wait(self) -> None:
        self._clock.now_s += 100.0


def test_the_wait_for_a_step_does_not_count_as_slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(time.monotonic())
    monkeypatch.setattr("swiftkv.tier.loader.time", clock)
    stored = Stored(MemoryMedium("slow step"), 1)
    stored.put(1)
    loader = Loader(stored.blocks, late_reach(stored.pools, BYTES), stored.owner.wake)
    loader.submit(stored.load(1, handed_out=_LongStep(clock)))
    (read,) = stored.wait_for(loader)
    assert read.took_s == 0.0
    end(loader)


class _NotingMedium(MemoryMedium):
    """A medium that notes how many blocks each call reads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sizes: list[int] = []

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.sizes.append(len(keys))
        return super().read(keys, into, deadline_s)


def test_a_read_is_as_large_as_the_page_locked_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_STAGING_BYTES", 4 * BYTES + 100)
    medium = _NotingMedium("bounded")
    stored = Stored(medium, 10)
    stored.put(*range(10))
    reach = late_reach(stored.pools, BYTES)
    assert sum(memory.nbytes for memory in reach.read_memory()) == 4 * BYTES + 100
    loader = Loader(stored.blocks, reach, stored.owner.wake)
    loader.submit(stored.load(*range(10)))
    assert [len(each.targets) for each in stored.wait_for(loader)] == medium.sizes == [4, 4, 2]
    assert stored.held() == list(range(10))
    end(loader)


def test_a_block_larger_than_the_page_locked_memory_usually_is_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_STAGING_BYTES", 100)
    stored = Stored(MemoryMedium("large"), 3, num_ranks=2)
    stored.put(1, 2, 3)
    loader = Loader(stored.blocks, late_reach(stored.pools, BYTES), stored.owner.wake)
    loader.submit(stored.load(1, 2, 3))
    assert [each.num_read for each in stored.wait_for(loader)] == [1, 1, 1]
    assert stored.held(rank=1) == [101, 102, 103]
    end(loader)


def test_behind_a_block_that_cannot_be_read_nothing_is_copied() -> None:
    """The blocks of the pool keep what they hold: a corrupt one never comes there."""
    medium = MemoryMedium("corrupt")
    stored = Stored(medium, 4)
    stored.put(1, 2, 3, 4)
    spoiled = stored.keys.of(name(3).block_key, 0)
    medium.objects[spoiled] = medium.objects[spoiled][:-1] + b"\0"
    loader = Loader(stored.blocks, late_reach(stored.pools, BYTES), stored.owner.wake)
    loader.submit(stored.load(1, 2, 3, 4))
    (read,) = stored.wait_for(loader)
    assert read.num_read == 2
    assert read.statuses[2] is Status.CORRUPT
    assert stored.held() == [1, 2, BEFORE, BEFORE]
    end(loader)


def test_a_load_that_is_given_up_before_its_call_copies_nothing() -> None:
    stored = Stored(MemoryMedium("given up"), 1)
    stored.put(1)
    lane = LateLane()
    loader = Loader(stored.blocks, with_lanes(stored.pools, lane), stored.owner.wake)
    load = stored.load(1, handed_out=StepFence())  # which is never over
    load.is_cancelled = True
    loader.submit(load)
    (read,) = stored.wait_for(loader)
    assert read.num_read == 0
    assert not lane.is_asked.is_set()
    end(loader)


def test_a_loader_that_is_closed_ends_when_its_copies_have() -> None:
    """Their blocks are told then, and are not given to others before."""
    stored = Stored(MemoryMedium("closed"), 1)
    stored.put(1)
    lane = LateLane()
    lane.may_copy.clear()
    loader = Loader(stored.blocks, with_lanes(stored.pools, lane), stored.owner.wake)
    loader.submit(stored.load(1))
    assert lane.is_asked.wait(TIMEOUT_S)
    loader.close()
    loader.join(0.0)
    assert loader.take_done() == []
    lane.may_copy.set()
    (read,) = stored.wait_for(loader)
    assert read.num_read == 1
    assert stored.held() == [1]
    end(loader)


def test_storage_that_is_withdrawn_in_a_call_lets_go_of_its_blocks_after_the_copy() -> None:
    medium = GatedMedium()
    stored = Stored(medium, 1)
    stored.put(1)
    lane = LateLane()
    lane.may_copy.clear()
    loader = Loader(stored.blocks, with_lanes(stored.pools, lane), stored.owner.wake)
    load = stored.load(1)
    loader.submit(load)
    assert medium.is_asked.wait(TIMEOUT_S)
    assert loader.withdraw(load) == []  # storage was handed its only block
    medium.let_answer()
    assert lane.is_asked.wait(TIMEOUT_S)
    assert loader.take_done() == []
    lane.may_copy.set()
    (read,) = stored.wait_for(loader)
    assert [target.block for target in read.targets] == [0]
    end(loader)


def writer_for(stored: Stored, reach: Reach) -> Writer:
    return Writer(
        stored.blocks,
        reach,
        queue_memory(reach, 4 * BYTES * len(stored.pools), BYTES),
        may_write=lambda: True,
        on_room=stored.owner.wake,
    )


def test_a_block_is_let_go_of_only_when_it_is_copied() -> None:
    """Nobody may write to it until then, and nothing is stored."""
    medium = MemoryMedium("let go")
    stored = Stored(medium, 2)
    lane = LateLane()
    lane.may_copy.clear()
    writer = writer_for(stored, with_lanes(stored.pools, LateLane(), lane))
    source = part(7)
    has_added = threading.Event()

    def add() -> None:
        writer.add([(name(7), [source])])
        has_added.set()

    engine = threading.Thread(target=add)
    engine.start()
    assert lane.is_asked.wait(TIMEOUT_S)
    assert not has_added.is_set()
    assert writer.queue_bytes == 0
    assert not medium.objects
    lane.may_copy.set()
    assert has_added.wait(TIMEOUT_S)
    source.fill_(8)
    engine.join()
    writer.close(TIMEOUT_S)
    assert stored.get(7) == [7]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("reach", [HostReach, lambda pools: late_reach(pools, BYTES)], ids=["host", "device"])
def test_what_is_in_the_pools_is_written(num_ranks: int, reach: type[HostReach]) -> None:
    stored = Stored(MemoryMedium(f"written {num_ranks} {reach}"), 4, num_ranks)
    writer = writer_for(stored, reach(stored.pools))
    writer.add([(name(number), [part(number, rank) for rank in range(num_ranks)]) for number in (1, 2, 3)])
    writer.close(TIMEOUT_S)
    assert writer.stored_blocks == 3
    assert [stored.get(number) for number in (1, 2, 3)] == [
        [number + 100 * rank for rank in range(num_ranks)] for number in (1, 2, 3)
    ]


def test_pools_on_the_host_are_reached_in_place() -> None:
    pool = torch.zeros(BYTES, dtype=torch.uint8)
    reach = reach_of([pool], BYTES)
    reach.landing([Span(0, BYTES, 1)])[0][0][:3] = b"abc"
    assert pool[:4].tolist() == [97, 98, 99, 0]
    assert [memory.nbytes for memory in reach.read_memory()] == [BYTES]


def test_without_a_gpu_a_lane_copies_at_once() -> None:
    """The target may be a tensor of inference mode, as a pool is, although the thread is not in it."""
    with torch.inference_mode():
        target = torch.zeros(3, dtype=torch.uint8)
    directions: tuple[Direction, ...] = ("up", "down")
    for number, direction in enumerate(directions, start=1):
        CopyLane(CPU, direction).copy([(target, torch.full((3,), number, dtype=torch.uint8))])
        assert target.tolist() == [number] * 3


def test_page_locked_memory_is_counted_as_torch_rounds_it() -> None:
    mib = 1 << 20
    assert (queue_rows(64 * mib, 8 * mib), queue_rows(mib, 8 * mib)) == (8, 2)
    assert (staging_bytes(mib), staging_bytes(40 * mib)) == (32 * mib, 40 * mib)
    assert page_locked_bytes(64 * mib, 8 * mib) == (64 + 32) * mib
    assert page_locked_bytes(64 * mib, 3 * mib) == (64 + 32) * mib  # 63 MiB for the queue
    assert page_locked_bytes(64 * mib, 40 * mib) == (128 + 64) * mib


def test_memory_that_cannot_be_had_is_told_with_its_key() -> None:
    reach = late_reach([torch.zeros(BYTES, dtype=torch.uint8)], BYTES)
    with pytest.raises(ConfigError, match=r"tiers: \d+ bytes of host memory cannot be locked for cpu: .*; lower tiers"):
        queue_memory(reach, 1 << 60, BYTES)
