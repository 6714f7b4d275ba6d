"""One-sided copies between CUDA devices, through pools that are mapped with IPC handles.

Copies run on a CUDA stream of their own, which events order with the compute stream. Within a step the host waits for
nothing.

CUDA IPC also serves engines that share a GPU, and maps pools on another GPU if peer access is possible (NVLink, or
PCIe). With symmetric memory, all engines would have to meet whenever one of them restarts; a handle concerns only two.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftkv.errors import TransferError
from swiftkv.kernels.cuda_runtime import CudaRuntimeError, HostRegistration, close_ipc_handle, copy_2d, open_ipc_handle
from swiftkv.kernels.host_copies import upload
from swiftkv.kernels.triton_copy import BLOCK_FIELDS, move_blocks, pack_lists
from swiftkv.policies import IoBackend
from swiftkv.transport.base import (
    COPY_TIMING,
    EXPOSURE,
    CopyTimings,
    DevicePool,
    Exposures,
    PeerHandle,
    Runs,
    Ticket,
)
from swiftkv.transport.mappings import Mappings
from swiftkv.transport.rendezvous import withdraw_pool
from swiftkv.transport.topology import LINK_PROGRAMS

_MAX_JOBS = 4096
_MAX_LISTS = 64
_ANCHOR_INTERVAL_S = 10.0  # event times are float32 milliseconds since the anchor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    begin: torch.cuda.Event
    turn: torch.cuda.Event  # all of to_peer is done, and from_peer begins
    end: torch.cuda.Event
    to_peer_bytes: int
    from_peer_bytes: int


class PeerTransport:
    """`Transport` for pools on CUDA devices. Submits and waits refer to the current stream of the pool's device.

    Copies have ended once the compute stream has passed the waits for them, or after `settle`. Extents may be given
    back only when the host knows that, even after a step without tokens.

    If a lender dies while its pool is mapped here, a step that reads it goes on with undefined bytes. The coordinator
    sees the process end, and has the scheduler discard what was computed from them.
    """

    def __init__(
        self,
        pool: DevicePool,
        io_backend: IoBackend = "kernel",
        *,
        max_programs: int = LINK_PROGRAMS,
        widths_bytes: Sequence[int] = (),
    ) -> None:
        """Copies use `max_programs` programs at once. Kernels for layer blocks of `widths_bytes` are compiled here."""
        self.mappings = Mappings(pool.tensor)
        self.io_backend = io_backend
        self.max_programs = max_programs
        self._pool = pool
        self._device = pool.tensor.device
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._lists: OrderedDict[int, tuple[Runs, torch.Tensor]] = OrderedDict()  # by id of the runs, kept alive here
        self._jobs: OrderedDict[Ticket, _Job] = OrderedDict()
        self._waits: deque[tuple[Ticket, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MAX_JOBS)
        self._failures: dict[Ticket, TransferError] = {}
        self._last_ticket: Ticket = 0
        self._hosts: dict[int, HostRegistration] = {}  # by link
        self._compile(widths_bytes)
        self._set_anchor()

    def meet(self, peer: PeerHandle) -> PeerHandle:
        """Return the handle: mapping memory waits for nobody."""
        return peer

    def attach(self, link: int, peer: PeerHandle) -> None:
        assert link not in self.mappings.links(), f"link {link} is attached"
        if not isinstance(peer.memory, str):
            raise TransferError(f"the pool of process {peer.pid} is not on a CUDA device")
        try:
            address = open_ipc_handle(bytes.fromhex(peer.memory), self._device)
        except CudaRuntimeError as error:
            raise TransferError(f"the pool of process {peer.pid} cannot be mapped: {error}") from error
        self.mappings.add(link, address, peer.nbytes)
        withdraw_pool(Path(peer.store_path))

    def attach_host(self, link: int, memory: memoryview) -> None:
        log.info("having CUDA lock %.2f GiB of host memory", memory.nbytes / 2**30)
        try:
            self._hosts[link] = HostRegistration(memory, self._device)
        except CudaRuntimeError as error:
            raise TransferError(f"the GPU cannot read host memory: {error}") from error
        self.mappings.add(link, self._hosts[link].address, memory.nbytes)

    def detach(self, link: int) -> None:
        mapping = self.mappings.remove(link)
        if mapping is None:
            return
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()  # copies of a CUDA graph run there
        self._lists.clear()  # the link may be attached to another pool
        try:
            close_ipc_handle(mapping.address, self._device)
        except CudaRuntimeError as error:  # the lender died: its mapping is gone either way
            log.warning("link %d: %s", link, error)

    def lender_pool(self, link: int) -> None:
        """Return `None`: the host cannot read memory of a device."""

    def submit(self, to_peer: Runs | None, from_peer: Runs | None, layer: int) -> Ticket:
        self._last_ticket += 1
        ticket = self._last_ticket
        begin, turn, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin.record()
            try:
                self._copy(to_peer, layer, is_to_peer=True)
                turn.record()
                self._copy(from_peer, layer, is_to_peer=False)
            except (TransferError, CudaRuntimeError) as error:
                self._failures[ticket] = error if isinstance(error, TransferError) else TransferError(str(error))
                turn.record()
            end.record()
        sizes = [0 if runs is None or ticket in self._failures else runs.num_bytes for runs in (to_peer, from_peer)]
        self._jobs[ticket] = _Job(begin, turn, end, *sizes)
        if len(self._jobs) > _MAX_JOBS:
            self._jobs.popitem(last=False)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the current CUDA stream wait, but not the host. A job whose timings were taken has ended already."""
        job = self._jobs.get(ticket)
        if job is not None:
            stream = torch.cuda.current_stream(self._device)
            arrived, left = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            arrived.record(stream)
            stream.wait_event(job.end)
            left.record(stream)
            self._waits.append((ticket, arrived, left))
        if (failure := self._failures.pop(ticket, None)) is not None:
            raise failure

    def settle(self) -> None:
        self._stream.synchronize()
        self._failures.clear()

    def take_timings(self) -> CopyTimings:
        rows = []
        while self._jobs:
            ticket, job = next(iter(self._jobs.items()))
            if not job.end.query():
                break
            del self._jobs[ticket]
            has_copies = job.to_peer_bytes + job.from_peer_bytes > 0
            rows.append(
                (
                    ticket,
                    self._anchor_s + self._anchor.elapsed_time(job.begin) / 1e3 if has_copies else 0.0,
                    job.begin.elapsed_time(job.turn) / 1e3 if job.to_peer_bytes else 0.0,
                    job.turn.elapsed_time(job.end) / 1e3 if job.from_peer_bytes else 0.0,
                    job.to_peer_bytes,
                    job.from_peer_bytes,
                )
            )
        if not self._jobs and time.monotonic() - self._anchor_s > _ANCHOR_INTERVAL_S:
            self._set_anchor()
        return np.array(rows, COPY_TIMING)

    def take_exposures(self) -> Exposures:
        rows = []
        while self._waits and self._waits[0][2].query():
            ticket, arrived, left = self._waits.popleft()
            rows.append((ticket, arrived.elapsed_time(left) / 1e3))
        return np.array(rows, EXPOSURE)

    def close(self) -> None:
        self.settle()
        for link in self.mappings.links():
            if link not in self._hosts:
                self.detach(link)
        while self._hosts:
            link, registration = self._hosts.popitem()
            self.mappings.remove(link)
            torch.cuda.current_stream(self._device).synchronize()  # as in `detach`
            registration.end()

    def _copy(self, runs: Runs | None, layer: int, is_to_peer: bool) -> None:
        """Enqueue the copies of one direction on the current stream. Raises `TransferError` before any is enqueued."""
        if runs is None or not len(runs.runs):
            return
        if (layer + 1) * runs.width_bytes > runs.block_bytes:
            raise TransferError(
                f"a block of {runs.block_bytes} bytes has no layer block {layer} of {runs.width_bytes} bytes"
            )
        if self.io_backend == "kernel":
            packed = self._packed(runs)
            num_blocks = int(runs.runs[:, 3].sum())
            self._move(packed, num_blocks, runs.width_bytes, layer, is_to_peer)
        else:
            self.mappings.check(runs)
            self._copy_runs(runs, layer, is_to_peer)

    def _move(self, packed: torch.Tensor, num_blocks: int, width_bytes: int, layer: int, is_to_peer: bool) -> None:
        pool, most = self._pool.tensor, self.max_programs
        move_blocks(pool, packed, 0, num_blocks, width_bytes, layer, is_to_peer, most)

    def _compile(self, widths_bytes: Sequence[int]) -> None:
        """Compile the kernels by copying nothing. Otherwise the first step with copies would wait for seconds."""
        if self.io_backend == "kernel":
            nothing = upload(pack_lists([np.empty((0, BLOCK_FIELDS), np.int64)]), self._device)
            for width_bytes in widths_bytes:
                for is_to_peer in (True, False):
                    self._move(nothing, 1, width_bytes, 0, is_to_peer)

    def _copy_runs(self, runs: Runs, layer: int, is_to_peer: bool) -> None:
        width, block = runs.width_bytes, runs.block_bytes
        for link, peer_offset, local_offset, count, staged in runs.runs.tolist():
            theirs = (self.mappings.address(link) + peer_offset + layer * width, block)
            ours = (
                self._pool.tensor.data_ptr() + local_offset + (0 if staged else layer * width),
                width if staged else block,
            )
            target, source = (theirs, ours) if is_to_peer else (ours, theirs)
            copy_2d(*target, *source, width, count, self._stream)

    def _packed(self, runs: Runs) -> torch.Tensor:
        """Return the runs on the device. The layers of a step share one copy, if they submit the same `Runs` object."""
        known = self._lists.get(id(runs))
        if known is not None:
            return known[1]
        packed = upload(pack_lists([self.mappings.flatten(runs)]), self._device)
        self._lists[id(runs)] = (runs, packed)
        if len(self._lists) > _MAX_LISTS:
            self._lists.popitem(last=False)
        return packed

    def _set_anchor(self) -> None:
        """Note one moment in the clocks of both device and host. The copy stream is idle, so the host hardly waits."""
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(self._stream)
        self._stream.synchronize()
        self._anchor_s = time.monotonic()
