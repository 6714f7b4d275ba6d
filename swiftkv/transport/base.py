"""The interface of transports, which copy layer blocks between an engine's pool and its lenders' or host memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
Ticket = int
"""The name of a job of one transport; later tickets are larger."""

COPY_TIMING = np.dtype(
    [
        ("ticket", np.int64),
        ("begin_s", np.float64),  # time.monotonic(); 0 if there was nothing to copy
        ("to_peer_s", np.float64),
        ("from_peer_s", np.float64),
        ("to_peer_bytes", np.int64),
        ("from_peer_bytes", np.int64),
    ]
)
"""The times and bytes of one job. One that failed counts no bytes."""

CopyTimings = npt.NDArray[np.void]  # [J], of COPY_TIMING


EXPOSURE = np.dtype([("ticket", np.int64), ("exposed_s", np.float64)])
"""The time for which a device's compute stream waited for a job."""

Exposures = npt.NDArray[np.void]  # [W], of EXPOSURE


class SharedPool(Protocol):
    """The part of `cache.pool.Pool` that a transport needs."""

    fd: int
    nbytes: int
    tensor: torch.Tensor  # uint8 [nbytes]


@runtime_checkable
class DevicePool(Protocol):
    """The part of `cache.cuda_pool.CudaPool` that a transport needs."""

    nbytes: int
    tensor: torch.Tensor  # uint8 [nbytes], on a CUDA device

    def ipc_handle(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of a pool on the host, as a descriptor of the process `pid`."""

    pid: int
    fd: int
    device: int  # `st_dev` and `st_ino` of the memory, which another process that gets the same pid does not have
    inode: int


@dataclass(frozen=True, slots=True)
class HostPools:
    """The pools of all ranks of a lender, laid out alike, or the part of one of them that a rank borrows."""

    ranks: tuple[HostMemory, ...]
    offset_bytes: int = 0  # where the part of each extent begins; offsets in the pool count from here

    def part(self, rank: int, num_ranks: int, part_bytes: int) -> HostPools:
        """Return the pool and the offset for rank `rank` of the borrower; see `PeerHandle.of_rank`."""
        assert num_ranks % len(self.ranks) == 0, f"{num_ranks} ranks cannot borrow from {len(self.ranks)}"
        parts_per_pool = num_ranks // len(self.ranks)
        return HostPools((self.ranks[rank // parts_per_pool],), rank % parts_per_pool * part_bytes)


IpcHandle = NewType("IpcHandle", str)
"""The CUDA IPC handle of a pool on a device, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class PeerHandle:
    """The handle of a lender's pool. Valid for one attachment of two engine processes."""

    pid: int  # of the lender's process that serves the attachment
    nbytes: int  # of the pool, or of that of each rank
    store_path: str  # the rendezvous file that this handle came through
    secret: str = field(repr=False)  # hexadecimal: a two-sided transport's ends prove to each other that they know it
    memory: HostPools | IpcHandle | None  # `None`: no other process can map the pool

    def of_rank(self, rank: int, num_ranks: int, part_bytes: int) -> PeerHandle:
        """Return the handle of the part of the borrowed blocks that belongs to rank `rank` of the borrower.

        An extent consists of `num_ranks` parts of `part_bytes`, one after the other: part i holds what rank i has of
        all blocks of the extent. If the lender has several ranks, too, the pool of each holds equally many parts.
        """
        if isinstance(self.memory, HostPools):
            return replace(self, memory=self.memory.part(rank, num_ranks, part_bytes))
        assert num_ranks == 1, f"{num_ranks} ranks cannot borrow memory that is not on the host"
        return self


@dataclass(frozen=True, slots=True)
class Runs:
    """2-D copies of one KV group, at layer 0: the scheduler plans them alike for every layer of the group.

    `runs` is int64 [R, 5], C-contiguous: link, peer_offset_bytes, local_offset_bytes, count, staged. A run is `count`
    layer blocks of `width_bytes`. On the peer's side, and on ours unless staged, they lie `block_bytes` apart, and
    layer `l` is `l * width_bytes` further on. If staged, ours lie side by side and serve every layer. Offsets count
    from the first byte of a pool. The targets of one job and direction do not overlap.
    """

    runs: Int64Array
    width_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        assert self.runs.dtype == np.int64
        assert self.runs.ndim == 2
        assert self.runs.shape[1] == 5
        assert 0 < self.width_bytes <= self.block_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of one layer."""
        return int(self.runs[:, 3].sum()) * self.width_bytes


class Transport(Protocol):
    """The copies of one borrowing engine, bound to its pool. Jobs form one FIFO lane: each begins after the one before.

    On a device, a submitted job follows everything launched on the compute stream so far, and `wait` makes that stream
    wait, not the host.
    """

    def meet(self, peer: PeerHandle) -> PeerHandle:
        """Do the part of `attach` that waits for the peer, if there is any: from any thread, while steps run.

        Attach the returned handle once; that does not wait. Dropping it instead lets the peer go.

        Raises `TransferError` if the peer does not come in time, or cannot prove that it read the rendezvous file.
        """

    def attach(self, link: int, peer: PeerHandle) -> None:
        """Make a lender's pool reachable as `link`; between steps only. Raises `TransferError` if that fails."""

    def attach_host(self, link: int, memory: memoryview) -> None:
        """Make memory that is mapped in this process reachable as `link`, for as long as the transport lives.

        Raises `TransferError` if the transport, or its device, cannot read the memory.
        """

    def detach(self, link: int) -> None:
        """Detach a lender's link, if it is attached, after waiting for submitted jobs; between steps only."""

    def lender_pool(self, link: int) -> npt.NDArray[np.uint8] | None:
        """Return the pool attached as `link`, uint8, from `offset_bytes` on; `None` if we cannot read it in place."""

    def submit(self, to_peer: Runs | None, from_peer: Runs | None, layer: int) -> Ticket:
        """Copy first all of `to_peer`, then all of `from_peer`, at one layer. Invalid runs make `wait` raise."""

    def wait(self, ticket: Ticket) -> None:
        """Wait until the job has ended.

        Raises `TransferError`, once, if the job did not copy everything. If only some links have failed, the error
        names them, and copies over other links go on.
        """

    def settle(self) -> None:
        """Block the host until every job has ended, and forget which failed."""

    def take_timings(self) -> CopyTimings:
        """Return the timings of jobs that ended since the last call, in order; the latest few thousand at most."""

    def take_exposures(self) -> Exposures | None:
        """Return the waits that a device's compute stream has passed since the last call; `None` if the host waits.

        They are in order, and at most a few thousand.
        """

    def close(self) -> None:
        """End threads and mappings, without waiting for a peer. Only `close` itself may be called again."""
