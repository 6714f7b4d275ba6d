"""Blocks in one mapping that engines share, any of which may be killed at any moment.

A deadline is a value of `time.monotonic()`. Statuses are those of `swiftkv.storage.backend.Status`.
"""

from collections.abc import Sequence

MAX_MEMBERS: int
"""The number of processes that can use one memory at once."""

class LockTimeout(TimeoutError):
    """Another process kept the lock beyond the deadline."""

def format_memory(memory: memoryview, chunk_bytes: int) -> None:
    """Lay out memory that is all zeros. An object takes whole chunks.

    Raises `ValueError` unless `chunk_bytes` is a multiple of 64, and one chunk fits.
    """

def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks in a memory of `num_bytes`, beside its own administration.

    The first chunk begins at a multiple of `chunk_bytes`.
    """

class HostMemory:
    """The objects in a memory that this process or another laid out; the least recently used are evicted first.

    An object is a header of at most 128 bytes, and a block. Calls that take the lock release the GIL. Calls may come
    from several threads.
    """

    def __init__(self, memory: memoryview, member: int = 0) -> None:
        """Keep the mapping as long as this lives, and give back all pins at the end.

        Raises `ValueError` if the memory was not laid out.

        Args:
            member: This process's number among those that use the memory, below `MAX_MEMBERS`. Of several objects of
                one member, only one may pin.
        """

    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunks_offset_bytes(self) -> int:
        """The offset of the first chunk in the memory, a multiple of `chunk_bytes`."""

    @property
    def num_chunks(self) -> int: ...
    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are there. Raises `LockTimeout`."""

    def read(
        self, keys: Sequence[bytes], into: Sequence[tuple[memoryview, memoryview]], deadline_s: float
    ) -> list[int]:
        """Copy objects out."""

    def write(
        self, keys: Sequence[bytes], sources: Sequence[tuple[memoryview, memoryview]], deadline_s: float
    ) -> list[int]:
        """Copy objects in, unless they are there. Raises `ValueError` for a header of more than 128 bytes."""

    def drop(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Forget objects; one that is pinned keeps its bytes until it no longer is. Raises `LockTimeout`."""

    def usage(self, deadline_s: float) -> tuple[int, int, int, int]:
        """Return (whole objects, bytes of chunks in use, bytes of all chunks, number of lock holders that died).

        Raises `LockTimeout`.
        """

    def pin(self, keys: Sequence[bytes], num_bytes: int, deadline_s: float) -> list[int]:
        """Pin the objects that are there, have a block of `num_bytes` and lie in one chunk each.

        Return the chunk of each, counted from 0, or -1 if it was not pinned. At most three quarters of all chunks can
        be pinned. An object may be pinned several times; each pin is given back by itself. Raises `LockTimeout`.
        """

    def unpin(self, chunks: Sequence[int]) -> None:
        """Give back one pin of each chunk. Waits for no other process."""

    def give_back(self) -> None:
        """Give back all pins that this object has left."""

    def headers(self, chunks: Sequence[int]) -> list[bytes | None]:
        """Return the headers of pinned objects; `None` for one that this process has written or verified."""

    def note_verified(self, chunks: Sequence[int]) -> None:
        """Note that these pinned objects are intact."""

    def pinned_by(self, chunks: Sequence[int]) -> list[int]:
        """Return the members that pin each chunk, one bit each."""

    def num_wanted(self) -> int:
        """Return a count that grows whenever a writer comes to a pinned object that it would have evicted."""

    def release_member(self, member: int, deadline_s: float) -> None:
        """Take away the pins of a member whose process is dead, and evict what it was writing.

        For this object's own member, the dead process is the one before this; once this process has taken over, nothing
        happens any more. Raises `LockTimeout`; then the next call that gets the lock takes over first.
        """

    def check_invariants(self, deadline_s: float) -> None:
        """Raise `RuntimeError` unless links, counts and pins agree. No process may give back pins meanwhile."""
