"""The header of every stored object, and the backend that returns only blocks that match their headers."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import xxhash

from swiftkv.storage.backend import KEY_BYTES, Capabilities, Parts, Status, Usage
from swiftkv.storage.breaker import GuardedMedium

FINGERPRINT_BYTES = 16
_MAGIC = b"SwKV"
_VERSION = 1
# Magic, version, fingerprint, key and length; then padding, so that a block begins at a multiple of a cache line. With
# files this makes copies from the page cache a seventh faster.
_NAMED = struct.Struct(f"<4sI{FINGERPRINT_BYTES}s{KEY_BYTES}sQ56x")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _NAMED.size + _CHECKSUM.size

_log = logging.getLogger(__name__)


def seal(fingerprint: bytes, key: bytes, block: memoryview) -> bytes:
    """Return the header of a block."""
    named = _NAMED.pack(_MAGIC, _VERSION, fingerprint, key, block.nbytes)
    return named + _CHECKSUM.pack(_checksum(named, block))


def verify(header: memoryview, fingerprint: bytes, key: bytes, block: memoryview) -> Status:
    """Return OK, CORRUPT, or MISSING for an intact object with another fingerprint under this key."""
    named = bytes(header[: _NAMED.size])
    magic, version, owner, owned_key, length = _NAMED.unpack(named)
    if (magic, version, owned_key, length) != (_MAGIC, _VERSION, key, block.nbytes):
        return Status.CORRUPT
    if _CHECKSUM.unpack(header[_NAMED.size :]) != (_checksum(named, block),):
        return Status.CORRUPT
    return Status.OK if owner == fingerprint else Status.MISSING


def drop_corrupt(medium: GuardedMedium, keys: Sequence[bytes], statuses: Sequence[Status]) -> None:
    """Drop the blocks that were found corrupt."""
    if corrupt := [key for key, status in zip(keys, statuses, strict=True) if status is Status.CORRUPT]:
        _log.warning("dropped %d corrupt blocks, the first %s", len(corrupt), corrupt[0].hex())
        medium.drop(corrupt)


def _checksum(named: bytes, block: memoryview) -> int:
    """Return a hash of the block that depends on the header before it."""
    return xxhash.xxh3_64_intdigest(block, xxhash.xxh3_64_intdigest(named))


class SealedBackend:
    """The one implementation of `StorageBackend`: seals blocks on `put`, and verifies them on `get`.

    `fingerprint` names the weights, the KV's dtype and the layout; blocks with another one are never returned.
    """

    def __init__(self, medium: GuardedMedium, fingerprint: bytes) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES
        self._medium = medium
        self._fingerprint = fingerprint

    @property
    def capabilities(self) -> Capabilities:
        return self._medium.capabilities

    @property
    def is_degraded(self) -> bool:
        return self._medium.is_degraded

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are there; a key may be lost before it is got."""
        assert all(len(key) == KEY_BYTES for key in keys)
        return self._medium.exists(keys, deadline_s) if keys else []

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Status]:
        """Read blocks, and drop those that are corrupt."""
        assert len(keys) == len(into)
        assert all(len(key) == KEY_BYTES for key in keys)
        if not keys:
            return []
        headers = memoryview(bytearray(HEADER_BYTES * len(keys)))
        parts = [(headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], block) for i, block in enumerate(into)]
        told = self._medium.read(keys, parts, deadline_s)
        statuses = [
            verify(header, self._fingerprint, key, block) if status is Status.OK else status
            for key, (header, block), status in zip(keys, parts, told, strict=True)
        ]
        drop_corrupt(self._medium, keys, statuses)
        return statuses

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview], deadline_s: float) -> list[Status]:
        """Write blocks, each after its header."""
        return self.put_sealed(keys, self.seal(keys, sources), deadline_s)

    def seal(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Parts]:
        """Return the blocks with their headers, for `put_sealed`."""
        assert len(keys) == len(sources)
        assert all(len(key) == KEY_BYTES for key in keys)
        return [
            (memoryview(seal(self._fingerprint, key, block)), block) for key, block in zip(keys, sources, strict=True)
        ]

    def put_sealed(self, keys: Sequence[bytes], sealed: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write blocks that a backend with the same fingerprint has sealed."""
        return self._medium.write(keys, sealed, deadline_s) if keys else []

    def usage(self) -> Usage | None:
        """Return the size of the medium; `None` if it is not known."""
        return self._medium.usage()

    def close(self) -> None:
        """Close the medium."""
        self._medium.close()
