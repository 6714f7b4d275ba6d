"""Host memory against a dictionary in order of use, with a bound in chunks; two engines take turns."""

from __future__ import annotations

import contextlib
import mmap
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from swiftkv._host import num_chunks
from swiftkv.storage.backend import Status
from swiftkv.storage.envelope import HEADER_BYTES
from tests.support.storage import block_of, check_got, host_memory, key_of, opened, soon

CHUNK_BYTES = 1024
MEMORY_BYTES = 120 << 10
NUM_CHUNKS = num_chunks(MEMORY_BYTES, CHUNK_BYTES)
SIZES = (1, CHUNK_BYTES - HEADER_BYTES, 4000, 20_000)
NUMBERS = st.integers(0, 24)
ENGINES = st.integers(0, 1)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def chunks_of(number: int) -> int:
    """Return the chunks that the object of a block takes."""
    return -(-(HEADER_BYTES + size_of(number)) // CHUNK_BYTES)


class HostStates(RuleBasedStateMachine):
    """`self.model` holds the numbers of the blocks that must be there, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        raw = self.stack.enter_context(host_memory(MEMORY_BYTES, CHUNK_BYTES))
        self.engines = [self.stack.enter_context(opened(raw)) for _ in range(2)]
        fd = os.open(str(raw["file"]), os.O_RDWR)
        self.bytes = self.stack.enter_context(mmap.mmap(fd, MEMORY_BYTES))
        os.close(fd)
        self.model: dict[int, None] = {}

    def teardown(self) -> None:
        self.stack.close()

    def use(self, number: int) -> None:
        self.model.pop(number, None)
        self.model[number] = None

    @rule(number=NUMBERS, engine=ENGINES)
    def put(self, number: int, engine: int) -> None:
        source = memoryview(block_of(key_of(number), size_of(number)))
        assert self.engines[engine].put([key_of(number)], [source], soon()) == [Status.OK]
        if number not in self.model:
            while sum(map(chunks_of, self.model)) + chunks_of(number) > NUM_CHUNKS:
                del self.model[next(iter(self.model))]
        self.use(number)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6, unique=True), engine=ENGINES)
    def get(self, numbers: list[int], engine: int) -> None:
        for number in numbers:
            expected = Status.OK if number in self.model else Status.MISSING
            assert check_got(self.engines[engine], [key_of(number)], size_of(number)) == [expected]
            if number in self.model:
                self.use(number)

    @rule(engine=ENGINES)
    def put_what_cannot_fit(self, engine: int) -> None:
        source = memoryview(bytes(MEMORY_BYTES))
        assert self.engines[engine].put([bytes(32)], [source], soon()) == [Status.MISSING]

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, 24), bit=st.integers(0, 7), engine=ENGINES)
    def spoil(self, choice: int, bit: int, engine: int) -> None:
        """A writer that was stopped for long and goes on may write where another block lies by now."""
        number = list(self.model)[choice % len(self.model)]
        if size_of(number) == 1:
            return  # such a block is found in many places
        begin = block_of(key_of(number), size_of(number))[: CHUNK_BYTES - HEADER_BYTES]
        places = []
        while (at := self.bytes.find(begin, places[-1] + 1 if places else 0)) >= 0:
            places.append(at)  # also where it has lain before
        for at in places:
            self.bytes[at] ^= 1 << bit
        assert check_got(self.engines[engine], [key_of(number)], size_of(number)) == [Status.CORRUPT]
        del self.model[number]

    @invariant()
    def both_engines_and_the_model_agree(self) -> None:
        for engine in self.engines:
            is_there = engine.exists([key_of(n) for n in range(25)], soon())
            assert [n for n in range(25) if is_there[n]] == sorted(self.model)
            usage = engine.usage()
            assert usage is not None
            assert usage.objects == len(self.model)
            assert usage.num_bytes == CHUNK_BYTES * sum(map(chunks_of, self.model))
            assert usage.bound_bytes == CHUNK_BYTES * NUM_CHUNKS <= MEMORY_BYTES


TestHostStates = HostStates.TestCase
TestHostStates.settings = settings(max_examples=10, stateful_step_count=40)


@pytest.mark.slow
def test_long_histories() -> None:
    run_state_machine_as_test(HostStates, settings=settings(max_examples=500, stateful_step_count=100))
