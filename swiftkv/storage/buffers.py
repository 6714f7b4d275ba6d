"""The host memory that an engine takes for blocks on their way between its pool and storage."""

from __future__ import annotations

_STAGING_BYTES = 32 << 20
"""The most bytes of one read. A GPU copies them in a millisecond or two, in which nothing is read from storage."""


def queue_rows(queue_bytes: int, block_bytes: int) -> int:
    """Return how many blocks, of all ranks together, a queue of `queue_bytes` holds: two at least."""
    return max(2, queue_bytes // block_bytes)


def staging_bytes(block_bytes: int) -> int:
    """Return the bytes between storage and a pool on a device; a block, of all ranks together, always fits."""
    return max(_STAGING_BYTES, block_bytes)


def page_locked_bytes(queue_bytes: int, block_bytes: int) -> int:
    """Return the host memory that is page-locked for storage below a pool on a device.

    Torch rounds what it locks up to powers of two.
    """
    queue = queue_rows(queue_bytes, block_bytes) * block_bytes
    return sum(1 << (num_bytes - 1).bit_length() for num_bytes in (queue, staging_bytes(block_bytes)))
