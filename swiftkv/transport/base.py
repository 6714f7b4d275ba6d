"""The interface of transports, which copy layer blocks between an engine's pool and those of its lenders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

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
class PoolMemory:
    """A pool in host memory, as a descriptor of the process `pid`."""

    pid: int
    fd: int
    device: int  # `st_dev` and `st_ino` of the memory, which another process that gets the same pid does not have
    inode: int


@dataclass(frozen=True, slots=True)
class PeerHandle:
    """The handle of a lender's pool. Valid for one attachment of two engine processes."""

    pid: int
    fd: int  # the pool's memory, as a descriptor of that process
    device: int  # `st_dev` and `st_ino` of the memory, as in `PoolMemory`
    inode: int
    nbytes: int
    store_path: str  # the rendezvous file that this handle came through
    secret: str = field(repr=False)  # hexadecimal: a two-sided transport's ends prove to each other that they know it
    ipc_handle: str = ""  # hexadecimal, of a pool on a CUDA device; fd, device and inode are then meaningless
    other_ranks: tuple[PoolMemory, ...] = ()  # the pools of the lender's other ranks, each of `nbytes`, in host memory
    offset_bytes: int = 0  # where our rank's part of each extent begins; offsets in the pool count from here

    def of_rank(self, rank: int, num_ranks: int, part_bytes: int) -> PeerHandle:
        """Return the handle of the part of the borrowed blocks that belongs to rank `rank` of the borrower.

        An extent consists of `num_ranks` parts of `part_bytes`, one after the other: part i holds what rank i has of
        all blocks of the extent. If the lender has several ranks, too, the pool of each holds equally many parts.
        """
        pools = (PoolMemory(self.pid, self.fd, self.device, self.inode), *self.other_ranks)
        assert num_ranks % len(pools) == 0, f"{num_ranks} ranks cannot borrow from {len(pools)}"
        parts_per_pool = num_ranks // len(pools)
        pool = pools[rank // parts_per_pool]
        return replace(
            self,
            pid=pool.pid,
            fd=pool.fd,
            device=pool.device,
            inode=pool.inode,
            other_ranks=(),
            offset_bytes=rank % parts_per_pool * part_bytes,
        )


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

    def attach(self, link: int, peer: PeerHandle) -> None:
        """Make a lender's pool reachable as `link`; between steps only. Raises `TransferError` if that fails."""

    def detach(self, link: int) -> None:
        """Detach a link, if it is attached, after waiting for submitted jobs; between steps only."""

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

    def close(self) -> None:
        """End threads and mappings, without waiting for a peer. Only `close` itself may be called again."""


@runtime_checkable
class TwoSidedTransport(Transport, Protocol):
    """A transport whose `attach` needs the peer's help."""

    def meet(self, peer: PeerHandle) -> PeerHandle:
        """Do the part of `attach` that waits for the peer, from any thread, while steps run.

        Attach the returned handle once; that does not wait. Dropping it instead lets the peer go.

        Raises `TransferError` if the peer does not come in time, or cannot prove that it read the rendezvous file.
        """


@runtime_checkable
class DeviceTransport(Transport, Protocol):
    """A transport whose `wait` makes a compute stream wait, so the host does not see for how long."""

    def take_exposures(self) -> Exposures:
        """Return the waits that the stream has passed since the last call, in order; at most a few thousand."""
