"""Streams borrowed KV through the pool, and copies blocks from host memory into it, one layer at a time.

The copies are made in the order of `master.copy_schedule`. Host memory is a peer that is only read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import TransferError
from swiftkv.master.copy_schedule import CopySchedule, GroupLayer
from swiftkv.models.parallel import ALONE, Communicator, agree
from swiftkv.models.stream import NO_STREAM, KVStream
from swiftkv.transport.base import (
    COPY_TIMING,
    EXPOSURE,
    CopyTimings,
    Exposures,
    Int64Array,
    Runs,
    Ticket,
    Transport,
)

CopyKind = Literal["spill", "load", "store"]
_COPY_KINDS: tuple[CopyKind, ...] = ("spill", "load", "store")

_MAX_RECENT = 4096


class StepCopies(Protocol):
    """The part of the scheduler's plan that streaming needs (`_core.StepPlan` has more)."""

    @property
    def num_stream_buffers(self) -> int:
        """The number of stream buffers; 0: the step stages nothing, and loads nothing from host memory."""

    @property
    def has_copies(self) -> bool: ...

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        """Return runs [R, 5] of `transport.base.Runs`, valid as long as the plan. Unstaged runs have buffer 0."""


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """The times and bytes of the copies of one step, or of several, added up."""

    num_steps: int = 0  # steps that copied anything
    load_s: float = 0.0  # copying from peers
    store_s: float = 0.0  # copying to peers: stores and spills
    exposed_load_s: float = 0.0  # time that computing waited for KV to come
    exposed_store_s: float = 0.0  # time that computing waited for KV to leave: for a buffer, or at the end of the step
    load_bytes: int = 0
    store_bytes: int = 0
    spill_bytes: int = 0

    @property
    def exposed_s(self) -> float:
        return self.exposed_load_s + self.exposed_store_s

    def __add__(self, other: StreamTimings) -> StreamTimings:
        return StreamTimings(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """The copies of every layer of one KV group; loads and stores by buffer. Layers are counted within the group."""

    layers: tuple[int, ...]  # their numbers in the model
    spill: Runs | None
    loads: tuple[Runs | None, ...]
    stores: tuple[Runs | None, ...]

    @classmethod
    def from_plan(cls, plan: StepCopies, index: int, group: KVGroup) -> GroupCopies:
        def runs(kind: CopyKind, buffer: int) -> Runs | None:
            rows = plan.copies(index, kind, buffer)
            return Runs(rows, group.layer_block_bytes, group.block_bytes) if len(rows) else None

        buffers = range(buffers_of(plan))
        return cls(
            layers=group.layers,
            spill=runs("spill", 0),
            loads=tuple(runs("load", buffer) for buffer in buffers),
            stores=tuple(runs("store", buffer) for buffer in buffers),
        )

    def load(self, layer: int) -> Runs | None:
        return self.loads[layer % len(self.loads)]

    def store(self, layer: int) -> Runs | None:
        return self.stores[layer % len(self.stores)]

    def amounts(self) -> StreamTimings:
        """Return the bytes of all layers."""
        return StreamTimings(
            load_bytes=self._num_bytes(self.loads),
            store_bytes=self._num_bytes(self.stores),
            spill_bytes=self._num_bytes((self.spill,)),
        )

    def _num_bytes(self, by_buffer: Sequence[Runs | None]) -> int:
        return sum(
            runs.num_bytes * len(self.layers[buffer :: len(by_buffer)])
            for buffer, runs in enumerate(by_buffer)
            if runs is not None
        )


def copies_by_group(plan: StepCopies, groups: Sequence[KVGroup]) -> tuple[GroupCopies, ...]:
    """Return the copies of a step for each KV group."""
    return tuple(GroupCopies.from_plan(plan, index, group) for index, group in enumerate(groups))


def buffers_of(plan: StepCopies) -> int:
    """Return how many buffers a step's copies take in turn; unstaged copies count as one buffer."""
    return max(1, plan.num_stream_buffers)


def runs_of(plan: StepCopies, num_groups: int) -> Iterator[tuple[int, CopyKind, int, Int64Array]]:
    """Yield the group, kind and buffer of all runs that a step copies, with the runs."""
    if not plan.has_copies:
        return
    for group in range(num_groups):
        for kind in _COPY_KINDS:
            for buffer in range(1 if kind == "spill" else buffers_of(plan)):
                runs = plan.copies(group, kind, buffer)
                if len(runs):
                    yield group, kind, buffer, runs


class LaunchedStep(Protocol):
    """A step with copies that was launched."""

    def timings(self) -> StreamTimings:
        """Return the step's timings. Called once, after the step has ended, and in the order of steps."""


class LayerStream:
    """Makes the copies of each step around the layers of a model, and records their timings.

    A step may begin while the device is busy with earlier steps. `step_ended` records the timings of a step.
    """

    def __init__(self, transport: Transport, groups: Sequence[KVGroup], communicator: Communicator = ALONE) -> None:
        """`groups` are all the KV groups of the model, in the order of its pool.

        Every rank has a `LayerStream` of its own, and all ranks make the same steps.
        """
        self.groups = tuple(groups)
        self.schedule = CopySchedule(groups)
        self.recent: deque[StreamTimings] = deque(maxlen=_MAX_RECENT)  # single steps; the reader may clear it
        self._transport = transport
        self._communicator = communicator
        self._journal = _Journal(transport)
        self._launched: deque[LaunchedStep] = deque()  # not recorded yet, the oldest first

    @contextmanager
    def step(self, plan: StepCopies) -> Iterator[KVStream]:
        """Yield the hooks for one forward pass; on leaving, all copies of the step are done.

        On a device, they are done when its compute stream has reached this point. Wait for that before giving memory
        back to a lender.

        Raises `TransferError` if a copy failed on any rank. Then no copy is in flight, and the step's results are void.
        """
        if not plan.has_copies:
            yield NO_STREAM
            return
        try:
            step = self._step(plan)
            with self.schedule.copies(buffers_of(plan), step) as stream:
                yield stream
        except TransferError:
            self._transport.settle()
            raise
        self.launched(step)

    def _step(self, plan: StepCopies) -> _Step:
        copies = copies_by_group(plan, self.groups)
        if self._communicator.size == 1:
            return _Step(self._transport, self._journal, copies)
        return _RankStep(self._transport, self._journal, copies, self._communicator)

    def launched(self, step: LaunchedStep) -> None:
        """Note a step whose copies were launched, here or in a graph (`master.graph_stream`)."""
        self._launched.append(step)

    def step_ended(self) -> float:
        """Record the timings of the oldest unrecorded step with copies, and return its exposed seconds.

        Call this once for each step with copies that did not fail, after the device has ended it.
        """
        timings = self._launched.popleft().timings()
        self.recent.append(timings)
        return timings.exposed_s

    def run_copies_only(self, plan: StepCopies) -> None:
        """Make the copies of a plan without tokens. Raises `TransferError` as `step` does."""
        with self.step(plan) as stream:
            for layer in sorted(layer for group in self.groups for layer in group.layers):
                stream.before_write(layer)
                stream.after_write(layer)
                stream.after_attention(layer)
        self._transport.settle()


class _Journal:
    """Sorts the timings of a transport's jobs by step.

    The transport reports jobs as they end, so there may be jobs of the next step among them, which are kept. Steps ask
    in order. Timings with smaller tickets than the asking step's belong to a failed step, and are forgotten.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._copied: CopyTimings = np.empty(0, COPY_TIMING)
        self._waited: Exposures = np.empty(0, EXPOSURE)

    def copied(self, tickets: Collection[Ticket]) -> CopyTimings:
        copied, self._copied = _split(np.append(self._copied, self._transport.take_timings()), tickets)
        return copied

    def waited(self, tickets: Collection[Ticket], by_host: Exposures) -> Exposures:
        """Return how long the device waited for these jobs, or `by_host` if it is the host that waits for copies."""
        by_device = self._transport.take_exposures()
        if by_device is None:
            return by_host
        waited, self._waited = _split(np.append(self._waited, by_device), tickets)
        return waited


def _split(rows: npt.NDArray[Any], tickets: Collection[Ticket]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the rows of `tickets`, and the rows of later tickets."""
    of_rows = rows["ticket"]
    return rows[np.isin(of_rows, list(tickets))], rows[of_rows > max(tickets, default=0)]


class _Step:
    """A `Copier` that submits jobs to a transport. It has their tickets, and how long the host waited for them."""

    def __init__(self, transport: Transport, journal: _Journal, copies: Sequence[GroupCopies]) -> None:
        self._transport = transport
        self._journal = journal
        self._copies = copies
        self._amounts = sum((each.amounts() for each in copies), StreamTimings(num_steps=1))
        self._waited: list[tuple[Ticket, float]] = []  # by the host
        self._loads: dict[GroupLayer, Ticket] = {}
        self._stores: dict[GroupLayer, Ticket] = {}

    def load(self, layer: GroupLayer) -> None:
        copies = self._copies[layer.group]
        load = copies.load(layer.index)
        if load is not None or copies.spill is not None:
            self._loads[layer] = self._transport.submit(copies.spill, load, layer.index)

    def store(self, layer: GroupLayer) -> None:
        store = self._copies[layer.group].store(layer.index)
        if store is not None:
            self._stores[layer] = self._transport.submit(store, None, layer.index)

    def wait_to_write(self, layer: GroupLayer, previous: GroupLayer | None) -> None:
        if layer in self._loads:
            self._wait(self._loads[layer])
        elif previous in self._stores:
            self._wait(self._stores[previous])

    def end(self) -> None:
        for ticket in self._stores.values():
            self._wait(ticket)

    def timings(self) -> StreamTimings:
        loads, stores = list(self._loads.values()), list(self._stores.values())
        copied = self._journal.copied(loads + stores)
        waited = self._journal.waited(loads + stores, np.array(self._waited, EXPOSURE))
        exposed_s = waited["exposed_s"]
        return replace(
            self._amounts,
            load_s=float(copied["from_peer_s"].sum()),
            store_s=float(copied["to_peer_s"].sum()),
            exposed_load_s=float(exposed_s[np.isin(waited["ticket"], loads)].sum()),
            exposed_store_s=float(exposed_s[np.isin(waited["ticket"], stores)].sum()),
        )

    def _wait(self, ticket: Ticket) -> None:
        begin_s = time.monotonic()
        self._transport.wait(ticket)
        self._waited.append((ticket, time.monotonic() - begin_s))


class _RankStep(_Step):
    """A step of one of several ranks.

    The other ranks wait for this rank's part of every layer. So after a failed copy it goes on with undefined KV, and
    all ranks give up the step at its end. They meet there even if nothing has failed: rank 0, which alone gives memory
    back to lenders, must know that the copies of all ranks have ended.
    """

    def __init__(
        self,
        transport: Transport,
        journal: _Journal,
        copies: Sequence[GroupCopies],
        communicator: Communicator,
    ) -> None:
        super().__init__(transport, journal, copies)
        self._communicator = communicator
        self._failure: TransferError | None = None

    def end(self) -> None:
        super().end()
        self._transport.settle()
        agree(self._communicator, self._failure)

    def _wait(self, ticket: Ticket) -> None:
        try:
            super()._wait(ticket)
        except TransferError as error:
            self._failure = TransferError(str(error))  # names no links: other ranks may have failed over other links
