"""No byte of an object can change without notice."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.storage.backend import Parts, Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import HEADER_BYTES, SealedBackend, seal, verify
from tests.support.storage import FINGERPRINT, MemoryMedium, block_of, check_got, get, key_of, put, soon

KEY = key_of(1)
BLOCK = block_of(KEY, 100)
OBJECT = seal(FINGERPRINT, KEY, memoryview(BLOCK)) + BLOCK
OFFSETS = {
    "magic": 0,
    "version": 4,
    "fingerprint": 8,
    "key": 24,
    "length": 56,
    "room": 64,
    "checksum": 120,
    "block": 128,
}


def backend_with(stored: bytes) -> tuple[SealedBackend, MemoryMedium]:
    medium = MemoryMedium(name=stored.hex())
    medium.objects[KEY] = stored
    return SealedBackend(GuardedMedium(medium, Breaker()), FINGERPRINT), medium


def test_the_header_is_as_documented() -> None:
    """Other programs may read it."""
    assert OFFSETS["block"] == HEADER_BYTES
    magic, version, fingerprint, key, length, _ = struct.unpack_from("<4sI16s32sQ56xQ", OBJECT)
    assert (magic, version, fingerprint, key, length) == (b"SwKV", 1, FINGERPRINT, KEY, len(BLOCK))


def test_an_intact_object_is_ok() -> None:
    backend, _ = backend_with(OBJECT)
    assert check_got(backend, [KEY], len(BLOCK)) == [Status.OK]


class SequentialMedium(MemoryMedium):
    """A medium that tells of each object as it has read it, and spoils the block of the one before it."""

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        for i, (key, (header, block)) in enumerate(zip(keys, into, strict=True)):
            if i > 0:
                into[i - 1][1][:] = bytes(len(block))
            yield self._read(key, header, block)


def test_a_block_is_verified_before_the_next_is_read() -> None:
    """It lies in the processor's cache then."""
    backend = SealedBackend(GuardedMedium(SequentialMedium(name="sequential"), Breaker()), FINGERPRINT)
    keys = [key_of(n) for n in range(3)]
    assert put(backend, keys) == [Status.OK] * 3
    assert get(backend, keys)[0] == [Status.OK] * 3


@pytest.mark.parametrize("region", OFFSETS)
@given(data=st.data())
def test_a_flipped_bit_is_corrupt(region: str, data: st.DataObject) -> None:
    offsets = [*OFFSETS.values(), len(OBJECT)]
    begin, end = OFFSETS[region], offsets[offsets.index(OFFSETS[region]) + 1]
    bit = data.draw(st.integers(8 * begin, 8 * end - 1))
    spoiled = bytearray(OBJECT)
    spoiled[bit // 8] ^= 1 << bit % 8
    backend, medium = backend_with(bytes(spoiled))
    assert check_got(backend, [KEY], len(BLOCK)) == [Status.CORRUPT]
    assert KEY not in medium.objects


@given(length=st.integers(0, len(OBJECT) + 80))
def test_a_longer_or_shorter_object_is_corrupt(length: int) -> None:
    backend, medium = backend_with((OBJECT + OBJECT)[:length])
    expected = Status.OK if length == len(OBJECT) else Status.CORRUPT
    assert check_got(backend, [KEY], len(BLOCK)) == [expected]
    assert (KEY in medium.objects) is (expected is Status.OK)


def test_an_object_under_another_key_is_corrupt() -> None:
    """Another block's bytes are never an answer, however intact they are."""
    backend, medium = backend_with(OBJECT)
    medium.objects[key_of(2)] = OBJECT
    assert backend.get([key_of(2)], [memoryview(bytearray(len(BLOCK)))], soon()) == [Status.CORRUPT]


def test_an_intact_object_of_other_weights_is_kept() -> None:
    stored = seal(b"other weights...", KEY, memoryview(BLOCK)) + BLOCK
    backend, medium = backend_with(stored)
    assert check_got(backend, [KEY], len(BLOCK)) == [Status.MISSING]
    assert medium.objects[KEY] == stored


def test_a_header_of_zeros_is_corrupt() -> None:
    """A power cut may leave a file of zeros."""
    empty = memoryview(bytes(HEADER_BYTES))
    assert verify(empty, bytes(16), bytes(32), memoryview(b"")) is Status.CORRUPT


def test_sources_are_not_touched() -> None:
    backend, _ = backend_with(b"")
    source = bytearray(block_of(KEY))
    backend.put([key_of(3)], [memoryview(source)], soon())
    assert source == block_of(KEY)
    assert put(backend, [key_of(3)]) == [Status.OK]
