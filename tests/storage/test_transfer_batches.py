"""The number of objects that one transfer carries."""

from __future__ import annotations

import pytest

from swiftkv.storage.batches import batches


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "runs"),
    [
        (4, 1000, [(0, 4)]),
        (9, 1000, [(0, 4), (4, 8), (8, 9)]),
        (3, 3800, [(0, 2), (2, 3)]),
        (2, 9000, [(0, 1), (1, 2)]),
        (0, 1000, [(0, 0)]),
    ],
    ids=["full with its headers", "two full ones and a rest", "a little less", "larger than a run", "nothing"],
)
def test_a_run_ends_with_the_object_that_makes_it_full(
    num_blocks: int, block_bytes: int, runs: list[tuple[int, int]]
) -> None:
    header, block = memoryview(bytes(128)), memoryview(bytes(block_bytes))
    assert list(batches([(header, block)] * num_blocks, 4000)) == runs
