"""Rows of a pool, as a device gathers and scatters them, beside the host's."""

from __future__ import annotations

import numpy as np
import torch

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.transport.rows import gather_rows, rows_of, scatter_rows

GROUP = KVGroup((0, 1, 2), 2, 16, "float32", 16)


def test_a_device_gathers_and_scatters_what_the_host_does() -> None:
    pool = Pool([(GROUP, 8)])
    pool.tensor.copy_(torch.arange(pool.nbytes) % 251)
    copy = pool.tensor.clone()
    rows, width = rows_of(pool), GROUP.layer_block_bytes
    rows.fence().wait()
    offsets = np.array([5, 0, 17, 23], np.int64) * width
    taken = gather_rows(copy, torch.from_numpy(offsets), width)
    assert taken.shape == (4, width)
    assert torch.equal(taken, rows.take(offsets, width))
    assert torch.equal(taken[2], pool.tensor[17 * width : 18 * width])
    new = torch.randint(256, (4, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scatter_rows(copy, torch.from_numpy(offsets), new)
    rows.put(offsets, new)
    assert torch.equal(copy, pool.tensor)
    assert torch.equal(copy[:width], new[1])
    assert torch.equal(copy[width : 2 * width], (torch.arange(width, 2 * width) % 251).to(torch.uint8))
