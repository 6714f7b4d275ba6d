"""Streams borrowed KV inside a CUDA graph: the same launches for every step, over lists that each step writes anew.

The order is that of `master.copy_schedule`, as for other steps. But a graph cannot leave out a copy, so every layer has
a spill, a load and a store; if a step does not need one of them, its list is empty. The copies are launched on a CUDA
stream of their own, which is forked from the capturing stream and joined to it at the end. So they become a branch of
the graph: layer `l + 1` is loaded while layer `l` is computed. The lists are data, so attaching a lender needs no new
capture.

The events of a graph cannot be timed, and consecutive steps replay the same graph. So small kernels write down the
device's clock: before and after every copy, and whenever computing reaches a wait for a copy. The host gets these times
when the step has ended, and computes `StreamTimings` from them, to about a microsecond. The time of a copy includes its
launch. If computing reaches a wait before the copy has ended, the difference is exposed time. One such kernel per layer
runs between the kernels that compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.cache.geometry import KVGroup
from swiftkv.kernels.host_copies import write
from swiftkv.kernels.triton_clock import stamp
from swiftkv.kernels.triton_copy import BLOCK_FIELDS, HEADER_FIELDS, move_blocks, pack_lists
from swiftkv.master.copy_schedule import GroupLayer
from swiftkv.master.layer_stream import (
    GroupCopies,
    LayerStream,
    StepCopies,
    StreamTimings,
    buffers_of,
    copies_by_group,
)
from swiftkv.models.stream import KVStream
from swiftkv.transport.base import Int64Array, Runs
from swiftkv.transport.mappings import Mappings

ROOM_BLOCKS = 16 << 10
"""The most layer blocks in all lists of one step together. A step with more runs eagerly.

A layer block has tens of KiB, so such a step moves hundreds of MiB per layer, which takes milliseconds. Launching a
layer eagerly takes only a tenth of a millisecond.
"""

_MOMENTS = 6
_LOAD_BEGAN, _SPILLED, _LOADED, _STORE_BEGAN, _STORED, _ARRIVED = range(_MOMENTS)
"""The times noted for each layer: when its copies began and ended, and when computing reached the wait for them.

In the row after the last layer's, `_ARRIVED` is the end of the step.
"""


class GraphStream:
    """The copies of decode steps through `num_buffers` buffers: lists on the device, and launches that follow them.

    For each step call `fill`, replay a graph that was captured within `launches` (or run `launches` itself), and call
    `launched`. Steps of all batch sizes share one `GraphStream`, because they run in order on one CUDA stream. No call
    waits for the device.
    """

    def __init__(
        self,
        layer_stream: LayerStream,
        mappings: Mappings,
        num_buffers: int,
        room_blocks: int = ROOM_BLOCKS,
        max_programs: int = 0,
    ) -> None:
        """Copy between `mappings.pool` and the pools that are mapped in `mappings`.

        `layer_stream` records the timings. `max_programs` is passed to `move_blocks`.
        """
        self.num_buffers = num_buffers
        self._layer_stream = layer_stream
        self._mappings = mappings
        self._room_blocks = room_blocks
        self._launcher = _Launcher(mappings.pool, layer_stream.groups, num_buffers, room_blocks, max_programs)
        self._filled: tuple[GroupCopies, ...] = ()

    def fill(self, plan: StepCopies) -> bool:
        """Write the step's lists on the current CUDA stream; return false if they are too long.

        The host does not wait. If a link is not attached or a run lies outside of the pools, raise `TransferError` and
        write nothing.
        """
        assert buffers_of(plan) == self.num_buffers
        copies = copies_by_group(plan, self._layer_stream.groups)
        lists = [self._flatten(runs) for group in copies for runs in (group.spill, *group.loads, *group.stores)]
        if sum(map(len, lists)) > self._room_blocks:
            return False
        write(pack_lists(lists), self._launcher.packed)
        self._filled = copies
        return True

    @contextmanager
    def launches(self) -> Iterator[KVStream]:
        """Yield the hooks for one forward pass; on leaving, make the current CUDA stream wait for all copies."""
        with self._layer_stream.schedule.copies(self.num_buffers, self._launcher) as stream:
            yield stream

    def launched(self) -> None:
        """Register the step that `fill` wrote, after its launch on the current stream."""
        device_times = self._launcher.times
        times = torch.empty(device_times.shape, dtype=torch.int64, pin_memory=device_times.device.type == "cuda")
        times.copy_(device_times, non_blocking=True)  # before the next replay
        self._layer_stream.launched(ReplayedStep(self._filled, times.view(-1, _MOMENTS)))

    def _flatten(self, runs: Runs | None) -> Int64Array:
        return np.empty((0, BLOCK_FIELDS), np.int64) if runs is None else self._mappings.flatten(runs)


class _Launcher:
    """A `Copier` that launches kernels, which copy what the lists on the device say and note the times."""

    def __init__(
        self, pool: Tensor, groups: Sequence[KVGroup], num_buffers: int, room_blocks: int, max_programs: int
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._num_buffers = num_buffers
        self._room_blocks = room_blocks
        self._max_programs = max_programs
        size = HEADER_FIELDS * len(groups) * self._lists_per_group + BLOCK_FIELDS * room_blocks
        self.packed = torch.zeros(size, dtype=torch.int64, device=pool.device)
        """The lists, as from `pack_lists`. For each group: spills, and for each buffer loads, and then stores."""
        self._end_row = 1 + max(layer for group in groups for layer in group.layers)
        self.times = torch.zeros((self._end_row + 1) * _MOMENTS, dtype=torch.int64, device=pool.device)
        self._lane = _Lane(pool.device)
        self._loaded: dict[GroupLayer, _Mark] = {}

    def load(self, layer: GroupLayer) -> None:
        with self._lane.behind_computing():
            self._note(layer.number, _LOAD_BEGAN)
            self._move(layer, 0, to_peer=True)
            self._note(layer.number, _SPILLED)
            self._move(layer, 1 + layer.index % self._num_buffers, to_peer=False)
            self._note(layer.number, _LOADED)
        self._loaded[layer] = self._lane.mark()

    def store(self, layer: GroupLayer) -> None:
        with self._lane.behind_computing():
            self._note(layer.number, _STORE_BEGAN)
            self._move(layer, 1 + self._num_buffers + layer.index % self._num_buffers, to_peer=True)
            self._note(layer.number, _STORED)

    def wait_to_write(self, layer: GroupLayer, previous: GroupLayer | None) -> None:
        """Wait for the load of `layer`, which is launched even if its list is empty, and follows the store."""
        self._note(layer.number, _ARRIVED)
        self._loaded[layer].wait()

    def end(self) -> None:
        self._note(self._end_row, _ARRIVED)
        self._lane.mark().wait()

    def _move(self, layer: GroupLayer, number: int, to_peer: bool) -> None:
        """Launch the copies of one list of the layer's group."""
        width_bytes = self._groups[layer.group].layer_block_bytes
        which = layer.group * self._lists_per_group + number
        move_blocks(
            self._pool, self.packed, which, self._room_blocks, width_bytes, layer.index, to_peer, self._max_programs
        )

    def _note(self, row: int, moment: int) -> None:
        stamp(self.times, row * _MOMENTS + moment)

    @property
    def _lists_per_group(self) -> int:
        """One list for spills, and for each buffer one for loads and one for stores."""
        return 1 + 2 * self._num_buffers


class _Lane:
    """A CUDA stream for copies beside the one that computes. On the CPU everything runs in line."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def behind_computing(self) -> Iterator[None]:
        """Launch copies within this block on the lane, after everything launched on the current CUDA stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> _Mark:
        """Mark everything that was launched on this lane so far."""
        return _Mark(self._device, None if self._stream is None else self._stream.record_event())


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point in the work of a lane."""

    device: torch.device
    event: torch.cuda.Event | None  # None: the lane runs in line

    def wait(self) -> None:
        """Make the current CUDA stream wait until the lane has reached this point."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step whose copies were launched inside a CUDA graph."""

    groups: tuple[GroupCopies, ...]
    times: Tensor  # int64 [layers + 1, _MOMENTS] in ns, on the host when the step has ended

    def timings(self) -> StreamTimings:
        times = self.times.numpy()
        last_store = times[:-1, _STORED].max(keepdims=True)
        total = StreamTimings(num_steps=1, exposed_store_s=_waited_s(times[-1:, _ARRIVED], last_store))
        for copies in self.groups:
            total += _timings_of_group(copies, times[list(copies.layers)])
        return total


def _timings_of_group(copies: GroupCopies, times: npt.NDArray[np.int64]) -> StreamTimings:
    """Sum up `times` [layers of the group, _MOMENTS]. Where a list is empty, its launch copies nothing."""
    layers = range(len(copies.layers))
    has_load = np.array([copies.load(layer) is not None for layer in layers])
    has_store = np.array([copies.store(layer) is not None for layer in layers])
    spill_s = _seconds(times[:, _SPILLED] - times[:, _LOAD_BEGAN]) if copies.spill is not None else 0.0
    # Computing waits for the load, or without one for the store that precedes it in the lane, as in an eager step.
    waits_for_load = has_load | (copies.spill is not None)
    return replace(
        copies.amounts(),
        load_s=_seconds((times[:, _LOADED] - times[:, _SPILLED])[has_load]),
        store_s=spill_s + _seconds((times[:, _STORED] - times[:, _STORE_BEGAN])[has_store]),
        exposed_load_s=_waited_s(times[waits_for_load, _ARRIVED], times[waits_for_load, _LOADED]),
        exposed_store_s=_waited_s(times[~waits_for_load, _ARRIVED], times[~waits_for_load, _LOADED]),
    )


def _waited_s(arrived: npt.NDArray[np.int64], ended: npt.NDArray[np.int64]) -> float:
    return _seconds(np.maximum(ended - arrived, 0))


def _seconds(ns: npt.NDArray[np.int64]) -> float:
    return float(ns.sum()) / 1e9
