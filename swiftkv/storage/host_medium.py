"""Host memory that the engines of a node share: it outlives each of them, and ends with the node."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from swiftkv._host import HostMemory, format_memory, num_chunks
from swiftkv.arithmetic import ceil_div
from swiftkv.shared_memory import fill_ahead, make_memory, map_memory
from swiftkv.storage.backend import Capabilities, Parts, Status, Usage
from swiftkv.storage.batches import batches

_MAX_CHUNK_BYTES = 64 << 10
_CACHE_LINE_BYTES = 64
_MAX_CALLS = 8
_READ_BYTES = 256 << 10
"""The bytes that are copied before their blocks are verified, while they lie in the processor's cache."""
_LOCK_WAIT_S = 1.0
"""The longest wait for the lock, which is held for microseconds unless its holder was stopped."""


def chunk_bytes_for(full_block_bytes: Collection[int], window_block_bytes: Collection[int]) -> int:
    """Return the size of chunks for blocks of these sizes, of full attention and of windows.

    A chunk holds the smallest block of full attention, so that it can be attended to where it lies. If there are only
    windows, their smallest block fills its chunks, of at most 64 KiB each.
    """
    if full_block_bytes:
        exact = min(full_block_bytes)
    else:
        smallest = min(window_block_bytes)
        exact = ceil_div(smallest, ceil_div(smallest, _MAX_CHUNK_BYTES))
    return ceil_div(exact, _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES


def host_tokens(num_bytes: int, chunk_bytes: int, block_bytes: Sequence[int], block_size: int) -> int:
    """Return the tokens whose KV fits if all groups keep all of their blocks, of `block_bytes` each."""
    chunks_per_block = sum(ceil_div(group_bytes, chunk_bytes) for group_bytes in block_bytes)
    return num_chunks(num_bytes, chunk_bytes) // chunks_per_block * block_size


def make_host_memory(num_bytes: int, chunk_bytes: int) -> int:
    """Make memory for `HostMedium`; return the descriptor, which engines inherit.

    Raises `OSError`, or `ValueError` if not even one chunk fits.
    """
    fd = make_memory("host", num_bytes)
    try:
        format_memory(map_memory(fd, num_bytes), chunk_bytes)
    except (OSError, ValueError):
        os.close(fd)
        raise
    return fd


def map_host_memory(fd: int) -> memoryview:
    """Map the memory behind `fd`, from `make_host_memory`. Raises `OSError`."""
    return map_memory(fd, os.fstat(fd).st_size)


class HostMedium:
    """Objects in one mapping, which are found, entered and evicted under a lock, and copied without it.

    If a process dies with the lock, the next one that takes it rebuilds the links. An object that is evicted while it
    is read is reported as missing. One that is pinned stays, and can be read where it lies: chunk `i` of the memory
    begins at `chunks_offset_bytes + i * chunk_bytes`. See `cpp_ext/host/host_memory.h`.
    """

    def __init__(self, memory: memoryview, member: int = 0) -> None:
        """Use memory from `map_host_memory` as its member number `member`: no other living process has that number."""
        self._mapping = memory
        self._memory = HostMemory(memory, member)

    @classmethod
    def of(cls, fd: int, member: int = 0) -> HostMedium:
        """Map the memory behind `fd`, from `make_host_memory`. Raises `OSError`."""
        return cls(map_host_memory(fd), member)

    @property
    def memory(self) -> memoryview:
        """The whole mapping, in which the chunks lie."""
        return self._mapping

    @property
    def chunk_bytes(self) -> int:
        return self._memory.chunk_bytes

    @property
    def chunks_offset_bytes(self) -> int:
        """The offset of the first chunk in the memory, a multiple of `chunk_bytes`."""
        return self._memory.chunks_offset_bytes

    @property
    def num_chunks(self) -> int:
        return self._memory.num_chunks

    def fill_ahead(self) -> threading.Thread:
        """Have the kernel back all of the memory, in a thread that ends with this object.

        Copies to memory that is backed already are three times as fast. Each engine does this for itself. If the node
        did it for all, the kernel would count the memory as the node's, and might kill the node for using too much.
        """
        return fill_ahead(self, self._mapping)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=False, is_shared=False, max_calls=_MAX_CALLS)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are there."""
        return self._memory.exists(keys, deadline_s)

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        """Copy objects out, a few at a time."""
        for begin, end in batches(into, _READ_BYTES):
            yield from map(Status, self._memory.read(keys[begin:end], into[begin:end], deadline_s))

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Copy in the objects that are not there; the least recently used others give way."""
        return [Status(status) for status in self._memory.write(keys, sources, deadline_s)]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget objects. One that is pinned keeps its bytes until it no longer is."""
        self._memory.drop(keys, _soon_s())

    def usage(self) -> Usage:
        """Return the size of the objects of all engines, in whole chunks."""
        num_objects, num_bytes, bound_bytes, _ = self._memory.usage(_soon_s())
        return Usage(num_objects, num_bytes, bound_bytes)

    def pin(self, keys: Sequence[bytes], num_bytes: int, deadline_s: float) -> list[int]:
        """Pin the objects that are there, have a block of `num_bytes` and lie in one chunk each.

        Return the chunk of each, counted from 0, or -1 if it was not pinned. At most three quarters of all chunks can
        be pinned. Each pin is given back by itself. Raises `LockTimeout`.
        """
        return self._memory.pin(keys, num_bytes, deadline_s)

    def unpin(self, chunks: Sequence[int]) -> None:
        """Give back one pin of each chunk. Waits for no other process."""
        self._memory.unpin(chunks)

    def give_back(self) -> None:
        """Give back all pins of this object that are left. Waits for no other process."""
        self._memory.give_back()

    def headers(self, chunks: Sequence[int]) -> list[bytes | None]:
        """Return the headers of pinned objects; `None` for one that this process has written or verified."""
        return self._memory.headers(chunks)

    def note_verified(self, chunks: Sequence[int]) -> None:
        """Note that these pinned objects are intact, so that `headers` returns `None` for them."""
        self._memory.note_verified(chunks)

    def num_wanted(self) -> int:
        """Return a count that grows whenever a writer comes to a pinned object that it would have evicted.

        An engine that sees it grow gives back the pins that it does not use.
        """
        return self._memory.num_wanted()

    def release_member(self, member: int, deadline_s: float) -> None:
        """Take away the pins of a member whose process is dead, and evict what it was writing.

        An engine calls this for its own member before anything else, because its predecessor may have been killed.
        Further calls of the same process for its own member do nothing. Raises `LockTimeout`; then the next call that
        gets the lock does this first, if it is for the own member.
        """
        self._memory.release_member(member, deadline_s)

    def close(self) -> None:
        """Do nothing: the mapping ends with this object, because a call may still use it."""


def _soon_s() -> float:
    return time.monotonic() + _LOCK_WAIT_S
