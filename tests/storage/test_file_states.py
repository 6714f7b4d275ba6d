"""The file backend against a dictionary in order of use, with a bound."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from swiftkv.storage.backend import Status
from swiftkv.storage.envelope import HEADER_BYTES
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage
from tests.support.storage import FINGERPRINT, block_of, check_got, key_of, soon
from tests.support.storage_writer import NUM_KEYS, files_in, raw_options, size_of

BOUND = 40 * 4096
NUMBERS = st.integers(0, 24)


def on_disk(number: int) -> int:
    """Return the bytes that the object of a block takes."""
    return -(-(HEADER_BYTES + size_of(number)) // 4096) * 4096


class FileStates(RuleBasedStateMachine):
    """`self.model` holds the numbers of the blocks that must be there, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")  # closing writes the index to the disk, which takes its time there
        self.parent = Path(tempfile.mkdtemp(prefix="states-", dir=memory if memory.is_dir() else None))
        self.cache = self.parent / "cache"
        self.model: dict[int, None] = {}
        self.written: dict[int, None] = {}
        self.open()

    def open(self) -> None:
        self.backend = open_backend(parse_storage(raw_options(self.cache, BOUND), "storage", self.parent), FINGERPRINT)

    def teardown(self) -> None:
        self.backend.close()
        shutil.rmtree(self.parent)

    def use(self, number: int) -> None:
        self.model.pop(number, None)
        self.model[number] = None

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        source = memoryview(block_of(key_of(number), size_of(number)))
        assert self.backend.put([key_of(number)], [source], soon()) == [Status.OK]
        if number not in self.model:
            while sum(map(on_disk, self.model)) + on_disk(number) > BOUND:
                del self.model[next(iter(self.model))]
            self.written.pop(number, None)
            self.written[number] = None
        self.use(number)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6, unique=True))
    def get(self, numbers: list[int]) -> None:
        for number in numbers:
            expected = Status.OK if number in self.model else Status.MISSING
            assert check_got(self.backend, [key_of(number)], size_of(number)) == [expected]
            if number in self.model:
                self.use(number)

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.open()

    @rule()
    def reopen_without_index(self) -> None:
        """The order of writing is what is left then."""
        self.backend.close()
        for file in self.cache.glob("index.sqlite*"):
            file.unlink()
        self.model = {number: None for number in self.written if number in self.model}
        for age, number in enumerate(self.model):  # the clock of a file system may be too coarse to tell them apart
            os.utime(self.path(number), ns=(age, age))
        self.open()

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, NUM_KEYS))
    def lose_a_file(self, choice: int) -> None:
        number = list(self.model)[choice % len(self.model)]
        self.path(number).unlink()
        assert check_got(self.backend, [key_of(number)], size_of(number)) == [Status.MISSING]
        del self.model[number]

    @precondition(lambda self: self.model)
    @rule(choice=st.integers(0, NUM_KEYS), place=st.integers(0, 200))
    def spoil_a_file(self, choice: int, place: int) -> None:
        number = list(self.model)[choice % len(self.model)]
        data = bytearray(self.path(number).read_bytes())
        data[place % len(data)] ^= 0x10
        self.path(number).write_bytes(data)
        assert check_got(self.backend, [key_of(number)], size_of(number)) == [Status.CORRUPT]
        del self.model[number]

    @rule()
    def leave_something(self) -> None:
        """A process that is killed while it writes leaves this."""
        left = self.cache / "new" / "0123456789abcdef"
        left.mkdir(exist_ok=True)
        (left / "block").write_bytes(bytes(1000))
        self.reopen()
        assert not left.exists()

    @invariant()
    def index_directory_and_model_agree(self) -> None:
        files = files_in(self.cache)
        assert set(files) == {key_of(number) for number in self.model}
        assert [n for n in range(25) if self.backend.exists([key_of(n)], soon())[0]] == sorted(self.model)
        usage = self.backend.usage()
        assert usage is not None
        assert usage.objects == len(files)
        assert usage.num_bytes == sum(map(on_disk, self.model)) <= BOUND
        (own,) = (self.cache / "new").iterdir()
        spares = [file.stat().st_size for file in own.iterdir()]
        assert len(spares) <= 1 or sum(spares) <= BOUND // 8

    def path(self, number: int) -> Path:
        name = key_of(number).hex()
        return self.cache / "objects" / name[:2] / name


TestFileStates = FileStates.TestCase
TestFileStates.settings = settings(max_examples=6, stateful_step_count=25)


@pytest.mark.slow
def test_long_histories() -> None:
    run_state_machine_as_test(FileStates, settings=settings(max_examples=200, stateful_step_count=60))
