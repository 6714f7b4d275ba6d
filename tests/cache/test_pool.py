"""The pool is memory that a peer can map and that no process leaves behind."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys

import pytest
import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out
from swiftkv.cache.host_blocks import HostChunks, place_beside
from swiftkv.cache.pool import Pool, SharedHostMemory
from swiftkv.shared_memory import HUGE_PAGE_BYTES, address_of, can_have_huge_pages, fill_ahead, make_memory, map_memory
from swiftkv.transport.base import HostMemory
from swiftkv.transport.shm import map_peer_memory
from tests.support.mappings import mapping_of

FULL = KVGroup((0, 2), 2, 16, "float32", 16)
WINDOWED = KVGroup((1, 3, 4), 1, 32, "bfloat16", 16, kind="window", window=64)

# Owns a pool whose every byte is its block's number, says where it is, and lives until its stdin ends.
OWNER = """
import os, sys
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
pool = Pool([(KVGroup((0, 1), 2, 16, "float32", 16), 5)], name="test")
for block in range(5):
    pool.region_tensor(0)[block] = block + 1
print(os.getpid(), pool.fd, pool.nbytes, flush=True)
sys.stdin.read()
"""


def huge_bytes_of(tensor: torch.Tensor) -> int:
    return int(mapping_of(tensor.data_ptr()).values["ShmemPmdMapped"][0]) << 10


def test_it_is_exactly_its_blocks() -> None:
    pool = Pool([(FULL, 7), (WINDOWED, 3)])
    assert [region.base_offset_bytes for region in pool.regions] == [0, 7 * FULL.block_bytes]
    assert pool.nbytes == pool.tensor.numel() == 7 * FULL.block_bytes + 3 * WINDOWED.block_bytes
    assert os.fstat(pool.fd).st_size == pool.nbytes


def test_layer_blocks_lie_block_major() -> None:
    pool = Pool([(FULL, 7), (WINDOWED, 3)])
    assert not pool.tensor.any()
    pool.region_tensor(1)[2, 1, 5] = 9
    offset = 7 * FULL.block_bytes + 2 * WINDOWED.block_bytes + 1 * WINDOWED.layer_block_bytes + 5
    assert pool.tensor.nonzero().tolist() == [[offset]]


def test_filling_ahead_changes_no_byte() -> None:
    pool = Pool([(FULL, 300)])
    pool.tensor[::4096] = 7
    thread = pool.fill_ahead()
    thread.join()
    assert int(pool.tensor.sum()) == 7 * len(range(0, pool.nbytes, 4096))
    blocks_on_file = os.fstat(pool.fd).st_blocks * 512
    assert blocks_on_file >= pool.nbytes


@pytest.mark.skipif(not can_have_huge_pages(), reason="the kernel has no huge pages for shared memory")
def test_it_has_huge_pages_here_and_where_a_peer_maps_it() -> None:
    pool = Pool([(FULL, 8 * HUGE_PAGE_BYTES // FULL.block_bytes)])
    pool.tensor[::4096] = 7  # small pages
    pool.fill_ahead().join()
    assert pool.tensor[::4096].eq(7).all()
    assert huge_bytes_of(pool.tensor) >= pool.nbytes // 2  # the kernel may pass over a page that is in use
    theirs = map_peer_memory(HostMemory(os.getpid(), *pool.identity()), pool.nbytes)
    assert int(theirs[::HUGE_PAGE_BYTES].sum()) == 7 * 8
    assert huge_bytes_of(theirs) == huge_bytes_of(pool.tensor)


def test_filling_ahead_ends_with_the_pool() -> None:
    """A thread that outlives it may let go of the tensor while the interpreter ends, which aborts the process."""
    pool = Pool([(FULL, (1 << 30) // FULL.block_bytes)])
    fd, nbytes = os.dup(pool.fd), pool.nbytes
    thread = pool.fill_ahead()
    del pool
    assert not thread.is_alive()
    assert 512 * os.fstat(fd).st_blocks < nbytes  # it did not fill all of it first
    os.close(fd)


def test_the_memory_goes_with_the_last_user() -> None:
    pool = Pool([(FULL, 1)])
    fd = pool.fd
    tensor = pool.tensor
    del pool
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    tensor.fill_(1)  # the mapping lives as long as a view of it
    assert int(tensor.sum()) == tensor.numel()


def test_a_second_process_maps_it_and_kill_leaves_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert owner.stdout is not None
        pid, fd, nbytes = map(int, owner.stdout.readline().split())
        peer_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        peer = torch.frombuffer(mmap.mmap(peer_fd, nbytes), dtype=torch.uint8)
        assert peer.view(5, -1).float().mean(dim=1).tolist() == [1, 2, 3, 4, 5]
        gone = os.pidfd_open(pid)
        owner.send_signal(signal.SIGKILL)
        assert select.select([gone], [], [], 30)[0]
        os.close(gone)
    finally:
        owner.kill()
        owner.wait()
    assert peer.view(5, -1)[4].eq(5).all()  # a peer's mapping outlives the owner
    assert os.fstat(peer_fd).st_nlink == 0  # and has no name anywhere
    os.close(peer_fd)


def test_host_memory_lies_behind_the_pool_in_its_own_blocks() -> None:
    host_bytes = 3 * HUGE_PAGE_BYTES
    fd = make_memory("test", host_bytes)
    chunks = HostChunks(HUGE_PAGE_BYTES, FULL.block_bytes, 5)
    pool = Pool([(WINDOWED, 4), (FULL, 7)], host=SharedHostMemory(fd, host_bytes, chunks))
    blocks, host = pool.host_blocks, pool.host_memory
    assert blocks is not None
    assert host is not None
    assert (blocks.group, blocks.stride, blocks.count, host.nbytes) == (1, FULL.num_layers, 5, host_bytes)
    elsewhere = map_memory(fd, host_bytes)
    last = HUGE_PAGE_BYTES + 4 * FULL.block_bytes
    elsewhere[last] = 7
    assert host[last] == 7
    attended = pool.attended_tensor(1)
    assert attended.numel() == blocks.end * FULL.layer_block_bytes
    assert attended[(blocks.first + 4 * blocks.stride) * FULL.layer_block_bytes] == 7
    assert attended.data_ptr() == pool.region_tensor(1).data_ptr()
    assert torch.equal(pool.attended_tensor(0), pool.region_tensor(0).view(-1))
    assert pool.tensor.numel() == pool.nbytes
    assert address_of(host) % HUGE_PAGE_BYTES == 0
    os.close(fd)


def test_host_memory_stays_mapped_as_long_as_a_view_of_it() -> None:
    fd = make_memory("test", HUGE_PAGE_BYTES)
    pool = Pool([(FULL, 7)], host=SharedHostMemory(fd, HUGE_PAGE_BYTES, HostChunks(0, FULL.block_bytes, 5)))
    os.close(fd)
    host = pool.host_memory
    assert host is not None
    del pool
    host[-1] = 1
    assert host[-1] == 1


def places(regions: tuple[GroupRegion, ...], chunks: HostChunks, page_bytes: int, max_pages: int) -> list[int]:
    """Return all offsets that serve, up to a number of pages, by trying each."""
    (region,) = (region for region in regions if region.group.kind != "window")
    pool_bytes = max(region.base_offset_bytes + region.nbytes for region in regions)
    return [
        offset
        for offset in range(0, max_pages * page_bytes, page_bytes)
        if offset >= pool_bytes
        and (offset + chunks.offset_bytes - region.base_offset_bytes) % region.group.layer_block_bytes == 0
    ]


@pytest.mark.parametrize("heads", [1, 3, 7, 12])
@pytest.mark.parametrize("offset_bytes", [0, 64, 4096, 3 * 4096])
def test_the_place_of_host_memory_is_the_first_that_serves(heads: int, offset_bytes: int) -> None:
    full = KVGroup((0, 1, 2), heads, 24, "bfloat16", 16)
    windowed = KVGroup((3,), 1, 32, "float32", 16, kind="window", window=64)
    for num_windowed in range(1, 5):
        for order in ([(full, 5), (windowed, num_windowed)], [(windowed, num_windowed), (full, 5)]):
            regions = lay_out(order)
            chunks = HostChunks(offset_bytes, full.block_bytes, 9)
            place = place_beside(regions, chunks, 4096)
            tried = places(regions, chunks, 4096, 1000)
            assert (None if place is None else place.offset_bytes) == (tried[0] if tried else None)


def test_host_memory_has_no_place_if_its_chunks_are_no_blocks() -> None:
    def place(*groups: KVGroup, chunk_bytes: int = FULL.block_bytes, num_chunks: int = 5) -> object:
        return place_beside(lay_out([(group, 2) for group in groups]), HostChunks(0, chunk_bytes, num_chunks), 4096)

    assert place(FULL)
    assert place(WINDOWED, FULL)
    assert not place(FULL, FULL)
    assert not place(WINDOWED)
    assert not place(FULL, chunk_bytes=FULL.block_bytes + 64)
    assert not place(FULL, num_chunks=0)
    assert not place(FULL, num_chunks=2**31 // FULL.num_layers)  # an entry would not be an int32
    assert not place(KVGroup((0,), 4099, 16, "float32", 16), chunk_bytes=16 * 4099 * 32 * 4)  # it would be far away


@pytest.mark.skipif(not can_have_huge_pages(), reason="the kernel has no huge pages for shared memory")
def test_host_memory_beside_a_pool_has_huge_pages() -> None:
    fd = make_memory("test", 4 * HUGE_PAGE_BYTES)
    chunks = HostChunks(0, FULL.block_bytes, 4)
    pool = Pool([(FULL, 3)], host=SharedHostMemory(fd, 4 * HUGE_PAGE_BYTES, chunks))
    assert pool.host_memory is not None
    fill_ahead(pool, pool.host_memory).join()
    assert huge_bytes_of(torch.frombuffer(pool.host_memory, dtype=torch.uint8)) >= 2 * HUGE_PAGE_BYTES
    os.close(fd)
