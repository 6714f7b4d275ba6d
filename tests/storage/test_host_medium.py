"""Host memory that engines share: what a kill, a stop and a small memory leave of it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from swiftkv._host import MAX_MEMBERS, HostMemory, LockTimeout, num_chunks
from swiftkv.shared_memory import address_of
from swiftkv.storage.backend import Status, StorageBackend
from swiftkv.storage.envelope import HEADER_BYTES
from swiftkv.storage.host_medium import HostMedium, chunk_bytes_for, host_tokens, make_host_memory
from tests.support.mappings import mapping_of
from tests.support.storage import BLOCK_BYTES, block_of, check_got, host_memory, key_of, opened, put, soon
from tests.support.storage_writer import (
    NUM_KEYS,
    die_in_a_write,
    event,
    kill_after,
    size_of,
    start,
    stop_in_a_write,
    stop_with_the_lock,
    wait_for,
    write_for_ever,
)

CHUNK_BYTES = 4096
MEMORY_BYTES = 8 << 20
_LONGEST_S = 0.03
_SMALL = 100


def medium_of(memory: dict[str, object], member: int = 0) -> HostMedium:
    fd = os.open(str(memory["file"]), os.O_RDWR)
    medium = HostMedium.of(fd, member)
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
        count = usage.bound_bytes // CHUNK_BYTES // -(-BLOCK_BYTES // CHUNK_BYTES)
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
        stop_with_the_lock(holder, medium)
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
    """A block of full attention has one chunk; one of windows fills its chunks but for a cache line each."""
    for block_bytes in (1, 4096, 64 << 10, 1 << 20, 1_835_008):
        chunk_bytes = chunk_bytes_for([], [block_bytes, 10 * block_bytes])
        num = -(-block_bytes // chunk_bytes)
        assert chunk_bytes <= 64 << 10
        assert 0 <= num * chunk_bytes - block_bytes < 64 * num
        rounded = -(-block_bytes // 64) * 64
        assert chunk_bytes_for([10 * block_bytes, block_bytes], [block_bytes // 2, 99]) == rounded


@pytest.mark.parametrize("chunk_bytes", [64, 4096, 5 * 64, 3 * 4096, 200_000 // 64 * 64, 1 << 20, 3 << 20])
def test_chunks_begin_at_a_multiple_of_their_size(chunk_bytes: int) -> None:
    with host_memory(MEMORY_BYTES, chunk_bytes) as memory:
        medium = medium_of(memory)
        assert medium.chunk_bytes == chunk_bytes
        assert medium.chunks_offset_bytes % chunk_bytes == 0
        end = medium.chunks_offset_bytes + medium.num_chunks * chunk_bytes
        assert end <= MEMORY_BYTES == medium.memory.nbytes
        assert MEMORY_BYTES - end < chunk_bytes + 4096 + 4 * medium.num_chunks  # with one more there are more buckets
        key, block = key_of(0), random.Random(0).randbytes(min(chunk_bytes, 999))
        assert medium.write([key], [(memoryview(b""), memoryview(block))], soon()) == [Status.OK]
        pinned = medium.pin([key], len(block), soon())
        assert pinned == ([0] if medium.num_chunks > 1 else [-1])  # of two chunks, one can be pinned
        assert medium.memory[medium.chunks_offset_bytes :][: len(block)] == block


def test_a_header_may_have_128_bytes() -> None:
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        medium = medium_of(memory)
        parts = (memoryview(bytes(range(128))), memoryview(b"block"))
        assert medium.write([key_of(0)], [parts], soon()) == [Status.OK]
        assert medium.headers(medium.pin([key_of(0)], 5, soon())) == [None]
        other = medium_of(memory, 1)
        assert other.headers(other.pin([key_of(0)], 5, soon())) == [bytes(range(128))]
        with pytest.raises(ValueError, match="a header of 129 bytes"):
            medium.write([key_of(1)], [(memoryview(bytes(129)), parts[1])], soon())


@pytest.mark.parametrize("block_bytes", [[3000], [3000, 12000], [3000, 3000, 12000]], ids=len)
def test_as_many_blocks_fit_as_the_plan_says(block_bytes: list[int]) -> None:
    """In all KV groups together: as many tokens fit as the bytes allow, whatever the number of groups."""
    num_bytes = 1 << 20
    chunk_bytes = chunk_bytes_for(block_bytes, [])
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


# ---- pins and members ----


def write(medium: HostMedium, *numbers: int, num_bytes: int = CHUNK_BYTES) -> None:
    keys = [key_of(n) for n in numbers]
    parts = [(memoryview(key), memoryview(block_of(key, num_bytes))) for key in keys]
    assert medium.write(keys, parts, soon()) == [Status.OK] * len(keys)


def chunk_of(medium: HostMedium, index: int) -> memoryview:
    begin = medium.chunks_offset_bytes + index * medium.chunk_bytes
    return medium.memory[begin : begin + medium.chunk_bytes]


def read_in_place(memory: dict[str, object], member: int, seed: int, has_begun: Event) -> None:
    """Pin blocks at random, also twice, and check that their bytes stay until the last pin is given back."""
    rng, medium = random.Random(seed), medium_of(memory, member)
    medium.release_member(member, soon())
    pinned: list[tuple[int, int]] = []
    for _ in itertools.count():
        number = rng.randrange(NUM_KEYS)
        (chunk,) = medium.pin([key_of(number)], CHUNK_BYTES, soon())
        if chunk >= 0:
            pinned.append((number, chunk))
            has_begun.set()
        for number, chunk in pinned:
            assert chunk_of(medium, chunk) == block_of(key_of(number), CHUNK_BYTES)
        while len(pinned) > rng.randrange(30):
            medium.unpin([pinned.pop(rng.randrange(len(pinned)))[1]])


def replace_for_ever(memory: dict[str, object], member: int, seed: int, has_begun: Event) -> None:
    """Write and drop blocks, more than there is room for."""
    rng, medium = random.Random(seed), medium_of(memory, member)
    medium.release_member(member, soon())
    for _ in itertools.count():
        write(medium, *rng.sample(range(NUM_KEYS), 5))
        has_begun.set()
        if rng.random() < 0.3:
            medium.drop([key_of(rng.randrange(NUM_KEYS))])


def read_in_place_and_kill(rng: random.Random, num_rounds: int) -> None:
    with host_memory(100 * CHUNK_BYTES, CHUNK_BYTES) as memory:
        watcher = HostMemory(medium_of(memory).memory)
        for _ in range(num_rounds):
            processes = []
            for member, target in enumerate([replace_for_ever, replace_for_ever, read_in_place, read_in_place], 1):
                has_begun = event()
                processes.append(start(target, memory, member, rng.randrange(1 << 30), has_begun))
                wait_for(has_begun)
            for process in rng.sample(processes, len(processes)):
                kill_after(process, rng.uniform(0.0, 3 * _LONGEST_S))
            for member in range(1, 5):
                watcher.release_member(member, soon())
            watcher.check_invariants(soon())
            assert not any(watcher.pinned_by(range(watcher.num_chunks)))


def test_what_is_pinned_stays_while_others_write_and_are_killed() -> None:
    read_in_place_and_kill(random.Random(4), 3)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_what_is_pinned_stays_through_a_thousand_kills() -> None:
    read_in_place_and_kill(random.Random(5), 250)


def test_three_quarters_can_be_pinned_by_all_together() -> None:
    """A chunk that another member has pinned does not count again."""
    with host_memory(100 * CHUNK_BYTES, CHUNK_BYTES) as memory:
        one, two = medium_of(memory, 0), medium_of(memory, 1)
        limit = one.num_chunks * 3 // 4
        write(one, *range(one.num_chunks))
        keys = [key_of(n) for n in range(one.num_chunks)]
        first = one.pin(keys[: limit // 2], CHUNK_BYTES, soon())
        assert min(first) >= 0
        assert two.pin(keys[: limit // 2], CHUNK_BYTES, soon()) == first
        rest = two.pin(keys, CHUNK_BYTES, soon())
        assert [chunk >= 0 for chunk in rest] == [True] * limit + [False] * (one.num_chunks - limit)
        write(one, *range(1000, 1000 + one.num_chunks))  # there is room to write
        two.unpin([chunk for chunk in rest if chunk >= 0] + first)
        assert one.pin([key_of(1000 + one.num_chunks - 1)], CHUNK_BYTES, soon())[0] >= 0


def test_a_pin_that_is_not_held_cannot_be_given_back() -> None:
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        process = start(unpin_too_often, memory)
        process.join()
        assert process.exitcode == -signal.SIGABRT


def unpin_too_often(memory: dict[str, object]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    medium = medium_of(memory)
    write(medium, 0)
    pinned = medium.pin([key_of(0)], CHUNK_BYTES, soon())
    medium.unpin(pinned)
    medium.unpin(pinned)


def test_a_memory_that_is_closed_gives_its_pins_back() -> None:
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        medium = medium_of(memory)
        watcher = HostMemory(medium.memory, 1)
        write(medium, 0, 1)
        medium.pin([key_of(0), key_of(1), key_of(0)], CHUNK_BYTES, soon())
        assert watcher.pinned_by([0, 1]) == [1, 1]
        del medium
        watcher.check_invariants(soon())
        assert watcher.pinned_by([0, 1]) == [0, 0]


def test_what_a_killed_writer_has_taken_comes_back_with_its_release() -> None:
    """It does not come back before: until then, the writer might only be slow."""
    with host_memory(20 * CHUNK_BYTES, CHUNK_BYTES) as memory:
        medium = medium_of(memory, 1)
        process = start(die_in_a_write, memory, key_of(0), 3 * CHUNK_BYTES, 0)
        process.join()
        assert process.exitcode == -signal.SIGBUS
        write(medium, *range(1, 100))
        assert medium.usage().objects == medium.num_chunks - 3
        assert not medium.exists([key_of(0)], soon())[0]
        medium.release_member(0, soon())
        write(medium, *range(100, 103))
        assert medium.usage().objects == medium.num_chunks


def write_one_large_often(memory: dict[str, object], num_bytes: int, is_enough: Event) -> None:
    medium = medium_of(memory, 1)
    while True:
        write(medium, 0, num_bytes=num_bytes)
        if is_enough.is_set():
            return
        medium.drop([key_of(0)])


def test_a_writer_that_was_stopped_goes_on_in_its_own_chunks() -> None:
    """Others evict all else meanwhile. It may be stopped for long, because only the end of its process counts."""
    num_bytes = 4000 * CHUNK_BYTES
    with host_memory(2 * num_bytes, CHUNK_BYTES) as memory:
        medium = medium_of(memory)
        is_enough = event()
        writer = start(write_one_large_often, memory, num_bytes, is_enough)
        stop_in_a_write(writer, medium)
        for first in range(0, 12000, 100):
            write(medium, *range(first + 1, first + 101))
        assert medium.usage().objects == medium.num_chunks - 4000
        is_enough.set()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGCONT)
        writer.join()
        assert writer.exitcode == 0
        found = (memoryview(bytearray(32)), memoryview(bytearray(num_bytes)))
        assert list(medium.read([key_of(0)], [found], soon())) == [Status.OK]
        assert found[1] == block_of(key_of(0), num_bytes)


def test_who_finds_the_lock_taken_takes_over_with_its_next_call() -> None:
    with host_memory(MEMORY_BYTES, 256) as memory:
        before = medium_of(memory)
        write(before, 0, num_bytes=100)
        before.pin([key_of(0)], 100, soon())
        medium, has_begun = medium_of(memory), event()
        holder = start(hold_the_lock_often, memory, 0, has_begun)
        wait_for(has_begun)
        stop_with_the_lock(holder, medium)
        with pytest.raises(LockTimeout):
            medium.release_member(0, time.monotonic() + 0.05)
        holder.kill()
        holder.join()
        watcher = HostMemory(medium.memory, 1)
        assert watcher.pinned_by([0]) == [1]
        medium.exists([], soon())
        assert watcher.pinned_by([0]) == [0]


def test_a_process_takes_over_only_once() -> None:
    """Storage may be opened again while host memory is in use."""
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        medium = medium_of(memory)
        medium.release_member(0, soon())
        write(medium, 0)
        (chunk,) = medium.pin([key_of(0)], CHUNK_BYTES, soon())
        medium_of(memory).release_member(0, soon())
        assert HostMemory(medium.memory, 1).pinned_by([chunk]) == [1]
        medium_of(memory, 1).release_member(0, soon())
        assert HostMemory(medium.memory, 1).pinned_by([chunk]) == [0]


_MUTEX_OFFSET_BYTES = 32
_LIBC = ctypes.CDLL(None)


def test_what_was_written_when_the_lock_was_not_to_be_had_is_found_later() -> None:
    num_bytes = 16 << 20
    with host_memory(6 * num_bytes, CHUNK_BYTES) as memory:
        medium, watcher = medium_of(memory), medium_of(memory, 1)
        mutex = ctypes.c_void_p(address_of(medium.memory) + _MUTEX_OFFSET_BYTES)
        parts = (memoryview(b""), memoryview(bytes(num_bytes)))
        for number in itertools.count():
            key, statuses = key_of(number), list[Status]()
            deadline_s = time.monotonic() + 0.3
            writer = threading.Thread(target=lambda: statuses.extend(medium.write([key], [parts], deadline_s)))  # noqa: B023
            before = watcher.usage().num_bytes
            writer.start()
            while watcher.usage().num_bytes == before and writer.is_alive():
                pass
            assert _LIBC.pthread_mutex_lock(mutex) == 0
            try:
                writer.join()
            finally:
                assert _LIBC.pthread_mutex_unlock(mutex) == 0
            if statuses == [Status.LATE]:
                break
            watcher.drop([key])  # it was too fast
        assert watcher.exists([key], soon()) == [False]
        medium.exists([], soon())
        assert watcher.exists([key], soon()) == [True]
        HostMemory(medium.memory, 1).check_invariants(soon())


def test_there_are_64_members() -> None:
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        medium_of(memory, MAX_MEMBERS - 1)
        with pytest.raises(ValueError, match="member: 64 is not below 64"):
            medium_of(memory, MAX_MEMBERS)
        with pytest.raises(ValueError, match="there is no member 64"):
            medium_of(memory).release_member(MAX_MEMBERS, soon())


def test_what_is_verified_is_one_object_and_not_its_place() -> None:
    with host_memory(20 * CHUNK_BYTES, CHUNK_BYTES) as memory:
        medium, other = medium_of(memory), medium_of(memory, 1)
        write(medium, 0)
        first = medium.pin([key_of(0)], CHUNK_BYTES, soon())
        assert medium.headers(first) == [None]
        medium.unpin(first)
        write(other, *range(1, 1 + other.num_chunks))
        keys = [key_of(n) for n in range(other.num_chunks, 0, -1)]  # the last one lies where the first one lay
        found = {chunk: key for key in keys for chunk in medium.pin([key], CHUNK_BYTES, soon()) if chunk >= 0}
        assert first[0] in found
        assert medium.headers(first) == [found[first[0]]]  # `write` makes the key the header
        medium.note_verified(first)
        assert medium.headers(first) == [None]


def test_what_was_dropped_while_it_was_pinned_stays_so_after_a_death_with_the_lock() -> None:
    with host_memory(MEMORY_BYTES, CHUNK_BYTES) as memory:
        medium, name = medium_of(memory, 1), bytes(32)  # another key than those of the process that is killed
        block = memoryview(bytes(CHUNK_BYTES))
        assert medium.write([name], [(memoryview(b""), block)], soon()) == [Status.OK]
        (chunk,) = medium.pin([name], CHUNK_BYTES, soon())
        medium.drop([name])
        has_begun = event()
        holder = start(hold_the_lock_often, memory, 0, has_begun)
        wait_for(has_begun)
        stop_with_the_lock(holder, medium)
        holder.kill()
        holder.join()
        assert medium.exists([name], soon()) == [False]
        assert num_repairs(memory) == 1
        HostMemory(medium.memory).check_invariants(soon())
        assert chunk_of(medium, chunk) == block
        assert medium.write([name], [(memoryview(b""), block)], soon()) == [Status.OK]
        assert medium.pin([name], CHUNK_BYTES, soon()) not in ([chunk], [-1])
