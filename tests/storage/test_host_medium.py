"""Host memory that engines share: what a kill, a stop and a small memory leave of it."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from swiftkv._host import HostMemory, num_chunks
from swiftkv.shared_memory import address_of
from swiftkv.storage.backend import Status, StorageBackend
from swiftkv.storage.envelope import HEADER_BYTES
from swiftkv.storage.host_medium import HostMedium, chunk_bytes_for, host_tokens, make_host_memory
from tests.support.mappings import mapping_of
from tests.support.storage import BLOCK_BYTES, check_got, host_memory, key_of, opened, put, soon
from tests.support.storage_writer import NUM_KEYS, event, kill_after, size_of, start, wait_for, write_for_ever

CHUNK_BYTES = 4096
MEMORY_BYTES = 8 << 20
_LONGEST_S = 0.03
_SMALL = 100


def medium_of(memory: dict[str, object]) -> HostMedium:
    fd = os.open(str(memory["file"]), os.O_RDWR)
    medium = HostMedium.of(fd)
    os.close(fd)
    return medium


def num_repairs(memory: dict[str, object]) -> int:
    """Return how many processes have died with the lock."""
    with open(str(memory["file"]), "r+b") as file:
        return HostMemory(memoryview(mmap.mmap(file.fileno(), 0))).usage(soon())[3]


def hold_the_lock_often(memory: dict[str, object], seed: int, has_begun: Event) -> None:
    """Write small objects and look for many, so that the lock is held most of the time."""
    rng, medium = random.Random(seed), medium_of(memory)
    keys = [key_of(n) for n in range(NUM_KEYS)]
    has_begun.set()
    for _ in itertools.count():
        key = rng.choice(keys)
        medium.write([key], [(memoryview(key), memoryview(bytes(_SMALL)))], soon())
        medium.exists(keys * 20, soon())
        if rng.random() < 0.2:
            medium.drop([rng.choice(keys)])


def check_memory(memory: dict[str, object]) -> None:
    """Check that all that is there is whole and counted, and that the memory is within its bound."""
    with opened(memory) as backend:
        is_there = backend.exists([key_of(n) for n in range(NUM_KEYS)], soon())
        usage = backend.usage()
        assert usage is not None
        assert usage.bound_bytes is not None
        assert usage.objects == sum(is_there)
        assert usage.num_bytes <= usage.bound_bytes <= MEMORY_BYTES
        for n in range(NUM_KEYS):
            expected = Status.OK if is_there[n] else Status.MISSING
            assert check_got(backend, [key_of(n)], size_of(n)) == [expected]


def kill_writers(memory: dict[str, object], rng: random.Random, num_writers: int) -> None:
    writers = []
    for _ in range(num_writers):
        has_begun = event()
        writers.append(start(write_for_ever, memory, rng.randrange(1 << 30), has_begun))
        wait_for(has_begun)
    for writer in writers:
        kill_after(writer, rng.uniform(0.0, _LONGEST_S))


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_leaves_whole_objects(seed: int) -> None:
    rng = random.Random(seed)
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        kill_writers(memory, rng, num_writers=1 + seed % 2)
        check_memory(memory)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_kills_in_one_memory() -> None:
    rng = random.Random(0)
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        for _ in range(500):
            kill_writers(memory, rng, num_writers=2)
            check_memory(memory)


def kill_holders(memory: dict[str, object], rng: random.Random, num_kills: int, num_others: int = 0) -> None:
    """Kill processes that hold the lock often; `num_others` objects are not theirs."""
    for _ in range(num_kills):
        has_begun = event()
        holder = start(hold_the_lock_often, memory, rng.randrange(1 << 30), has_begun)
        wait_for(has_begun)
        kill_after(holder, rng.uniform(0.0, _LONGEST_S / 3))
        medium = medium_of(memory)
        num_objects = sum(medium.exists([key_of(n) for n in range(NUM_KEYS)], soon()))
        assert medium.usage().objects == num_objects + num_others
        for n in range(NUM_KEYS):
            header, block = bytearray(32), bytearray(_SMALL)
            (status,) = medium.read([key_of(n)], [(memoryview(header), memoryview(block))], soon())
            assert status is Status.MISSING or (bytes(header), bytes(block)) == (key_of(n), bytes(_SMALL))


def test_who_finds_the_lock_of_a_dead_process_repairs_what_it_guards() -> None:
    with host_memory(MEMORY_BYTES, 256) as memory:
        rng = random.Random(1)
        while num_repairs(memory) == 0:
            kill_holders(memory, rng, 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_die_with_the_lock() -> None:
    with host_memory(MEMORY_BYTES, 256) as memory:
        kill_holders(memory, random.Random(2), 500)
        assert num_repairs(memory) > 100


@pytest.mark.parametrize("use", [check_got, put])
def test_the_least_recently_used_makes_room(use: Callable[[StorageBackend, Sequence[bytes]], list[Status]]) -> None:
    """Getting is using, and so is putting again."""
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory, opened(memory) as backend:
        usage = backend.usage()
        assert usage is not None
        assert usage.bound_bytes is not None
        count = usage.bound_bytes // CHUNK_BYTES // -(-(HEADER_BYTES + BLOCK_BYTES) // CHUNK_BYTES)
        keys = [key_of(n) for n in range(count + 2)]
        for key in keys[:count]:
            assert put(backend, [key]) == [Status.OK]
        assert use(backend, keys[:1]) == [Status.OK]
        for key in keys[count:]:
            assert put(backend, [key]) == [Status.OK]
        is_gone = [not is_there for is_there in backend.exists(keys, soon())]
        assert [n for n, gone in enumerate(is_gone) if gone] == [1, 2]


def test_objects_survive_repairs_in_order_of_use() -> None:
    """The oldest still go first."""
    num_bytes = 256 << 10
    capacity = num_chunks(num_bytes, 256)
    with host_memory(num_bytes, 256) as memory:
        medium = medium_of(memory)
        parts = (memoryview(bytes(32)), memoryview(bytes(_SMALL)))
        names = [b"%032d" % n for n in range(capacity - NUM_KEYS)]
        assert medium.write(names, [parts] * len(names), soon()) == [Status.OK] * len(names)
        rng = random.Random(3)
        while num_repairs(memory) == 0:
            kill_holders(memory, rng, 1, len(names))
        assert all(medium.exists(names, soon()))
        more = [b"x%031d" % n for n in range(NUM_KEYS + len(names) // 2)]
        assert medium.write(more, [parts] * len(more), soon()) == [Status.OK] * len(more)
        is_there = medium.exists(names, soon())
        assert is_there == sorted(is_there)
        assert any(is_there)
        assert not all(is_there)


def test_a_process_that_was_stopped_with_the_lock_holds_nobody_up_beyond_the_deadline() -> None:
    with host_memory(MEMORY_BYTES, 256) as memory:
        medium, has_begun = medium_of(memory), event()
        holder = start(hold_the_lock_often, memory, 0, has_begun)
        wait_for(has_begun)
        assert holder.pid is not None
        while True:
            os.kill(holder.pid, signal.SIGSTOP)
            try:
                medium.exists([key_of(0)], time.monotonic() + 0.05)
            except TimeoutError:
                break
            os.kill(holder.pid, signal.SIGCONT)
        with opened(memory) as backend:
            assert backend.get([key_of(0)], [memoryview(bytearray(8))], time.monotonic() + 0.05) == [Status.LATE]
        holder.kill()
        holder.join()
        medium.exists([key_of(0)], soon())


def test_memory_that_was_not_laid_out_is_refused() -> None:
    fd = os.memfd_create("plain")
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(ValueError, match="not laid out"):
        HostMedium.of(fd)
    os.close(fd)
    with pytest.raises(ValueError, match="not one chunk"):
        make_host_memory(4096, 4096)


def test_chunks_fit_the_smallest_block() -> None:
    """The object of a block fills its chunks but for a cache line each; a large one has several."""
    for block_bytes in (1, 4096, 64 << 10, 1 << 20, 1_835_008):
        chunk_bytes = chunk_bytes_for([block_bytes, 10 * block_bytes])
        num = -(-(HEADER_BYTES + block_bytes) // chunk_bytes)
        assert chunk_bytes <= 64 << 10
        assert 0 <= num * chunk_bytes - HEADER_BYTES - block_bytes < 64 * num


@pytest.mark.parametrize("block_bytes", [[3000], [3000, 12000], [3000, 3000, 12000]], ids=len)
def test_as_many_blocks_fit_as_the_plan_says(block_bytes: list[int]) -> None:
    """In all KV groups together: as many tokens fit as the bytes allow, whatever the number of groups."""
    num_bytes = 1 << 20
    chunk_bytes = chunk_bytes_for(block_bytes)
    capacity = host_tokens(num_bytes, chunk_bytes, block_bytes, 16) // 16
    with host_memory(num_bytes, chunk_bytes) as memory, opened(memory) as backend:
        blocks = [np.zeros(size, np.uint8) for _ in range(capacity + 1) for size in block_bytes]
        keys = [key_of(n) for n in range(len(blocks))]
        statuses = backend.put(keys, [memoryview(block) for block in blocks], soon())
        assert statuses == [Status.OK] * len(blocks)
        in_groups = capacity * len(block_bytes)
        assert backend.exists(keys, soon())[-in_groups:] == [True] * in_groups
        assert not all(backend.exists(keys[: len(block_bytes)], soon()))
        assert capacity * sum(block_bytes) > 0.9 * num_bytes


def test_all_of_it_is_made_ahead_and_what_was_written_stays() -> None:
    fd = make_host_memory(MEMORY_BYTES, CHUNK_BYTES)
    medium = HostMedium.of(fd)
    keys, block = [key_of(n) for n in range(9)], memoryview(random.Random(0).randbytes(64 << 10))
    header = memoryview(bytes(HEADER_BYTES))
    assert set(medium.write(keys, [(header, block)] * len(keys), soon())) == {Status.OK}
    assert 512 * os.fstat(fd).st_blocks < MEMORY_BYTES
    medium.fill_ahead().join()
    assert mapping_of(address_of(medium._mapping)).resident_bytes == 512 * os.fstat(fd).st_blocks == MEMORY_BYTES
    found = [(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(len(block)))) for _ in keys]
    assert list(medium.read(keys, found, soon())) == [Status.OK] * len(keys)
    assert {bytes(each) for _, each in found} == {bytes(block)}
    os.close(fd)


def test_mapping_ahead_ends_with_the_medium() -> None:
    fd = make_host_memory(MEMORY_BYTES, CHUNK_BYTES)
    medium = HostMedium.of(fd)
    thread = medium.fill_ahead()
    os.close(fd)
    del medium
    assert not thread.is_alive()
