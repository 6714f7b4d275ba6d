"""Backends below each other: the nearest that has a block gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from swiftkv.storage.backend import Status, StorageBackend
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.fault import FaultMedium
from swiftkv.storage.levels import Level, Levels
from swiftkv.storage_options import FaultOptions
from tests.support.storage import BLOCK_BYTES, FINGERPRINT, MemoryMedium, block_of, key_of, soon

KEYS = [key_of(i) for i in range(6)]


@pytest.fixture
def media() -> Iterator[dict[str, MemoryMedium]]:
    yield {tier: MemoryMedium(tier) for tier in ("host", "storage")}
    MemoryMedium.shared.clear()


def sealed(medium: MemoryMedium | FaultMedium) -> StorageBackend:
    return SealedBackend(GuardedMedium(medium, Breaker()), FINGERPRINT)


def put(levels: Levels, keys: Sequence[bytes]) -> list[Status]:
    return levels.put(keys, [memoryview(block_of(key)) for key in keys], soon())


def got(levels: Levels, keys: Sequence[bytes]) -> list[tuple[Status, str]]:
    """Get blocks; those that are OK have the right bytes. Return the statuses and tiers."""
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    statuses, tiers = levels.get(keys, into, soon())
    for key, status, block in zip(keys, statuses, into, strict=True):
        assert status is not Status.OK or block == block_of(key)
    return list(zip(statuses, tiers, strict=True))


def levels(media: dict[str, MemoryMedium]) -> Levels:
    return Levels([Level(tier, sealed(medium)) for tier, medium in media.items()])


def test_what_was_put_is_in_every_level(media: dict[str, MemoryMedium]) -> None:
    assert put(levels(media), KEYS) == [Status.OK] * 6
    assert set(media["host"].objects) == set(media["storage"].objects) == set(KEYS)


def test_what_one_level_lacks_comes_from_the_next_and_is_kept(media: dict[str, MemoryMedium]) -> None:
    both = levels(media)
    put(both, KEYS)
    media["host"].drop(KEYS[2:])
    media["storage"].drop(KEYS[:3] + KEYS[5:])
    assert both.exists(KEYS, soon()) == [True, True, False, True, True, False]
    missing = (Status.MISSING, "storage")
    host, storage = (Status.OK, "host"), (Status.OK, "storage")
    assert got(both, KEYS) == [host, host, missing, storage, storage, missing]
    assert set(media["host"].objects) == {KEYS[0], KEYS[1], KEYS[3], KEYS[4]}


def test_a_block_that_is_corrupt_above_comes_from_below(media: dict[str, MemoryMedium]) -> None:
    both = levels(media)
    put(both, KEYS[:1])
    right = media["host"].objects[KEYS[0]]
    media["host"].objects[KEYS[0]] = bytes(len(right))
    assert got(both, KEYS[:1]) == [(Status.OK, "storage")]
    assert media["host"].objects[KEYS[0]] == right


def test_a_level_that_fails_is_told_and_the_other_goes_on(media: dict[str, MemoryMedium]) -> None:
    broken = FaultMedium(media["storage"], FaultOptions(inner={}, fail=1.0))
    both = Levels([Level("host", sealed(media["host"])), Level("storage", sealed(broken))])
    for _ in range(5):
        assert put(both, KEYS) == [Status.FAILED] * 6
    assert both.degraded_tiers == ["storage"]
    assert not both.is_degraded
    assert got(both, KEYS) == [(Status.OK, "host")] * 6
    host, storage = both.levels
    assert (host.puts, host.gets) == ({Status.OK: 30}, {Status.OK: 6})
    assert (storage.puts, storage.gets) == ({Status.FAILED: 30}, {})
