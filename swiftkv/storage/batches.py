"""Calls for many objects in pieces, so that a medium looks at its deadline now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swiftkv.storage.backend import Parts


def batches(objects: Sequence[Parts], max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of runs of at most `max_bytes`, or of one object."""
    begin, num_bytes = 0, 0
    for i, parts in enumerate(objects):
        size = sum(map(len, parts))
        if i > begin and num_bytes + size > max_bytes:
            yield begin, i
            begin, num_bytes = i, 0
        num_bytes += size
    yield begin, len(objects)
