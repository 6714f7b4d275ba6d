"""The interface of storage: blocks as bytes under keys, beyond the life of a process.

Calls block. Several threads of the tier make them at once. A key has 32 bytes, and every put of a key puts the same
bytes. A deadline is a value of `time.monotonic()`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 32


class Status(enum.IntEnum):
    """The outcome for one key."""

    OK = 0
    """The block was read and verified; or it was written, or was there already."""
    MISSING = 1
    """The backend has no such block of this model, or it is full and kept nothing. This is no failure."""
    CORRUPT = 2
    """The magic, version, key, length or checksum does not match the block that was put. The object is dropped."""
    FAILED = 3
    """The backend reported an error, or refuses calls for now (`is_degraded`)."""
    LATE = 4
    """The deadline passed before the block was read or written."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The properties in which backends differ."""

    is_durable: bool  # its objects outlive this process
    is_shared: bool  # processes on other machines see them too
    max_calls: int  # calls that run at once; any more wait for their turn until their deadline
    register: Callable[[memoryview], None] | None = None
    """Registers memory of blocks, whose bytes are then moved without a copy until `close`; None: always copies."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of a backend, including objects of others."""

    objects: int
    num_bytes: int
    bound_bytes: int | None  # None: the backend does not say


Parts = tuple[memoryview, memoryview]
"""One object: an envelope's header, and a block. A medium keeps them as one run of bytes."""


class StorageBackend(Protocol):
    """Storage for blocks. Failures of a medium are statuses, key by key; nothing is raised for them.

    All sequences of one call have the length of `keys`. Buffers are contiguous bytes ("B"), those of `get` writable and
    exactly as long as the block that was put. They belong to the call until it returns, and are never touched
    afterwards.

    A call returns soon after its deadline, unless the medium itself is stuck, such as a dead network file system. It
    then returns only when the medium does. So a tier waits for a call by its own clock, and reuses `into` only once the
    call has returned.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def is_degraded(self) -> bool:
        """Whether calls are refused for now, because the backend failed or was slow too often, or a call hangs."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return for each key whether it is there: False, too, if that is not known."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Status]:
        """Read blocks. Buffers of keys that are not OK have undefined contents."""

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview], deadline_s: float) -> list[Status]:
        """Write blocks; the backend evicts its least recently used ones for them."""

    def seal(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[Parts]:
        """Return the blocks with their headers, which are the same for all backends of one model and layout."""

    def put_sealed(self, keys: Sequence[bytes], sealed: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write blocks that a backend of the same model and layout has sealed, as `put` does."""

    def usage(self) -> Usage | None:
        """Return the size of the backend; `None` if it is not known."""

    def close(self) -> None:
        """Close the backend, after the last call has returned. No other call may follow."""


class Medium(Protocol):
    """Keeps objects under keys. It verifies nothing: an envelope and a breaker stand between it and a tier.

    All sequences of one call have the length of `keys`. A call that fails as a whole raises `OSError`, or
    `TimeoutError` if time ran out; a failure of one key is its status. Called from several threads.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are there."""

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterable[Status]:
        """Fill the parts. An object that is longer or shorter than its parts is CORRUPT.

        A medium that reads one object after the other yields the statuses as it goes: then each block is verified while
        it lies in the processor's cache.
        """

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Keep copies of the parts. A key that is there already is OK, and need not be written."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove corrupt objects; keys that are not there are ignored."""

    def usage(self) -> Usage | None:
        """Return the size of the medium; `None` if it is not known."""

    def close(self) -> None:
        """Close the medium, after the last call has returned. No other call may follow."""
