"""Only published memory is mapped, and it stays as it was found."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import pytest

from swiftkv.errors import TransferError
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.transport.shm import ShmTransport
from tests.support.lender import Lender, mapped_inodes, pool_of
from tests.transport.test_transport import NUM_BYTES, round_trip


@pytest.mark.parametrize("wrong", [{"nbytes": NUM_BYTES + 4096}, {"inode": 1}, {"device": 0}, {"fd": 1000}])
def test_shm_maps_only_the_pool_that_was_published(wrong: dict[str, int], tmp_path: Path) -> None:
    pool = pool_of(NUM_BYTES)
    transport = ShmTransport(pool)
    lent = pool_of(NUM_BYTES)
    handle = publish_pool(tmp_path / "store", lent)
    with pytest.raises(TransferError):
        transport.attach(0, dataclasses.replace(handle, **wrong))
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
        transport.attach(0, dataclasses.replace(handle, fd=fd, device=memory.st_dev, inode=memory.st_ino))
    transport.close()
    os.close(fd)


def test_shm_keeps_nothing_mapped_of_a_lender_that_was_detached(tmp_path: Path) -> None:
    """Otherwise the memory of a dead lender would stay taken beside that of its successor."""
    transport = ShmTransport(pool_of(NUM_BYTES))
    with Lender([tmp_path / "store"], NUM_BYTES, serve=False) as lender:
        inode = lender.handles[0].inode
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
