"""The threads that read and write storage: bounded, in turns, and gone when they should be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Parts, Status, StorageBackend
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.levels import Level, Levels
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.loader import Load, Loader, PartRead, Search, Target
from swiftkv.tier.reach import HostReach, Span
from swiftkv.tier.storage_thread import StorageThread
from swiftkv.tier.stored_blocks import BlockName, RankParts, StoredBlocks
from swiftkv.tier.writer import Writer, queue_memory
from swiftkv.transport.fence import Fence
from tests.support.storage import TIMEOUT_S, Clock, GatedMedium, MemoryMedium, Owner

GROUP = KVGroup((0,), num_kv_heads=1, head_dim=32, dtype="float32", block_size=16)  # blocks of 4 KiB
KEYS = ObjectKeys([GROUP], "weights", "cpu")


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def block(number: int) -> np.ndarray:
    return np.full(GROUP.block_bytes, number % 256, np.uint8)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[StorageBackend]:
    opened = open_file(tmp_path)
    yield opened
    opened.close()


def open_file(directory: Path, **fault: Any) -> StorageBackend:
    options: dict[str, Any] = {"backend": "file", "path": "kv", "size": 1 << 24, "min_free": 0}
    if fault:
        options = {"backend": "fault", "inner": options, **fault}
    return open_backend(parse_storage(options, "storage", directory), KEYS.fingerprint)


class ClosedMedium(GatedMedium):
    """A medium in which nothing is found, either, before the test lets it."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self.wait()
        return super().exists(keys, deadline_s)


def sealed(medium: MemoryMedium) -> StorageBackend:
    return SealedBackend(GuardedMedium(medium, Breaker()), KEYS.fingerprint)


def write(backend: StorageBackend, *numbers: int) -> None:
    names = [KEYS.of(key(number), 0) for number in numbers]
    views = [memoryview(block(number)) for number in numbers]
    assert backend.put(names, views, time.monotonic() + TIMEOUT_S) == [Status.OK] * len(numbers)


def below(backend: StorageBackend) -> Levels:
    return Levels([Level("storage", backend)])


def writer(backend: StorageBackend, owner: Owner, num_blocks: int, may_write: threading.Event) -> Writer:
    reach = HostReach([torch.empty(0, dtype=torch.uint8)])
    return Writer(
        StoredBlocks(below(backend), KEYS),
        reach,
        queue_memory(reach, num_blocks * GROUP.block_bytes, GROUP.block_bytes),
        may_write=may_write.is_set,
        on_room=owner.wake,
    )


def test_a_full_queue_takes_no_more(backend: StorageBackend) -> None:
    may_write, owner = threading.Event(), Owner()
    queue = writer(backend, owner, 4, may_write)
    for number in range(4):
        queue.add([(BlockName(key(number), 0), [torch.from_numpy(block(number))])])
    assert queue.num_free == 0
    assert queue.queue_bytes == 4 * GROUP.block_bytes
    assert queue.stored_blocks == 0  # a load is in the way
    may_write.set()
    queue.loads_changed()
    owner.wait_for_more(0)
    assert queue.num_free == 4
    assert (queue.stored_blocks, queue.stored_bytes, queue.queue_bytes) == (4, 4 * GROUP.block_bytes, 0)
    queue.close(TIMEOUT_S)
    assert all(backend.exists([KEYS.of(key(number), 0) for number in range(4)], time.monotonic() + TIMEOUT_S))


def test_what_is_in_the_queue_is_written_at_the_end(backend: StorageBackend) -> None:
    """Loads are still in the way, but nobody waits for them any more."""
    queue = writer(backend, Owner(), 40, threading.Event())
    for number in range(40):
        queue.add([(BlockName(key(number), 0), [torch.from_numpy(block(number))])])
    queue.close(TIMEOUT_S)
    assert queue.stored_blocks == 40


def test_room_is_waited_for_until_there_is_some_or_it_is_too_late(backend: StorageBackend) -> None:
    may_write, owner = threading.Event(), Owner()
    queue = writer(backend, owner, 2, may_write)
    assert queue.wait_for_room(time.monotonic() + TIMEOUT_S)
    assert not queue.wait_for_room(time.monotonic() - 1.0)
    for number in range(2):
        queue.add([(BlockName(key(number), 0), [torch.from_numpy(block(number))])])
    assert not queue.wait_for_room(time.monotonic() + 0.01)  # a load is in the way
    may_write.set()
    queue.loads_changed()
    assert queue.wait_for_room(time.monotonic() + TIMEOUT_S)
    queue.close(TIMEOUT_S)
    assert queue.stored_blocks == 2


def test_a_writer_that_hangs_is_left_behind(tmp_path: Path) -> None:
    hangs = open_file(tmp_path, hang=1.0, hang_time="60s")
    may_write = threading.Event()
    may_write.set()
    queue = writer(hangs, Owner(), 4, may_write)
    queue.add([(BlockName(key(1), 0), [torch.from_numpy(block(1))])])
    queue.close(0.01)
    hangs.close()
    assert queue.stored_blocks == 0


def search_for(*numbers: int) -> Search:
    keys = b"".join(key(number) for number in numbers)
    return Search(1, keys, 1, np.arange(len(numbers)), time.monotonic() + TIMEOUT_S)


def loader_of(backend: StorageBackend, owner: Owner) -> tuple[Loader, np.ndarray]:
    """Return a loader, and the pool that it reads into, uint8 [blocks, GROUP.block_bytes]."""
    pool = torch.zeros(2048 * GROUP.block_bytes, dtype=torch.uint8)
    loader = Loader(StoredBlocks(below(backend), KEYS), HostReach([pool]), owner.wake)
    return loader, pool.view(-1, GROUP.block_bytes).numpy()


def load_of(*numbers: int) -> Load:
    """Return a load into the first blocks of a pool."""
    spans = [Span(i * GROUP.block_bytes, GROUP.block_bytes, 1) for i in range(len(numbers))]
    targets = [Target(BlockName(key(n), 0), i, n, spans[i]) for i, n in enumerate(numbers)]
    return Load(1, targets, time.monotonic() + TIMEOUT_S, Fence(torch.device("cpu")))


def wait_for_parts(loader: Loader, owner: Owner, *loads: Load) -> list[PartRead]:
    parts: list[PartRead] = []
    count = 0
    while sum(part.is_last for part in parts) < len(loads):
        parts += [done for done in loader.take_done() if isinstance(done, PartRead)]
        if sum(part.is_last for part in parts) < len(loads):
            count = owner.wait_for_more(count)
    return parts


class PreparedReach(HostReach):
    """Notes which thread was prepared for it, and checks that no other uses it."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        super().__init__(pools)
        self.prepared: list[threading.Thread] = []

    def begin_thread(self) -> None:
        self.prepared.append(threading.current_thread())

    def landing(self, spans: Sequence[Span]) -> list[RankParts]:
        assert threading.current_thread() in self.prepared
        return super().landing(spans)


def test_the_thread_that_reads_is_prepared_once(backend: StorageBackend) -> None:
    """A thread that chose no GPU would wait for a step on GPU 0, and take memory there."""
    write(backend, 1, 2)
    owner, reach = Owner(), PreparedReach([torch.zeros(4 * GROUP.block_bytes, dtype=torch.uint8)])
    loader = Loader(StoredBlocks(below(backend), KEYS), reach, owner.wake)
    loads = [load_of(1), load_of(2)]
    for load in loads:
        loader.submit(load)
    assert all(part.num_read == 1 for part in wait_for_parts(loader, owner, *loads))
    loader.close()
    loader.join(TIMEOUT_S)
    [thread] = reach.prepared
    assert thread is not threading.current_thread()


def test_what_was_written_is_found_and_read(backend: StorageBackend) -> None:
    write(backend, *range(100))
    owner = Owner()
    loader, into = loader_of(backend, owner)
    search = search_for(3, 1000, 99)
    loader.submit(search)
    owner.wait_for_more(0)
    assert loader.take_done() == [search]
    assert list(search.found) == [True, False, True]
    load = load_of(*range(100))
    loader.submit(load)
    parts = wait_for_parts(loader, owner, load)
    assert sum(part.num_read for part in parts) == 100
    assert len(parts) > 1
    assert (into[:100] == np.arange(100, dtype=np.uint8)[:, None]).all()
    loader.close()
    loader.join(TIMEOUT_S)


def test_behind_a_block_that_is_not_there_nothing_is_read(backend: StorageBackend) -> None:
    write(backend, 1, 2, 4)
    owner = Owner()
    loader, _ = loader_of(backend, owner)
    load = load_of(1, 2, 3, 4, *range(200, 300))
    loader.submit(load)
    (part,) = wait_for_parts(loader, owner, load)
    assert part.num_read == 2
    assert len(part.statuses) == len(part.targets) == 104
    assert part.statuses[2] is Status.MISSING
    assert part.statuses[-1] is None
    loader.close()


def test_a_long_load_does_not_hold_up_a_short_one() -> None:
    medium = ClosedMedium()
    stored = sealed(medium)
    write(stored, *range(250))
    owner = Owner()
    loader, _ = loader_of(stored, owner)
    loader.submit(search_for(1))  # it keeps the thread until both loads are there
    long = load_of(*range(250))
    short = load_of(1)
    loader.submit(long)
    loader.submit(short)
    medium.let_answer()
    parts = wait_for_parts(loader, owner, long, short)
    order = [part.load for part in parts]
    assert order.index(short) < len(order) - 1
    loader.close()
    loader.join(TIMEOUT_S)


class TimedMedium(MemoryMedium):
    """A medium whose calls take as long as they are told, by a clock of its own, and that notes their sizes."""

    def __init__(self, call_times_s: Sequence[float]) -> None:
        super().__init__(name=str(id(self)))
        self.call_times_s = iter(call_times_s)
        self.clock = Clock()
        self.sizes: list[int] = []

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.sizes.append(len(keys))
        self.clock.now_s += next(self.call_times_s)
        return super().read(keys, into, deadline_s)


def test_calls_of_a_load_grow_in_fast_storage_and_are_small_in_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt further down in slower storage waits for a small call only."""
    medium = TimedMedium([0.001, 0.001, 0.001, 0.001, 0.1, 0.1, 0.007, 0.001, 0.001])
    monkeypatch.setattr("swiftkv.tier.loader.time", medium.clock)
    stored = sealed(medium)
    num_blocks = 64 * (1 + 2 + 4 + 8 + 8 + 1 + 1 + 1 + 1)
    write(stored, *range(num_blocks))
    owner = Owner()
    loader, _ = loader_of(stored, owner)
    load = load_of(*range(num_blocks))
    loader.submit(load)
    wait_for_parts(loader, owner, load)
    assert medium.sizes == [64, 128, 256, 512, 512, 64, 64, 64, 64]
    loader.close()
    loader.join(TIMEOUT_S)


def test_a_load_that_is_given_up_reads_no_more(backend: StorageBackend) -> None:
    write(backend, 1)
    owner = Owner()
    loader, into = loader_of(backend, owner)
    load = load_of(1)
    load.is_cancelled = True
    loader.submit(load)
    (part,) = wait_for_parts(loader, owner, load)
    assert part.is_last
    assert part.num_read == 0
    assert not into.any()
    loader.close()


def test_what_is_withdrawn_before_its_turn_is_not_done() -> None:
    """The thread is in a call that does not come back meanwhile."""
    medium = ClosedMedium()
    stored = sealed(medium)
    write(stored, *range(3))
    owner = Owner()
    loader, into = loader_of(stored, owner)
    first, withdrawn_search, last = search_for(0), search_for(1), search_for(2)
    withdrawn = load_of(0, 1, 2)
    for job in (first, withdrawn_search, withdrawn, last):
        loader.submit(job)
    assert medium.is_asked.wait(TIMEOUT_S)
    assert loader.withdraw(withdrawn_search) == ()
    assert loader.withdraw(withdrawn) == withdrawn.targets
    assert loader.withdraw(withdrawn) == []
    medium.let_answer()
    owner.wait_for_more(1)
    assert loader.take_done() == [first, last]
    assert not into.any()
    loader.close()
    loader.join(TIMEOUT_S)


def test_of_a_load_that_is_withdrawn_in_a_call_only_that_call_is_told() -> None:
    medium = ClosedMedium()
    stored = sealed(medium)
    write(stored, *range(100))
    owner = Owner()
    loader, into = loader_of(stored, owner)
    load = load_of(*range(100))
    loader.submit(load)
    assert medium.is_asked.wait(TIMEOUT_S)
    rest = loader.withdraw(load)
    assert rest == load.targets[64:]
    medium.let_answer()
    (part,) = wait_for_parts(loader, owner, load)
    assert [*part.targets, *rest] == load.targets
    assert part.num_read == 64
    assert not into[64:].any()
    loader.close()
    loader.join(TIMEOUT_S)


def test_a_call_hangs_a_second_after_its_deadline_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(time.monotonic())
    monkeypatch.setattr("swiftkv.tier.loader.time", clock)
    medium = ClosedMedium()
    owner = Owner()
    loader, _ = loader_of(sealed(medium), owner)
    assert not loader.is_hung
    search = search_for(1)
    loader.submit(search)
    assert medium.is_asked.wait(TIMEOUT_S)
    clock.now_s = search.deadline_s + 0.5
    assert not loader.is_hung
    clock.now_s += 1.0
    assert loader.is_hung
    medium.let_answer()
    owner.wait_for_more(0)
    assert not loader.is_hung
    loader.close()
    loader.join(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_a_thread_and_reaches_the_engine() -> None:
    owner = Owner()

    def fail() -> None:
        raise ArithmeticError("a defect")

    thread = StorageThread("storage test", fail, owner.wake)
    thread.check()
    thread.start()
    owner.wait_for_more(0)
    thread.join(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="storage test"):
        thread.check()


def test_a_thread_that_is_closed_wakes_nobody() -> None:
    owner = Owner()
    thread = StorageThread("storage test", lambda: None, owner.wake)
    thread.start()
    thread.close()
    thread.join(TIMEOUT_S)
    thread.check()
    assert owner.count == 0
