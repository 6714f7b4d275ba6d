"""Streams borrowed KV through the pool, one layer at a time (SwiftCache, sections 3.2 and 3.3).

Within one KV group, with B layer-stream buffers, layers counted within the group:

    at the start      spill and load layers 0 to B - 1
    before write(l)   wait for the load of l; if there is none, for the store of layer l - B from the same buffer
    after write(l)    store l
    attention(l) done spill and load layer l + B, into the buffer that l used
    at the end        wait for all stores

Jobs run one after the other in this order, so a buffer is stored before it is loaded again, and blocks that leave the
pool have left before anything is written in their place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import numpy as np

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import TransferError
from swiftkv.models.stream import NO_STREAM, KVStream
from swiftkv.transport.base import DeviceTransport, Exposures, Int64Array, Runs, Ticket, Transport

CopyKind = Literal["spill", "load", "store"]

_MAX_RECENT = 4096


class StepCopies(Protocol):
    """The part of the scheduler's plan that streaming needs (`_core.StepPlan` has more)."""

    @property
    def num_stream_buffers(self) -> int:
        """0: what is copied is not staged."""

    @property
    def has_copies(self) -> bool: ...

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        """Runs [R, 5] as in `transport.base.Runs`; `buffer` is 0 where nothing is staged. Valid as long as the plan."""


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """What the copies of one step took, or of several, added up."""

    num_steps: int = 0  # that copied anything
    load_s: float = 0.0  # copying from peers
    store_s: float = 0.0  # copying to peers: stores and spills
    exposed_load_s: float = 0.0  # computing waited for KV to come
    exposed_store_s: float = 0.0  # and for KV to leave: its buffer, or the end of the step
    load_bytes: int = 0
    store_bytes: int = 0
    spill_bytes: int = 0

    @property
    def exposed_s(self) -> float:
        return self.exposed_load_s + self.exposed_store_s

    def __add__(self, other: StreamTimings) -> StreamTimings:
        return StreamTimings(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class LayerStream:
    """Performs the copies of one step after another, around the layers of a model."""

    def __init__(self, transport: Transport, groups: Sequence[KVGroup]) -> None:
        """`groups` are all the KV groups of the model, in the order of its pool."""
        self.total = StreamTimings()
        self.recent: deque[StreamTimings] = deque(maxlen=_MAX_RECENT)  # of single steps; whoever reads it may clear it
        self._unfinished: _Step | None = None  # the last step, if it is a device that waits for its copies
        self._transport = transport
        self._groups = tuple(groups)

    @contextmanager
    def step(self, plan: StepCopies) -> Iterator[KVStream]:
        """The hooks for one forward pass; on leaving, all copies of the step are done.

        On a device they are done when its compute stream has come that far: the caller waits for that before anything
        is given back. Raises `TransferError` if one was not: then nothing is in flight any more, and nothing of the
        step counts.
        """
        if not plan.has_copies:
            yield NO_STREAM
            return
        self.catch_up()
        try:
            step = _Step(self._transport, self._groups, plan)
            yield step
            step.wait_for_stores()
        except TransferError:
            self._transport.settle()
            self._transport.take_timings()
            raise
        if isinstance(self._transport, DeviceTransport):
            self._unfinished = step
        else:
            self._enter_in_books(step)

    def catch_up(self) -> None:
        """Enter in the books the last step that a device has finished; between steps."""
        if self._unfinished is not None and isinstance(self._transport, DeviceTransport):
            self._unfinished.take_exposures(self._transport.take_exposures())
            self._enter_in_books(self._unfinished)
            self._unfinished = None

    def run_copies_only(self, plan: StepCopies) -> None:
        """For a plan without tokens. Raises `TransferError` as `step` does."""
        with self.step(plan) as stream:
            for layer in sorted(layer for group in self._groups for layer in group.layers):
                stream.before_write(layer)
                stream.after_write(layer)
                stream.after_attention(layer)
        self._transport.settle()

    def _enter_in_books(self, step: _Step) -> None:
        copied = self._transport.take_timings()
        timings = StreamTimings(
            num_steps=1,
            load_s=float(copied["from_peer_s"].sum()),
            store_s=float(copied["to_peer_s"].sum()),
            exposed_load_s=step.exposed_load_s,
            exposed_store_s=step.exposed_store_s,
            load_bytes=step.load_bytes,
            store_bytes=step.store_bytes,
            spill_bytes=step.spill_bytes,
        )
        self.recent.append(timings)
        self.total += timings


@dataclass(frozen=True, slots=True)
class _GroupCopies:
    """The copies of every layer of one KV group; loads and stores by buffer."""

    layers: tuple[int, ...]
    spill: Runs | None
    loads: tuple[Runs | None, ...]
    stores: tuple[Runs | None, ...]

    @classmethod
    def from_plan(cls, plan: StepCopies, index: int, group: KVGroup) -> _GroupCopies:
        def runs(kind: CopyKind, buffer: int) -> Runs | None:
            rows = plan.copies(index, kind, buffer)
            return Runs(rows, group.layer_block_bytes, group.block_bytes) if len(rows) else None

        buffers = range(max(1, plan.num_stream_buffers))
        return cls(
            layers=group.layers,
            spill=runs("spill", 0),
            loads=tuple(runs("load", buffer) for buffer in buffers),
            stores=tuple(runs("store", buffer) for buffer in buffers),
        )


class _Step:
    """One step's tickets and what was waited for them."""

    def __init__(self, transport: Transport, groups: Sequence[KVGroup], plan: StepCopies) -> None:
        self.exposed_load_s = self.exposed_store_s = 0.0
        self.load_bytes = self.store_bytes = self.spill_bytes = 0
        self._transport = transport
        self._places: dict[int, tuple[_GroupCopies, int]] = {}  # of a layer: its group, and its index in there
        for number, group in enumerate(groups):
            copies = _GroupCopies.from_plan(plan, number, group)
            self._places |= {layer: (copies, index) for index, layer in enumerate(group.layers)}
        self._loads: dict[int, Ticket] = {}  # by layer
        self._stores: dict[int, Ticket] = {}
        for layer, (copies, index) in sorted(self._places.items(), key=lambda item: item[0]):
            if index < len(copies.loads):
                self._load(layer)

    def before_write(self, layer: int) -> None:
        copies, index = self._places[layer]
        if layer in self._loads:
            self.exposed_load_s += self._wait(self._loads[layer])
        elif index >= len(copies.loads):
            self._wait_for_store(copies.layers[index - len(copies.loads)])

    def after_write(self, layer: int) -> None:
        copies, index = self._places[layer]
        store = copies.stores[index % len(copies.stores)]
        if store is not None:
            self._stores[layer] = self._transport.submit(store, None, index)
            self.store_bytes += store.num_bytes

    def after_attention(self, layer: int) -> None:
        copies, index = self._places[layer]
        following = index + len(copies.loads)
        if following < len(copies.layers):
            self._load(copies.layers[following])

    def wait_for_stores(self) -> None:
        for layer in self._stores:
            self._wait_for_store(layer)

    def take_exposures(self, exposures: Exposures) -> None:
        """What the device waited, instead of the host."""
        is_load = np.isin(exposures["ticket"], list(self._loads.values()))
        is_store = np.isin(exposures["ticket"], list(self._stores.values()))
        self.exposed_load_s = float(exposures["exposed_s"][is_load].sum())
        self.exposed_store_s = float(exposures["exposed_s"][is_store].sum())

    def _wait_for_store(self, layer: int) -> None:
        if layer in self._stores:
            self.exposed_store_s += self._wait(self._stores[layer])

    def _load(self, layer: int) -> None:
        copies, index = self._places[layer]
        load = copies.loads[index % len(copies.loads)]
        if load is None and copies.spill is None:
            return
        self._loads[layer] = self._transport.submit(copies.spill, load, index)
        self.load_bytes += load.num_bytes if load is not None else 0
        self.spill_bytes += copies.spill.num_bytes if copies.spill is not None else 0

    def _wait(self, ticket: Ticket) -> float:
        """Returns the seconds that it took."""
        begin_s = time.monotonic()
        self._transport.wait(ticket)
        return time.monotonic() - begin_s
