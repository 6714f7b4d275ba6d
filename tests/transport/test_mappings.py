"""Runs become the right addresses, and none outside the pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swiftkv.errors import TransferError
from swiftkv.transport.base import Runs
from swiftkv.transport.mappings import Mappings

WIDTH, BLOCK = 32, 96  # of three layers
POOL_BYTES, PEER_BYTES = 10 * BLOCK, 4 * BLOCK


def runs(*rows: list[int]) -> Runs:
    return Runs(np.array(rows, np.int64), WIDTH, BLOCK)


@pytest.fixture
def mappings() -> Mappings:
    pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    mapped = Mappings(pool)
    mapped.add(7, pool.data_ptr() + (1 << 20), PEER_BYTES)
    mapped.add(2, pool.data_ptr() - (1 << 20), PEER_BYTES)
    return mapped


def test_blocks_have_addresses_beside_our_pool_and_steps_between_layers(mappings: Mappings) -> None:
    """In units of 16 bytes; slots serve every layer."""
    blocks = mappings.flatten(runs([7, BLOCK, 0, 2, 1], [2, 0, 5 * BLOCK, 1, 0]))
    near, far = (1 << 20) // 16, -(1 << 20) // 16
    assert blocks.tolist() == [[near + 6, 0, 0], [near + 12, 2, 0], [far, 30, 2]]


def test_the_last_block_of_either_pool_is_there_and_the_next_is_not(mappings: Mappings) -> None:
    mappings.check(runs([7, PEER_BYTES - BLOCK, POOL_BYTES - BLOCK, 1, 0]))
    mappings.check(runs([7, 0, POOL_BYTES - 2 * WIDTH, 2, 1]))
    for row in (
        [7, PEER_BYTES - BLOCK, 0, 2, 0],
        [7, 0, POOL_BYTES - BLOCK, 2, 0],
        [7, 0, POOL_BYTES - WIDTH, 2, 1],
        [7, -16, 0, 1, 0],
        [7, 0, -16, 1, 0],
        [7, 0, 0, 0, 0],
    ):
        with pytest.raises(TransferError, match="outside of the pools"):
            mappings.flatten(runs([7, 0, 0, 1, 0], row))


def test_what_vectors_cannot_move_is_refused(mappings: Mappings) -> None:
    with pytest.raises(TransferError, match="multiples of 16"):
        mappings.flatten(runs([7, 8, 0, 1, 0]))


def test_a_link_that_was_removed_is_not_there(mappings: Mappings) -> None:
    removed = mappings.remove(7)
    assert removed is not None
    assert removed.nbytes == PEER_BYTES
    assert mappings.remove(7) is None
    assert mappings.links() == [2]
    with pytest.raises(TransferError, match=r"links \[7\] are not attached"):
        mappings.check(runs([7, 0, 0, 1, 0]))
