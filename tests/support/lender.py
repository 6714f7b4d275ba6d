"""A process that owns pools and lends all of them: `Lender` starts it and can read its memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.transport.base import HostMemory, HostPools, PeerHandle
from swiftkv.transport.p2p import serve_p2p
from swiftkv.transport.rendezvous import find_pool, publish_pool


def pool_of(num_bytes: int) -> Pool:
    """Return a pool of `num_bytes`, a multiple of 4096, with undefined contents."""
    group = KVGroup((0,), 1, 32, "float32", 16)
    assert num_bytes % group.block_bytes == 0
    return Pool([(group, num_bytes // group.block_bytes)], "test")


def mapped_inodes(pid: int) -> set[int]:
    """Return the inodes of the nameless memory that a process maps, without files, whose numbers could be equal."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/memfd:" in line}


class Lender:
    """One process with a pool of `num_bytes` for each path; with `serve` it answers two-sided borrowers, too."""

    def __init__(self, store_paths: Sequence[Path], num_bytes: int, serve: bool) -> None:
        arguments = [str(num_bytes), "serve" if serve else "", *map(str, store_paths)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lender", *arguments], stdin=subprocess.PIPE
        )
        self.handles: list[PeerHandle] = [find_pool(path, timeout_s=60) for path in store_paths]
        self.pools: list[torch.Tensor] = [_map(handle) for handle in self.handles]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Lender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


def host_memory(handle: PeerHandle) -> HostMemory:
    """Return the memory of a lender that has one rank."""
    assert isinstance(handle.memory, HostPools)
    (memory,) = handle.memory.ranks
    return memory


def _map(handle: PeerHandle) -> torch.Tensor:
    memory = host_memory(handle)
    fd = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, handle.nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def main() -> None:
    """Lend pools until standard input ends. Arguments: NUM_BYTES "serve"|"" STORE_PATH..."""
    pools = []
    for path in map(Path, sys.argv[3:]):
        pools.append(pool_of(int(sys.argv[1])))
        published = publish_pool(path, pools[-1])
        if sys.argv[2]:
            serve_p2p(pools[-1], published, connect_timeout_s=600)
    sys.stdin.read()


if __name__ == "__main__":
    main()
