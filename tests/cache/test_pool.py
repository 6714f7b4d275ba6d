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

from swiftkv.cache.cuda_pool import allocate_pool
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool, PrivatePool

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


def test_it_is_exactly_its_blocks() -> None:
    pool = Pool([(FULL, 7), (WINDOWED, 3)])
    assert [region.base_offset_bytes for region in pool.regions] == [0, 7 * FULL.block_bytes]
    assert pool.nbytes == pool.tensor.numel() == 7 * FULL.block_bytes + 3 * WINDOWED.block_bytes
    assert os.fstat(pool.fd).st_size == pool.nbytes


@pytest.mark.parametrize("kind", [Pool, PrivatePool])
def test_layer_blocks_lie_block_major(kind: type[Pool | PrivatePool]) -> None:
    pool = kind([(FULL, 7), (WINDOWED, 3)])
    assert not pool.tensor.any()
    pool.region_tensor(1)[2, 1, 5] = 9
    offset = 7 * FULL.block_bytes + 2 * WINDOWED.block_bytes + 1 * WINDOWED.layer_block_bytes + 5
    assert pool.tensor.nonzero().tolist() == [[offset]]


def test_prefaulting_changes_no_byte() -> None:
    pool = Pool([(FULL, 300)])
    pool.tensor[::4096] = 7
    thread = pool.prefault()
    thread.join()
    assert int(pool.tensor.sum()) == 7 * len(range(0, pool.nbytes, 4096))
    blocks_on_file = os.fstat(pool.fd).st_blocks * 512
    assert blocks_on_file >= pool.nbytes


def _areas_of(address: int) -> dict[str, list[str]]:
    """Return what `/proc/self/smaps` says of the mapping at an address, by the name of the line."""
    lines: dict[str, list[str]] = {}
    is_it = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, *values = line.split()
            if "-" in name:
                begin, end = (int(each, 16) for each in name.split("-"))
                is_it = begin <= address < end
            elif is_it:
                lines[name] = values
    return lines


def test_a_private_pool_asks_for_huge_pages_and_is_not_forked() -> None:
    pool = PrivatePool([(FULL, 300)])
    pool.prefault().join()
    area = _areas_of(pool.tensor.data_ptr())
    assert {"hg", "dc"} <= set(area["VmFlags:"])  # huge pages, and "do not copy" on a fork
    assert "sh" not in area["VmFlags:"]
    assert int(area["Rss:"][0]) * 1024 >= pool.nbytes
    assert not pool.identity()


def test_a_pool_is_private_if_nobody_maps_it() -> None:
    cpu = torch.device("cpu")
    assert isinstance(allocate_pool([(FULL, 1)], cpu, is_mapped_by_others=False), PrivatePool)
    assert isinstance(allocate_pool([(FULL, 1)], cpu, is_mapped_by_others=True), Pool)


@pytest.mark.parametrize("kind", [Pool, PrivatePool])
def test_prefaulting_ends_with_the_pool(kind: type[Pool | PrivatePool]) -> None:
    """A thread that outlives it may let go of the tensor while the interpreter ends, which aborts the process."""
    pool = kind([(FULL, (1 << 30) // FULL.block_bytes)])
    thread = pool.prefault()
    del pool
    assert not thread.is_alive()


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
