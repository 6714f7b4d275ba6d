"""Only published memory is mapped, and it stays as it was found."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftkv.errors import TransferError
from swiftkv.shared_memory import make_memory, map_memory
from swiftkv.transport.base import HostMemory, HostPools, PeerHandle, Runs
from swiftkv.transport.rendezvous import find_pool, publish_pool
from swiftkv.transport.shm import ShmTransport
from tests.support.lender import Lender, host_memory, mapped_inodes, pool_of
from tests.support.runs import move_blocks_reference
from tests.transport.test_transport import NUM_BYTES, round_trip


def with_memory(handle: PeerHandle, nbytes: int | None = None, **changes: int) -> PeerHandle:
    """Return a handle whose pool has another size, or whose memory is described otherwise."""
    memory = dataclasses.replace(host_memory(handle), **changes)
    return dataclasses.replace(handle, nbytes=nbytes or handle.nbytes, memory=HostPools((memory,)))


@pytest.mark.parametrize("wrong", [{"nbytes": NUM_BYTES + 4096}, {"inode": 1}, {"device": 0}, {"fd": 1000}])
def test_shm_maps_only_the_pool_that_was_published(wrong: dict[str, int], tmp_path: Path) -> None:
    pool = pool_of(NUM_BYTES)
    transport = ShmTransport(pool)
    lent = pool_of(NUM_BYTES)
    handle = publish_pool(tmp_path / "store", lent)
    with pytest.raises(TransferError):
        transport.attach(0, with_memory(handle, **wrong))
    transport.attach(0, handle)
    assert round_trip(pool.tensor, transport, 1)
    transport.close()


def test_a_pool_cannot_be_cut_short_under_those_who_map_it() -> None:
    pool = pool_of(NUM_BYTES)
    for num_bytes in (0, NUM_BYTES - 4096, NUM_BYTES + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_shm_maps_no_pool_that_could_be_cut_short(tmp_path: Path) -> None:
    lent = pool_of(NUM_BYTES)
    handle = publish_pool(tmp_path / "store", lent)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    memory = os.fstat(fd)
    transport = ShmTransport(pool_of(NUM_BYTES))
    with pytest.raises(TransferError, match="may shrink"):
        transport.attach(0, with_memory(handle, fd=fd, device=memory.st_dev, inode=memory.st_ino))
    transport.close()
    os.close(fd)


def test_shm_keeps_nothing_mapped_of_a_lender_that_was_detached(tmp_path: Path) -> None:
    """Otherwise the memory of a dead lender would stay taken beside that of its successor."""
    transport = ShmTransport(pool_of(NUM_BYTES))
    with Lender([tmp_path / "store"], NUM_BYTES, serve=False) as lender:
        inode = host_memory(lender.handles[0]).inode
        lender.pools.clear()
        transport.attach(0, lender.handles[0])
        assert inode in mapped_inodes(os.getpid())
        lender.kill()
        assert inode in mapped_inodes(os.getpid())
        transport.detach(0)
        assert inode not in mapped_inodes(os.getpid())
    transport.close()


def test_shm_shows_the_pool_of_a_lender_as_long_as_it_is_attached(tmp_path: Path) -> None:
    lent = pool_of(NUM_BYTES)
    lent.tensor.fill_(7)
    transport = ShmTransport(pool_of(NUM_BYTES))
    transport.attach(0, publish_pool(tmp_path / "store", lent))
    shown = transport.lender_pool(0)
    assert shown is not None
    assert len(shown) == NUM_BYTES
    assert (shown == 7).all()
    transport.detach(0)
    assert transport.lender_pool(0) is None
    transport.close()


@pytest.mark.parametrize(
    ("num_pools", "places"),
    [(1, [(0, 0), (0, 4096), (0, 8192), (0, 12288)]), (2, [(0, 0), (0, 4096), (1, 0), (1, 4096)])],
)
def test_each_rank_of_a_borrower_has_its_part_of_an_extent_after_that_of_the_rank_before(
    num_pools: int, places: list[tuple[int, int]], tmp_path: Path
) -> None:
    """In the one pool of a lender, or in those of its ranks, each of which has the parts of equally many."""
    lent = [pool_of(NUM_BYTES) for _ in range(num_pools)]
    for pool in lent:
        pool.tensor.random_(generator=torch.Generator().manual_seed(pool.fd))
    others = [HostMemory(os.getpid(), *pool.identity()) for pool in lent[1:]]
    publish_pool(tmp_path / "store", lent[0], others)
    handle = find_pool(tmp_path / "store", 10)
    for rank, (number, offset_bytes) in enumerate(places):
        own = pool_of(NUM_BYTES)
        transport = ShmTransport(own)
        transport.attach(0, handle.of_rank(rank, len(places), 4096))
        runs = Runs(np.array([[0, 512, 0, 1, 0]]), 1024, 1024)
        transport.wait(transport.submit(None, runs, 0))
        there = lent[number].tensor[offset_bytes:]
        assert torch.equal(own.tensor[:1024], there[512:][:1024])
        shown = transport.lender_pool(0)
        assert shown is not None
        assert torch.equal(torch.from_numpy(shown), there)
        beyond = Runs(np.array([[0, NUM_BYTES - offset_bytes, 0, 1, 0]]), 1024, 1024)
        ticket = transport.submit(None, beyond, 0)
        with pytest.raises(TransferError):
            transport.wait(ticket)
        transport.close()


def test_shm_reads_host_memory_as_long_as_it_is_open() -> None:
    """Whole blocks and single layer blocks, from chunks side by side, and none beyond the last."""
    width, num_layers = 1024, 4
    block, nbytes = width * num_layers, 1 << 20
    pool = pool_of(NUM_BYTES)
    pool.tensor.fill_(9)
    transport = ShmTransport(pool)
    fd = make_memory("host", nbytes)
    transport.attach_host(3, map_memory(fd, nbytes))  # the transport alone keeps it mapped
    memory = map_memory(fd, nbytes)
    os.close(fd)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    host.random_(generator=torch.Generator().manual_seed(0))
    expected_pool, expected_host = pool.tensor.clone(), host.clone()
    first = nbytes - 5 * block
    runs = Runs(np.array([[3, first, 7 * block, 5, 0], [3, 512, 0, 2, 1]]), width, block)
    for layer in range(num_layers):
        transport.wait(transport.submit(None, runs, layer))
        move_blocks_reference(expected_pool, {3: expected_host}, runs.runs, width, block, layer, to_peer=False)
    assert torch.equal(pool.tensor, expected_pool)
    assert torch.equal(host, expected_host)
    for row in ([3, first + 1, 0, 5, 0], [3, first, 0, 6, 0], [3, nbytes, 0, 1, 0], [2, 0, 0, 1, 0]):
        ticket = transport.submit(None, Runs(np.array([row]), width, block), num_layers - 1)
        with pytest.raises(TransferError):
            transport.wait(ticket)
    assert torch.equal(pool.tensor, expected_pool)
    transport.close()
