"""Searches storage for blocks and reads them, in a thread of its own."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swiftkv.latency import prefer_latency
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import HUNG_S
from swiftkv.tier.host_pins import SearchPins
from swiftkv.tier.keys import split_keys
from swiftkv.tier.reach import Reach, Span
from swiftkv.tier.storage_thread import StorageThread
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks
from swiftkv.transport.fence import Fence

_BLOCKS_PER_GET = 64
_GET_BYTES = 8 << 20
_MAX_GROWTH = 8
_SHORT_S = 0.005
"""A call that takes less time is followed by one of twice its size, because every call interrupts the engine once."""


@dataclass(eq=False, slots=True)
class Search:
    """A search for a prompt's blocks in storage. `cells` are the indices in [keys * groups] of the wanted blocks.

    Blocks that the engine attends to in host memory are pinned and verified there, which takes several turns.
    """

    request_id: int
    block_keys: bytes
    num_groups: int
    cells: npt.NDArray[np.int64]
    deadline_s: float  # monotonic
    pins: SearchPins | None = None  # what it has found and pinned in host memory; `None` if it pins nothing
    is_cancelled: bool = False
    names: Sequence[BlockName] | None = None  # of the cells, once it has begun
    found: npt.NDArray[np.bool_] | None = None  # of the cells, once it is over
    failures: list[Status] = field(default_factory=list)  # of blocks in host memory that are not intact


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """One block to read, and where its bytes go."""

    name: BlockName
    index: int  # the block's number in its prompt
    block: int  # as the core numbers it
    span: Span


@dataclass(eq=False, slots=True)
class Load:
    """Blocks to read in order, a few at a time. Reading stops at the first block that is missing."""

    request_id: int
    targets: Sequence[Target]
    deadline_s: float  # monotonic
    handed_out: Fence  # the end of the steps that may still use the previous contents of these blocks
    is_cancelled: bool = False
    num_begun: int = 0  # targets that were passed to storage, or are no longer wanted
    growth: int = 1  # the size of its next call, as a multiple of the first

    def take_rest(self) -> Sequence[Target]:
        """Return the targets that are still to be read, once."""
        rest = self.targets[self.num_begun :]
        self.num_begun = len(self.targets)
        return rest


@dataclass(frozen=True, slots=True)
class PartRead:
    """The outcome for the next targets of a load. Targets that storage was not asked for have no status."""

    load: Load
    targets: Sequence[Target]
    statuses: Sequence[Status | None]
    tiers: Sequence[str]  # the tier of each target that was read, in their order
    is_last: bool
    took_s: float

    @property
    def num_read(self) -> int:
        """The number of targets before the first that was not read."""
        return _num_read(self.statuses)


def _num_read(statuses: Sequence[Status | None]) -> int:
    return next((i for i, status in enumerate(statuses) if status is not Status.OK), len(statuses))


class Loader:
    """The thread that reads. Loads take turns, so that a long one holds up a short one for a moment only.

    The engine's thread calls all methods. A call that hangs keeps its buffers, and delays the loads behind it, which
    are withdrawn at their own deadlines.
    """

    def __init__(self, stored: StoredBlocks, reach: Reach, on_done: Callable[[], None]) -> None:
        """`on_done` is called in the thread when `take_done` has something."""
        self._stored = stored
        self._reach = reach
        self._on_done = on_done
        self._todo: OrderedDict[Search | Load, None] = OrderedDict()  # thousands may be withdrawn at once
        self._done: deque[Search | PartRead] = deque()
        self.hung_from_s = math.inf
        """The time, on the monotonic clock, from which the call in progress counts as hung."""
        self._thread = StorageThread("storage loader", self._serve, on_done)
        self._thread.start()

    def submit(self, job: Search | Load) -> None:
        with self._thread.changed:
            self._todo[job] = None
            self._thread.changed.notify()

    def withdraw(self, job: Search | Load) -> Sequence[Target]:
        """Give up a job. Return the targets of a load that were not passed to storage.

        `take_done` returns only the other targets.
        """
        with self._thread.changed:
            job.is_cancelled = True
            self._todo.pop(job, None)  # it is not there if the thread is working on it, or has finished it
            return job.take_rest() if isinstance(job, Load) else ()

    @property
    def is_hung(self) -> bool:
        """Whether the thread is in a call that should have ended long ago."""
        return time.monotonic() >= self.hung_from_s

    def take_done(self) -> list[Search | PartRead]:
        """Return the answers that have come since the last call. Raises `RuntimeError` if a defect ended the thread."""
        self._thread.check()
        with self._thread.changed:
            done = list(self._done)
            self._done.clear()
        return done

    def close(self) -> None:
        """End the thread once its call in progress returns; jobs that have not begun are given up."""
        self._thread.close()

    def join(self, patience_s: float) -> None:
        """Wait for the end of the thread; one that hangs in the backend ends with the process."""
        self._thread.join(patience_s)

    def _serve(self) -> None:
        self._reach.begin_thread()
        prefer_latency()  # a prompt waits for this thread, which would wait for its turn where every core computes
        while job := self._next():
            done = self._search(job) if isinstance(job, Search) else self._read_part(job)
            with self._thread.changed:
                self.hung_from_s = math.inf
                if isinstance(done, Search) and done.found is None and not done.is_cancelled:
                    self._todo[done] = None
                    continue
                self._done.append(done)
                if isinstance(done, PartRead) and not (done.is_last or done.load.is_cancelled):
                    self._todo[done.load] = None
            self._on_done()

    def _next(self) -> Search | Load | None:
        """Wait for a job and return it; `None` when the loader is closed and no job is left."""
        thread = self._thread
        with thread.changed:
            thread.changed.wait_for(lambda: thread.is_closing or bool(self._todo))
            if not self._todo:
                return None
            job, _ = self._todo.popitem(last=False)
            job.is_cancelled |= thread.is_closing
            self.hung_from_s = max(time.monotonic(), job.deadline_s) + HUNG_S
            return job

    def _search(self, search: Search) -> Search:
        """Go on with a search. It is over when `found` is set."""
        if search.is_cancelled:
            return search
        if search.names is None:
            search.names = self._names(search)
            if search.pins is not None:
                self._stored.pin(search.pins, search.cells, search.names, search.deadline_s)
        if search.pins is not None and not search.pins.are_verified:
            search.failures += self._stored.verify(search.pins)
            return search
        found = np.zeros(len(search.cells), np.bool_) if search.pins is None else search.pins.are_pinned(search.cells)
        others = np.flatnonzero(~found).tolist()
        found[others] = self._stored.exists([search.names[i] for i in others], search.deadline_s)
        search.found = found
        return search

    def _names(self, search: Search) -> list[BlockName]:
        keys = list(split_keys(search.block_keys))
        cells = (divmod(cell, search.num_groups) for cell in search.cells.tolist())
        return [BlockName(keys[index], group) for index, group in cells]

    def _read_part(self, load: Load) -> PartRead:
        began_s = time.monotonic()
        part = self._next_part(load)
        statuses: list[Status | None] = []
        tiers: list[str] = []
        waited_s = 0.0
        if not load.is_cancelled:
            spans = [target.span for target in part]
            read, tiers = self._stored.get(
                [target.name for target in part], self._reach.landing(spans), load.deadline_s
            )
            statuses += read
            read_s = time.monotonic()
            load.handed_out.wait()
            waited_s = time.monotonic() - read_s  # spent waiting for steps, not for storage
            self._reach.land(spans[: _num_read(read)])
        is_whole = bool(statuses) and all(status is Status.OK for status in statuses)
        took_s = time.monotonic() - began_s - waited_s
        if took_s < _SHORT_S:
            load.growth = min(2 * load.growth, _MAX_GROWTH)
        elif took_s > 2 * _SHORT_S:
            load.growth = 1  # the rest may lie in slower storage
        with self._thread.changed:
            if is_whole and load.num_begun < len(load.targets):
                return PartRead(load, part, statuses, tiers, is_last=False, took_s=took_s)
            part += load.take_rest()
        statuses += [None] * (len(part) - len(statuses))
        return PartRead(load, part, statuses, tiers, is_last=True, took_s=took_s)

    def _next_part(self, load: Load) -> list[Target]:
        """Take the targets of the next call: none if the load was withdrawn."""
        part: list[Target] = []
        num_bytes = 0
        max_blocks, max_bytes = load.growth * _BLOCKS_PER_GET, load.growth * _GET_BYTES
        with self._thread.changed:
            while load.num_begun < len(load.targets) and len(part) < max_blocks and num_bytes < max_bytes:
                target = load.targets[load.num_begun]
                num_bytes += target.span.num_bytes
                if num_bytes > self._reach.max_read_bytes:
                    break
                part.append(target)
                load.num_begun += 1
        return part
