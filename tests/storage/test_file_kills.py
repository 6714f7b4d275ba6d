"""A process that is killed while it writes leaves nothing corrupt, nothing uncounted and nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swiftkv.storage.backend import Status
from tests.support.storage import check_got, key_of, opened, soon
from tests.support.storage_writer import (
    NUM_KEYS,
    event,
    files_in,
    kill_after,
    raw_options,
    size_of,
    start,
    wait_for,
    write_for_ever,
)

BOUND = 1 << 20
_LONGEST_S = 0.05


def kill_writers(cache: Path, rng: random.Random, num_writers: int) -> None:
    """Start writers on the directory, and kill each at a random point."""
    writers = []
    for _ in range(num_writers):
        has_begun = event()
        writers.append(start(write_for_ever, raw_options(cache, BOUND), rng.randrange(1 << 30), has_begun))
        wait_for(has_begun)
    for writer in writers:
        kill_after(writer, rng.uniform(0.0, _LONGEST_S))


def check_directory(cache: Path) -> None:
    """Open the directory: whatever is there is whole, counted and within the bound."""
    with opened(raw_options(cache, BOUND)) as backend:
        files = files_in(cache)
        numbers = [n for n in range(NUM_KEYS) if key_of(n) in files]
        assert len(numbers) == len(files)
        assert backend.exists([key_of(n) for n in range(NUM_KEYS)], soon()) == [
            key_of(n) in files for n in range(NUM_KEYS)
        ]
        usage = backend.usage()
        assert usage is not None
        assert usage.objects == len(files)
        assert sum(-(-size // 4096) * 4096 for size in files.values()) == usage.num_bytes <= BOUND
        for n in numbers:
            assert check_got(backend, [key_of(n)], size_of(n)) == [Status.OK]
        assert len(list((cache / "new").iterdir())) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_leaves_whole_objects(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kill_writers(tmp_path / "cache", rng, num_writers=1 + seed % 2)
    check_directory(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_kills_in_one_directory(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(500):
        kill_writers(tmp_path / "cache", rng, num_writers=2)
        check_directory(tmp_path / "cache")


def test_a_survivor_goes_on_beside_a_killed_process(tmp_path: Path) -> None:
    """Its index is not hurt, and the lock of the directory is free."""
    rng = random.Random(1)
    with opened(raw_options(tmp_path / "cache", BOUND)) as backend:
        kill_writers(tmp_path / "cache", rng, num_writers=1)
        source = memoryview(bytes(1000))
        assert backend.put([bytes(32)], [source], soon()) == [Status.OK]
        assert backend.get([bytes(32)], [memoryview(bytearray(1000))], soon()) == [Status.OK]
    kill_writers(tmp_path / "cache", rng, num_writers=1)
