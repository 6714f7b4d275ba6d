"""Gather and scatter on the device: every byte of every pool is what plain torch makes of the same runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swiftkv.kernels import triton_copy
from swiftkv.kernels.host_copies import upload
from tests.support.runs import move_blocks_reference

pytestmark = pytest.mark.gpu

LINKS = (0, 3)


def random_runs(
    generator: np.random.Generator, width: int, num_layers: int, num_runs: int
) -> tuple[triton_copy.Int64Array, int, int]:
    """Disjoint runs, (runs, pool bytes, bytes of each peer's pool)."""
    block = width * num_layers
    counts = generator.integers(1, 9, num_runs)
    staged = generator.integers(0, 2, num_runs)
    gaps = generator.integers(0, 2, (2, num_runs)) * block
    theirs = np.cumsum(gaps[0] + counts * block) - counts * block
    slots = np.cumsum(counts * staged) - counts * staged
    whole = np.cumsum(gaps[1] + counts * block) - counts * block
    ours = np.where(staged, slots * width, int((counts * staged).sum()) * width + whole)
    runs = np.stack((generator.choice(LINKS, num_runs), theirs, ours, counts, staged), axis=1)
    pool_bytes = int((ours + counts * np.where(staged, width, block)).max())
    return generator.permutation(runs), pool_bytes + block, int(theirs[-1] + counts[-1] * block)


@pytest.mark.parametrize("to_peer", [False, True])
@pytest.mark.parametrize("max_programs", [0, 5])
@pytest.mark.parametrize("width", [16, 48, 4096, 20480, 40960, 65536, 98304 + 16])
def test_as_the_reference(width: int, max_programs: int, to_peer: bool) -> None:
    generator, num_layers = np.random.default_rng(width), 3
    runs, pool_bytes, peer_bytes = random_runs(generator, width, num_layers, num_runs=20)
    torch.manual_seed(width)
    pool, *others = (
        torch.randint(256, (size,), dtype=torch.uint8, device="cuda") for size in (pool_bytes, peer_bytes, peer_bytes)
    )
    peers = dict(zip(LINKS, others, strict=True))
    expected_pool, expected_peers = pool.clone(), {link: peer.clone() for link, peer in peers.items()}
    block = width * num_layers
    distances = {link: peer.data_ptr() - pool.data_ptr() for link, peer in peers.items()}
    blocks = triton_copy.flatten_runs(runs, width, block, distances)
    packed = upload(triton_copy.pack_lists([blocks]), pool.device)
    for layer in range(num_layers):
        move_blocks_reference(expected_pool, expected_peers, runs, width, block, layer, to_peer)
        triton_copy.move_blocks(pool, packed, 0, len(blocks), width, layer, to_peer, max_programs)
    assert torch.equal(pool, expected_pool)
    for link, peer in peers.items():
        assert torch.equal(peer, expected_peers[link])


def test_beyond_four_gibibytes() -> None:
    """Offsets that no int32 holds, on both sides."""
    width, count = 64 << 10, 5
    far = 5 << 30
    if torch.cuda.mem_get_info()[0] < 3 * far:
        pytest.skip("a small GPU")
    pool, peer = (torch.empty(far + count * width, dtype=torch.uint8, device="cuda") for _ in range(2))
    peer[far:].copy_(torch.randint(256, (count * width,), dtype=torch.uint8, device="cuda"))
    pool[far:].zero_()
    runs = np.array([[0, far, far, count, 0]], np.int64)
    packed = triton_copy.pack_lists(
        [triton_copy.flatten_runs(runs, width, width, {0: peer.data_ptr() - pool.data_ptr()})]
    )
    triton_copy.move_blocks(pool, upload(packed, pool.device), 0, count, width, layer=0, to_peer=False)
    assert torch.equal(pool[far:], peer[far:])
