"""Divides calls for many objects, so that a medium checks its deadline now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swiftkv.storage.backend import Parts


def batches(objects: Sequence[Parts], full_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of runs, each of which ends with the object that brings it to `full_bytes`.

    Blocks of `full_bytes` in all are therefore one run: their headers do not push the last block into a run of its own.
    """
    begin, num_bytes = 0, 0
    for i, parts in enumerate(objects):
        if num_bytes >= full_bytes:
            yield begin, i
            begin, num_bytes = i, 0
        num_bytes += sum(map(len, parts))
    yield begin, len(objects)
