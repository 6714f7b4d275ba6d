"""The leases of a node in virtual time: the real coordinators, whose messages arrive at once."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from swiftkv._core import Scheduler
from swiftkv.lease.messages import (
    FromAdmin,
    FromBorrower,
    FromLender,
    LendingSpec,
    MalformedMessage,
    ToAdmin,
)
from swiftkv.lease.process import PeerProcess
from swiftkv.lease.wire import Route
from swiftkv.lending_party import open_party
from swiftkv.transport.base import PeerHandle

_ATTACH_TIMEOUT_S = 10.0  # in real time


class Clock:
    """The time of a simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0


@dataclass(frozen=True)
class LeaseTotals:
    """The lending of one engine, over the whole simulation."""

    lent_bytes: list[tuple[float, int]]
    """The times at which the lent bytes changed, each with the number of bytes from then on."""
    borrowed_bytes: list[tuple[float, int]]
    recalls: dict[str, int]
    """Recalls by reason."""


class Leases:
    """The coordinators of engines that lend and borrow. Engines without a `LendingSpec` have none."""

    def __init__(self, clock: Clock, engines: Sequence[tuple[str, Scheduler, LendingSpec | None, int]]) -> None:
        """`engines` has the name, the scheduler, the lending spec and the pool's bytes of each."""
        self._clock = clock
        self._news = threading.Event()
        wires: dict[str, VirtualWire] = {}
        self._parties = {
            number: _Party(clock, wires, self._news.set, name, scheduler, spec, pool_bytes)
            for number, (name, scheduler, spec, pool_bytes) in enumerate(engines)
            if spec is not None
        }

    @property
    def next_s(self) -> float:
        """The next time at which a coordinator has something to do."""
        return min((party.due_s for party in self._parties.values()), default=math.inf)

    def attach_all(self) -> None:
        """Have every borrower attach its lenders' pools, which takes no virtual time."""
        while True:
            self._news.clear()
            self.settle()
            for number in self._parties:
                self.before_step(number)
            if all(party.borrower is None or party.borrower.is_attached for party in self._parties.values()):
                return
            if not self._news.wait(_ATTACH_TIMEOUT_S):
                raise RuntimeError("a borrower does not attach its lenders' pools")

    def settle(self) -> None:
        """Let the coordinators act until nothing is due and every message has been read."""
        parties = self._parties.values()
        while acting := [party for party in parties if party.wire.has_news or party.due_s <= self._clock.now_s]:
            for party in acting:
                party.due_s = party.coordinator.serve_once(party.wire.wait(0.0))
                party.note_bytes(self._clock.now_s)

    def before_step(self, engine: int) -> None:
        """Do an engine's work for lending between its steps."""
        party = self._parties.get(engine)
        if party is not None and party.borrower is not None:
            party.borrower.apply_pending(_no_steps)
        self.settle()

    def demand_changed(self, engine: int) -> None:
        """Note that requests of an engine came, grew or went, so that it may need its lent blocks."""
        party = self._parties.get(engine)
        if party is not None and party.scheduler.is_short():
            party.wire.wake()

    def take_wake(self, engine: int) -> bool:
        """Return whether a coordinator has woken the engine since the last call."""
        party = self._parties.get(engine)
        if party is None:
            return False
        is_woken, party.is_woken = party.is_woken, False
        return is_woken

    def totals(self, engine: int) -> LeaseTotals | None:
        party = self._parties.get(engine)
        return None if party is None else LeaseTotals(party.lent_bytes, party.borrowed_bytes, party.recalls())

    def close(self) -> None:
        for party in self._parties.values():
            party.close()


class _Party:
    """An engine's coordinator, without its thread."""

    def __init__(
        self,
        clock: Clock,
        wires: dict[str, VirtualWire],
        on_wake: Callable[[], None],
        name: str,
        scheduler: Scheduler,
        spec: LendingSpec,
        pool_bytes: int,
    ) -> None:
        self.scheduler = scheduler
        self.wire = wires[name] = VirtualWire(clock, wires, on_wake, name, [peer.name for peer in spec.lenders])
        self.due_s = 0.0
        self.is_woken = False
        self.lent_bytes: list[tuple[float, int]] = [(0.0, 0)]
        self.borrowed_bytes: list[tuple[float, int]] = [(0.0, 0)]
        party = open_party(
            name,
            spec,
            self.wire,
            scheduler=scheduler,
            pool_bytes=pool_bytes,
            serve_link=lambda _: None,
            peer_pools=_PoolsOfNobody(),
            wake_engine=self._wake,
        )
        self._lender, self.borrower, self.coordinator = party.lender, party.borrower, party.coordinator

    def note_bytes(self, now_s: float) -> None:
        """Note the lent and borrowed bytes if they have changed."""
        lent = self._lender.lent_bytes if self._lender else 0
        borrowed = self.borrower.borrowed_bytes if self.borrower else 0
        for history, num_bytes in ((self.lent_bytes, lent), (self.borrowed_bytes, borrowed)):
            if num_bytes != history[-1][1]:
                history.append((now_s, num_bytes))

    def recalls(self) -> dict[str, int]:
        return self._lender.recalls_total if self._lender else {}

    def close(self) -> None:
        if self.borrower is not None:
            self.borrower.close()
        self.wire.close()

    def _wake(self) -> None:
        self.is_woken = True


@dataclass
class VirtualWire:
    """The connections of one coordinator in a simulation, where messages arrive at once and in order.

    The route to a borrower is its name.
    """

    clock: Clock
    wires: dict[str, VirtualWire]
    """The wires of all engines, by name."""
    on_wake: Callable[[], None]
    name: str
    lenders: Sequence[str]
    dropped_total: int = 0
    _inbound: deque[tuple[Route, FromBorrower | FromAdmin]] = field(default_factory=deque)
    _from_lenders: deque[tuple[int, FromLender]] = field(default_factory=deque)
    _processes: list[PeerProcess] = field(default_factory=list)
    _woken: threading.Event = field(default_factory=threading.Event)

    @property
    def has_news(self) -> bool:
        """Whether messages or wakes have come that the coordinator has not seen."""
        return bool(self._inbound or self._from_lenders or self._woken.is_set())

    def now_s(self) -> float:
        return self.clock.now_s

    def wait(self, timeout_s: float) -> bool:
        is_woken = self._woken.is_set()
        if is_woken:
            self._woken.clear()
        return is_woken

    def wake(self) -> None:
        self._woken.set()
        self.on_wake()

    def send(self, route: Route, message: FromLender | ToAdmin) -> None:
        wire = self.wires[route.decode()]
        assert isinstance(message, FromLender), "a simulation has no gateway that asks"
        wire._from_lenders.append((wire.lenders.index(self.name), message))

    def send_to_lender(self, index: int, message: FromBorrower) -> None:
        self.wires[self.lenders[index]]._inbound.append((self.name.encode(), message))

    def received(self) -> list[tuple[Route, FromBorrower | FromAdmin]]:
        messages = list(self._inbound)
        self._inbound.clear()
        return messages

    def received_from_lenders(self) -> list[tuple[int, FromLender]]:
        messages = list(self._from_lenders)
        self._from_lenders.clear()
        return messages

    def lender_name(self, index: int) -> str:
        return self.lenders[index]

    def reconnect(self, index: int) -> None:
        raise AssertionError("no process of a simulation ends")

    def watch_exit(self, process: PeerProcess, on_exit: Callable[[], None]) -> None:
        self._processes.append(process)

    def drop(self, sender: str, error: msgspec.DecodeError | MalformedMessage) -> None:
        raise AssertionError(f"a message of {sender} means nothing: {error}")

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _PoolsOfNobody:
    """Stands for the pools of lenders, which have no bytes in a simulation."""

    def find(self, store_path: str) -> PeerHandle:
        return PeerHandle(pid=0, nbytes=0, store_path=store_path, secret="", memory=None)

    def attach(self, link: int, pool: PeerHandle) -> None:
        """Do nothing: no bytes are copied."""

    def detach(self, link: int) -> None:
        """Do nothing: nothing was attached."""


def _no_steps() -> None:
    """Do nothing: a simulation attaches pools while no step is in progress."""
