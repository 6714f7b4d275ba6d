"""Host memory against a list in order of use, with a bound in chunks. Two engines take turns, and others are killed."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from swiftkv._host import HostMemory, num_chunks
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend, seal
from swiftkv.storage.host_medium import HostMedium
from tests.support.storage import FINGERPRINT, block_of, check_got, host_memory, key_of, soon
from tests.support.storage_writer import die_in_a_write, event, start, stop_with_the_lock, wait_for

CHUNK_BYTES = 1024
MEMORY_BYTES = 26 << 10
NUM_CHUNKS = num_chunks(MEMORY_BYTES, CHUNK_BYTES)
MOST_PINNED = NUM_CHUNKS * 3 // 4
SIZES = (1, CHUNK_BYTES, 700, 900, 5000)
NUMBERS = st.integers(0, 24)
SOME = st.lists(NUMBERS, min_size=1, max_size=8, unique=True)
ENGINES = st.integers(0, 1)
CHOICE = st.integers(0, 99)
GHOST, BRIEF = 2, 63
"""The members whose processes are killed: one leaves pins and chunks until it is released, the other only briefly."""


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def chunks_of(number: int) -> int:
    """Return the chunks that the object of a block takes."""
    return -(-size_of(number) // CHUNK_BYTES)


@dataclass(eq=False)
class Object:
    number: int
    num_chunks: int
    state: str = "ready"
    pins: Counter[int] = field(default_factory=Counter)  # by member
    verified: set[int] = field(default_factory=set)  # the members that need not verify it
    chunk: int | None = None  # where it lies, once it was pinned

    @property
    def members(self) -> int:
        return sum(1 << member for member, count in self.pins.items() if count)


def medium_of(memory: dict[str, object], member: int) -> HostMedium:
    fd = os.open(str(memory["file"]), os.O_RDWR)
    try:
        medium = HostMedium.of(fd, member)
    finally:
        os.close(fd)
    medium.release_member(member, soon())
    return medium


def pin_and_wait(memory: dict[str, object], numbers: list[int], has_begun: Event) -> None:
    medium = medium_of(memory, GHOST)
    for number in numbers:
        medium.pin([key_of(number)], size_of(number), soon())
    has_begun.set()
    time.sleep(1000)


def pin_for_ever(memory: dict[str, object], number: int, has_begun: Event) -> None:
    medium = medium_of(memory, BRIEF)
    many = [key_of(n) for n in range(25)] * 20
    while True:
        pinned = [chunk for chunk in medium.pin([key_of(number)], size_of(number), soon()) if chunk >= 0]
        has_begun.set()
        medium.exists(many, soon())
        medium.unpin(pinned)


class HostStates(RuleBasedStateMachine):
    """`self.objects` holds what must be there, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.raw = self.stack.enter_context(host_memory(MEMORY_BYTES, CHUNK_BYTES))
        self.media = [medium_of(self.raw, member) for member in range(2)]
        self.engines = [SealedBackend(GuardedMedium(medium, Breaker()), FINGERPRINT) for medium in self.media]
        fd = os.open(str(self.raw["file"]), os.O_RDWR)
        self.bytes = self.stack.enter_context(mmap.mmap(fd, MEMORY_BYTES))
        self.watcher = HostMemory(memoryview(mmap.mmap(fd, MEMORY_BYTES)), BRIEF)
        os.close(fd)
        self.objects: list[Object] = []
        self.num_wanted = 0
        self.pinned_bytes: dict[int, bytes] = {}

    def teardown(self) -> None:
        self.stack.close()

    # ---- the model ----

    def found(self, number: int) -> Object | None:
        return next((each for each in self.objects if each.number == number and each.state == "ready"), None)

    def use(self, one: Object) -> None:
        self.objects.remove(one)
        self.objects.append(one)

    @property
    def num_free(self) -> int:
        return NUM_CHUNKS - sum(each.num_chunks for each in self.objects)

    def take(self, one: Object) -> bool:
        for old in list(self.objects):
            if self.num_free >= one.num_chunks:
                break
            if old.members:
                self.num_wanted += 1
                self.use(old)
            elif old.state == "writing":
                self.use(old)
            else:
                self.objects.remove(old)
        if self.num_free < one.num_chunks:
            return False
        self.objects.append(one)
        return True

    def drop_in_model(self, one: Object) -> None:
        if one.members:
            one.state = "dropped"
            one.verified.clear()
        else:
            self.objects.remove(one)

    def can_pin(self, number: int) -> Object | None:
        one = self.found(number)
        if one is None or one.num_chunks != 1:
            return None
        num_pinned = sum(1 for each in self.objects if each.members)
        return one if one.members or num_pinned < MOST_PINNED else None

    def pin_in_model(self, number: int, member: int) -> Object | None:
        one = self.can_pin(number)
        if one is not None:
            self.use(one)
            one.pins[member] += 1
        return one

    def release_in_model(self, member: int) -> None:
        self.objects = [each for each in self.objects if each.state != "writing"]
        for each in self.objects:
            each.pins.pop(member, None)

    def held(self, engine: int) -> list[Object]:
        """Return what an engine has pinned, each as often as it has pinned it."""
        return [each for each in self.objects for _ in range(each.pins[engine])]

    # ---- the rules ----

    @rule(numbers=SOME, engine=ENGINES)
    def put(self, numbers: list[int], engine: int) -> None:
        for number in numbers:
            source = memoryview(block_of(key_of(number), size_of(number)))
            (status,) = self.engines[engine].put([key_of(number)], [source], soon())
            if (one := self.found(number)) is not None:
                self.use(one)
                assert status is Status.OK
            else:
                has_room = self.take(Object(number, chunks_of(number), verified={engine}))
                assert status is (Status.OK if has_room else Status.MISSING)

    @rule(numbers=SOME, engine=ENGINES)
    def get(self, numbers: list[int], engine: int) -> None:
        for number in numbers:
            one = self.found(number)
            expected = Status.MISSING if one is None else Status.OK
            assert check_got(self.engines[engine], [key_of(number)], size_of(number)) == [expected]
            if one is not None:
                self.use(one)

    @rule(engine=ENGINES)
    def put_what_cannot_fit(self, engine: int) -> None:
        source = memoryview(bytes(MEMORY_BYTES))
        assert self.engines[engine].put([bytes(32)], [source], soon()) == [Status.MISSING]

    @precondition(lambda self: any(each.state == "ready" for each in self.objects))
    @rule(choice=CHOICE, engine=ENGINES)
    def put_another_length(self, choice: int, engine: int) -> None:
        """It replaces the object, but not one that is pinned."""
        ready = [each for each in self.objects if each.state == "ready"]
        one = ready[choice % len(ready)]
        parts = (memoryview(b"header"), memoryview(b"block"))
        (status,) = self.media[engine].write([key_of(one.number)], [parts], soon())
        assert status is (Status.MISSING if one.members else Status.OK)
        if not one.members:
            self.objects.remove(one)
            self.media[engine].drop([key_of(one.number)])

    @rule(numbers=SOME, engine=ENGINES)
    def drop(self, numbers: list[int], engine: int) -> None:
        self.media[engine].drop([key_of(number) for number in numbers])
        for number in numbers:
            if (one := self.found(number)) is not None:
                self.drop_in_model(one)

    @precondition(lambda self: any(each.state == "ready" for each in self.objects))
    @rule(choice=CHOICE, bit=st.integers(0, 7), engine=ENGINES)
    def spoil(self, choice: int, bit: int, engine: int) -> None:
        """A bit flips, and the next reader drops the object."""
        ready = [each for each in self.objects if each.state == "ready"]
        number = ready[choice % len(ready)].number
        if size_of(number) == 1:
            return  # such a block is found in many places
        begin = block_of(key_of(number), size_of(number))[:CHUNK_BYTES]
        places = []
        while (at := self.bytes.find(begin, places[-1] + 1 if places else 0)) >= 0:
            places.append(at)  # also where it has lain before
        for at in places:
            self.bytes[at] ^= 1 << bit
        self.pinned_bytes = {chunk: self.chunk_bytes(chunk) for chunk in self.pinned_bytes}
        assert check_got(self.engines[engine], [key_of(number)], size_of(number)) == [Status.CORRUPT]
        one = self.found(number)
        assert one is not None
        self.use(one)
        self.drop_in_model(one)

    @rule(numbers=SOME, engine=ENGINES, is_one_size=st.booleans())
    def pin(self, numbers: list[int], engine: int, is_one_size: bool) -> None:
        """With one size for all, those of other sizes are not pinned."""
        size = size_of(numbers[0])
        calls = [numbers] if is_one_size else [[number] for number in numbers]
        for call in calls:
            num_bytes = size if is_one_size else size_of(call[0])
            chunks = self.media[engine].pin([key_of(number) for number in call], num_bytes, soon())
            for number, chunk in zip(call, chunks, strict=True):
                one = self.pin_in_model(number, engine) if size_of(number) == num_bytes else None
                assert (chunk >= 0) == (one is not None)
                if one is not None:
                    assert one.chunk in (None, chunk)
                    one.chunk = chunk
                    assert self.chunk_bytes(chunk)[: size_of(number)] == block_of(key_of(number), size_of(number))
                    self.pinned_bytes[chunk] = self.chunk_bytes(chunk)

    @rule(engine=ENGINES, choices=st.lists(CHOICE, min_size=1, max_size=6))
    def unpin(self, engine: int, choices: list[int]) -> None:
        given_back = []
        for choice in choices:
            if held := self.held(engine):
                one = held[choice % len(held)]
                one.pins[engine] -= 1
                given_back.append(one.chunk)
        self.media[engine].unpin([chunk for chunk in given_back if chunk is not None])

    @rule(engine=ENGINES, choice=CHOICE)
    def verify(self, engine: int, choice: int) -> None:
        """A header is there only of what this engine has neither written nor verified."""
        held = [one for one in self.held(engine) if one.chunk is not None]
        headers = self.media[engine].headers([one.chunk for one in held if one.chunk is not None])
        for one, header in zip(held, headers, strict=True):
            key = key_of(one.number)
            sealed = seal(FINGERPRINT, key, memoryview(block_of(key, size_of(one.number))))
            assert header == (None if engine in one.verified else sealed)
        if held:
            one = held[choice % len(held)]
            assert one.chunk is not None
            self.media[engine].note_verified([one.chunk])
            one.verified.add(engine)

    @rule(numbers=SOME)
    def kill_with_pins(self, numbers: list[int]) -> None:
        """The process before it is released when the next one of the same member begins."""
        has_begun = event()
        ghost = start(pin_and_wait, self.raw, numbers, has_begun)
        wait_for(has_begun)
        ghost.kill()
        ghost.join()
        self.release_in_model(GHOST)
        for number in numbers:
            self.pin_in_model(number, GHOST)

    @rule(number=NUMBERS)
    def kill_in_a_write(self, number: int) -> None:
        """Leave the chunks taken that a killed engine was writing."""
        ghost = start(die_in_a_write, self.raw, key_of(100), size_of(number), GHOST)
        ghost.join()
        assert ghost.exitcode == -signal.SIGBUS
        self.release_in_model(GHOST)
        self.take(Object(100, chunks_of(number), state="writing"))

    @rule(engine=ENGINES)
    def release(self, engine: int) -> None:
        self.media[engine].release_member(GHOST, soon())
        self.release_in_model(GHOST)

    @rule(number=NUMBERS, engine=ENGINES)
    def kill_with_the_lock(self, number: int, engine: int) -> None:
        has_begun = event()
        process = start(pin_for_ever, self.raw, number, has_begun)
        wait_for(has_begun)
        stop_with_the_lock(process, self.media[engine])
        process.kill()
        process.join()
        num_before = self.watcher.usage(soon())[3]  # repairs
        assert num_before > 0
        self.media[engine].release_member(BRIEF, soon())
        if (one := self.can_pin(number)) is not None:
            self.use(one)

    # ---- what holds after each ----

    def chunk_bytes(self, chunk: int) -> bytes:
        begin = self.media[0].chunks_offset_bytes + chunk * CHUNK_BYTES
        return self.bytes[begin : begin + CHUNK_BYTES]

    @invariant()
    def both_engines_and_the_model_agree(self) -> None:
        self.watcher.check_invariants(soon())
        ready = sorted(each.number for each in self.objects if each.state == "ready")
        for engine in self.engines:
            is_there = engine.exists([key_of(n) for n in range(25)], soon())
            assert [n for n in range(25) if is_there[n]] == ready
            usage = engine.usage()
            assert usage is not None
            assert usage.objects == len(ready)
            assert usage.num_bytes == CHUNK_BYTES * (NUM_CHUNKS - self.num_free)
            assert usage.bound_bytes == CHUNK_BYTES * NUM_CHUNKS <= MEMORY_BYTES

    @invariant()
    def pins_are_those_of_the_model(self) -> None:
        members = self.watcher.pinned_by(range(NUM_CHUNKS))
        assert sorted(filter(None, members)) == sorted(each.members for each in self.objects if each.members)
        assert all(members[one.chunk] == one.members for one in self.objects if one.chunk is not None)
        assert {medium.num_wanted() for medium in self.media} == {self.num_wanted}

    @invariant()
    def what_is_pinned_does_not_change(self) -> None:
        pinned = {one.chunk for one in self.objects if one.members and one.chunk is not None}
        self.pinned_bytes = {chunk: then for chunk, then in self.pinned_bytes.items() if chunk in pinned}
        assert all(self.chunk_bytes(chunk) == then for chunk, then in self.pinned_bytes.items())


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""All but shrinking, which would start thousands of processes."""

TestHostStates = HostStates.TestCase
TestHostStates.settings = settings(max_examples=8, stateful_step_count=40, deadline=None, phases=PHASES)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_long_histories() -> None:
    run_state_machine_as_test(
        HostStates, settings=settings(max_examples=200, stateful_step_count=100, deadline=None, phases=PHASES)
    )
