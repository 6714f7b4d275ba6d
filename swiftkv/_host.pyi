"""Blocks in one mapping that engines share, any of which may be killed at any moment.

A deadline is a value of `time.monotonic()`. Statuses are those of `swiftkv.storage.backend.Status`.
"""

from collections.abc import Sequence

class LockTimeout(TimeoutError):
    """Another process kept the lock beyond the deadline."""

def format_memory(memory: memoryview, chunk_bytes: int) -> None:
    """Lay out memory that is all zeros. An object takes whole chunks.

    Raises `ValueError` unless `chunk_bytes` is a multiple of 64, and one chunk fits.
    """

def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks in a memory of `num_bytes`, beside its own administration."""

class HostMemory:
    """The objects in a memory that this process or another laid out; the least recently used are evicted first.

    An object is a header and a block. Calls release the GIL, and may come from several threads.
    """

    def __init__(self, memory: memoryview) -> None:
        """Keep the mapping as long as this lives. Raises `ValueError` if it was not laid out."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are there. Raises `LockTimeout`."""

    def read(
        self, keys: Sequence[bytes], into: Sequence[tuple[memoryview, memoryview]], deadline_s: float
    ) -> list[int]:
        """Copy objects out."""

    def write(
        self, keys: Sequence[bytes], sources: Sequence[tuple[memoryview, memoryview]], deadline_s: float
    ) -> list[int]:
        """Copy objects in, unless they are there."""

    def drop(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Forget objects. Raises `LockTimeout`."""

    def usage(self, deadline_s: float) -> tuple[int, int, int, int]:
        """Return (whole objects, bytes of chunks in use, bytes of all chunks, number of lock holders that died).

        Raises `LockTimeout`.
        """
