"""The limits on what connections take of a node. One `NodeLimits` counts for all of its ports."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from swiftkv.server.log_limit import LogLimit

SPARE_CONNECTIONS = 64
"""The number of connections beyond the limit that are kept for monitoring, one short request each."""
URGENT_PATHS = frozenset({"/health", "/ready"})
"""The paths whose requests begin at once: they cost little, and monitoring measures how quickly the node answers."""
MONITORING_PATHS = URGENT_PATHS | {"/metrics"}
_MODEL_PREFIX = re.compile(r"/models/[^/]+(?=/)")
FREE_BODY_BYTES = 32 << 10
"""A body up to this size does not count: a place for it comes with its connection."""


def without_model(path: str) -> str:
    """Return a path without the model that it begins with: `/health` for `/models/chat/health`."""
    prefix = _MODEL_PREFIX.match(path)
    return path[prefix.end() :] if prefix else path


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a connection may take for each part of its life."""

    head_s: float = 10.0
    """The time for a whole request head, from its first byte; on a new connection, from the start."""
    spare_head_s: float = 1.0
    """The same on a spare connection."""
    body_window_s: float = 15.0
    """A body must bring `min_body_rate` bytes a second, or its end, in every window of this length."""
    min_body_rate: float = 16 << 10
    drain_s: float = 10.0
    """The time for the rest of a body whose request is answered already; without it clients might miss the answer."""
    idle_s: float = 15.0
    """The time between an answer and the next request."""
    write_s: float = 60.0
    """The time for a client that does not read its answer to make room for more."""
    close_s: float = 10.0
    """The time for the last bytes of a connection that is being closed."""


class Admission(Enum):
    """The kind of place that a new connection gets."""

    REGULAR = auto()
    SPARE = auto()
    NONE = auto()


class BodyBudget:
    """The bytes that one request's body takes of the node's budget.

    Large bodies must not shut out small ones: beside others, a body must leave as much room as it is long (at most an
    eighth of the budget). One of up to `FREE_BODY_BYTES` needs no room, because connections are limited too.
    """

    __slots__ = ("_counted_bytes", "_declared_bytes", "_limits", "_received_bytes", "_uncounted_bytes")

    def __init__(self, limits: NodeLimits, declared_bytes: int) -> None:
        self._limits = limits
        self._declared_bytes = declared_bytes
        self._received_bytes = self._counted_bytes = self._uncounted_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes` more, or return `False` if the node has no room for them."""
        self._received_bytes += num_bytes
        self._uncounted_bytes += num_bytes
        size_bytes = max(self._declared_bytes, self._received_bytes)
        if size_bytes <= FREE_BODY_BYTES:
            return True
        limits = self._limits
        others_bytes = limits.body_bytes - self._counted_bytes
        room_bytes = limits.max_bodies - limits.body_bytes - self._uncounted_bytes
        if room_bytes < (min(size_bytes, limits.max_bodies // 8) if others_bytes else 0):
            limits.num_refused_bodies += 1
            return False
        limits.body_bytes += self._uncounted_bytes
        self._counted_bytes += self._uncounted_bytes
        self._uncounted_bytes = 0
        return True

    def release(self) -> None:
        """Give everything back. May be called more than once."""
        self._limits.body_bytes -= self._counted_bytes
        self._counted_bytes = 0


class Rounds:
    """Begins a few pieces of work in each round of one event loop.

    A hundred requests that come at once begin over fifty rounds, two in each. So tokens and answers of others wait for
    two of them, not for all hundred.
    """

    def __init__(self, per_round: int = 2) -> None:
        self._per_round = per_round
        self._left = per_round
        self._is_counting = False
        self._waiting: dict[Hashable, Callable[[], None]] = {}  # in order

    @property
    def num_waiting(self) -> int:
        """The number of pieces of work that wait for a round with room."""
        return len(self._waiting)

    def enter(self, who: Hashable, begin: Callable[[], None]) -> None:
        """Call `begin` in its turn, at once if this round has room. `who` may wait for one place at a time."""
        assert who not in self._waiting
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_round)
        if self._left > 0:
            self._left -= 1
            begin()
        else:
            self._waiting[who] = begin

    def leave(self, who: Hashable) -> None:
        """Give up the place that `who` waits for."""
        self._waiting.pop(who, None)

    async def take(self) -> None:
        """Wait for a place in a round."""
        place = asyncio.get_running_loop().create_future()
        try:
            self.enter(place, lambda: None if place.done() else place.set_result(None))
            await place
        finally:
            self.leave(place)

    def _begin_round(self) -> None:
        self._left = self._per_round
        self._is_counting = bool(self._waiting)
        if self._is_counting:  # first: the next rounds must come even if `begin` fails
            asyncio.get_running_loop().call_soon(self._begin_round)
        while self._waiting and self._left > 0:
            begin = self._waiting.pop(next(iter(self._waiting)))
            self._left -= 1
            begin()


@dataclass(slots=True)
class NodeLimits:
    """The limits of a node, and how much of them is in use."""

    max_connections: int = 4096
    max_bodies: int = 128 << 20
    """Bytes of all larger request bodies together, from their arrival until their answers begin."""
    max_files: int = sys.maxsize
    """The descriptors that models leave to clients, for connections and for files that requests hold open."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    log: LogLimit = field(default_factory=LogLimit)
    rounds: Rounds = field(default_factory=Rounds)
    num_connections: int = 0
    num_refused_connections: int = 0
    num_files: int = 0
    """Files that requests hold open. Each counts as one more connection: it takes a descriptor, too."""
    body_bytes: int = 0
    num_refused_bodies: int = 0

    @property
    def _num_places(self) -> int:
        """The connections and files that clients may have at once."""
        return min(self.max_connections, self.max_files)

    def admit(self) -> Admission:
        """Count a new connection, unless there is no place for it."""
        num_taken = self.num_connections + self.num_files
        if num_taken >= self._num_places + SPARE_CONNECTIONS:
            self.num_refused_connections += 1
            return Admission.NONE
        self.num_connections += 1
        return Admission.REGULAR if num_taken < self._num_places else Admission.SPARE

    def leave(self) -> None:
        """Give the place of an admitted connection back."""
        assert self.num_connections > 0
        self.num_connections -= 1

    def take_file(self) -> bool:
        """Count a file that a request is about to open, or return `False` if there is no place for it."""
        if self.num_connections + self.num_files >= self._num_places:
            self.num_refused_connections += 1
            return False
        self.num_files += 1
        return True

    def leave_file(self) -> None:
        """Give the place of a file back."""
        assert self.num_files > 0
        self.num_files -= 1

    def take_files_of_model(self, num_files: int) -> bool:
        """Leave clients fewer descriptors; return `False` if they hold more than that, or would have none."""
        if self.max_files - num_files < max(1, self.num_connections + self.num_files):
            return False
        self.max_files -= num_files
        return True

    def leave_files_of_model(self, num_files: int) -> None:
        """Give the descriptors of a model that is gone back to clients."""
        self.max_files += num_files

    @contextmanager
    def body(self, declared_bytes: int) -> Iterator[BodyBudget]:
        """Yield the budget of a body whose Content-Length is `declared_bytes` (0: unknown); give it back at the end."""
        budget = BodyBudget(self, declared_bytes)
        try:
            yield budget
        finally:
            budget.release()
