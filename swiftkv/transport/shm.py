"""One-sided copies in host memory: the lender's pool is mapped here, and C++ threads copy without the GIL."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from swiftkv._transport import CopyEngine, CopyError
from swiftkv.errors import TransferError
from swiftkv.shared_memory import address_of, map_memory
from swiftkv.transport.base import (
    COPY_TIMING,
    CopyTimings,
    HostMemory,
    HostPools,
    PeerHandle,
    Runs,
    SharedPool,
    Ticket,
)
from swiftkv.transport.rendezvous import withdraw_pool

_SYS_PIDFD_GETFD = 438  # Linux 5.6, the same number on every architecture; glibc and Python have no name for it
_NO_RUNS = Runs(np.empty((0, 5), np.int64), 1, 1)


class ShmTransport:
    """A `Transport` in which the lender takes no part: its memory stays mapped until `detach`, even if it dies."""

    def __init__(self, pool: SharedPool, num_threads: int = 1) -> None:
        self._pool_tensor = pool.tensor  # keeps the memory mapped while the engine copies
        self._engine = CopyEngine(pool.tensor.data_ptr(), pool.nbytes, num_threads)
        self._mappings: dict[int, torch.Tensor] = {}
        self._hosts: dict[int, memoryview] = {}  # keeps the memory mapped

    def meet(self, peer: PeerHandle) -> PeerHandle:
        """Return the handle: mapping memory waits for nobody."""
        return peer

    def attach(self, link: int, peer: PeerHandle) -> None:
        assert link not in self._mappings, f"link {link} is attached"
        mapping = map_pool(peer)
        self._engine.set_space(link, mapping.data_ptr(), mapping.nbytes)
        self._mappings[link] = mapping
        withdraw_pool(Path(peer.store_path))

    def attach_host(self, link: int, memory: memoryview) -> None:
        self._engine.set_space(link, address_of(memory), memory.nbytes)
        self._hosts[link] = memory

    def detach(self, link: int) -> None:
        self._engine.clear_space(link)
        self._mappings.pop(link, None)

    def lender_pool(self, link: int) -> npt.NDArray[np.uint8] | None:
        mapping = self._mappings.get(link)
        return None if mapping is None else mapping.numpy()

    def submit(self, to_peer: Runs | None, from_peer: Runs | None, layer: int) -> Ticket:
        to, from_ = to_peer or _NO_RUNS, from_peer or _NO_RUNS
        return self._engine.submit(
            to.runs, to.width_bytes, to.block_bytes, from_.runs, from_.width_bytes, from_.block_bytes, layer
        )

    def wait(self, ticket: Ticket) -> None:
        try:
            self._engine.wait(ticket)
        except CopyError as error:
            message, link = error.args
            raise TransferError(message, () if link is None else (link,)) from error

    def settle(self) -> None:
        self._engine.settle()

    def take_timings(self) -> CopyTimings:
        return np.frombuffer(self._engine.take_timings(), COPY_TIMING)

    def take_exposures(self) -> None:
        """Return `None`: the host waits for copies."""

    def close(self) -> None:
        self.settle()
        for link in list(self._mappings):
            self.detach(link)


def map_pool(peer: PeerHandle) -> torch.Tensor:
    """Return a lender's pool, of one rank, as uint8, from `offset_bytes` on.

    Raises `TransferError` as `map_peer_memory` does, or if the pool is not on the host.
    """
    if not isinstance(peer.memory, HostPools):
        raise TransferError(f"the pool of process {peer.pid} is not in host memory")
    (memory,) = peer.memory.ranks
    return map_peer_memory(memory, peer.nbytes)[peer.memory.offset_bytes :]


def map_peer_memory(memory: HostMemory, nbytes: int) -> torch.Tensor:
    """Return a pool of another process as uint8 [nbytes], shared with it; the mapping ends with the tensor.

    The whole pool is mapped, readable and writable. Mapping the lent extents alone would protect little: they change
    from step to step, and are no multiples of a page, so other bytes would be mapped with them.

    Raises `TransferError` if it cannot be mapped.
    """
    pid = memory.pid
    try:
        own_fd = _open(pid, memory.fd)
    except OSError as error:
        raise TransferError(f"the pool of process {pid} cannot be opened: {error}") from error
    try:
        status = os.fstat(own_fd)
        if (status.st_dev, status.st_ino) != (memory.device, memory.inode) or status.st_size < nbytes:
            raise TransferError(f"process {pid} is not the one that published its pool")
        if not fcntl.fcntl(own_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferError(f"the pool of process {pid} may shrink while it is used")
        mapping = map_memory(own_fd, nbytes)
    except OSError as error:
        raise TransferError(f"the pool of process {pid} cannot be mapped: {error}") from error
    finally:
        os.close(own_fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _open(pid: int, fd: int) -> int:
    """Return a file descriptor of ours for the one of another process.

    It is copied through a pidfd, which names one process for good. That needs the right to trace the process, which
    some systems give only to its ancestors. Without that right, the file is opened by the pid, which another process
    may have taken meanwhile. In either case the caller checks which memory it is.
    """
    process = os.pidfd_open(pid)
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        own_fd = int(syscall(*(ctypes.c_long(number) for number in (_SYS_PIDFD_GETFD, process, fd, 0))))
        code = ctypes.get_errno()
    finally:
        os.close(process)
    if own_fd >= 0:
        return own_fd  # closed on exec
    if code not in (errno.EPERM, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
