"""The thread of an engine that handles leases while the engine's own thread is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from swiftkv._core import Scheduler
from swiftkv.latency import prefer_latency
from swiftkv.lease.messages import (
    BudgetSet,
    FromBorrower,
    FromLender,
    GroupBlocks,
    LendingState,
    MalformedMessage,
    SetBudget,
    ShowLending,
)
from swiftkv.lease.wire import Route, Wire

_LONGEST_REST_S = 60.0
_CHECK_INTERVAL_S = 0.1

Sender = TypeVar("Sender", contravariant=True)
Message = TypeVar("Message", contravariant=True)


class Role(Protocol[Sender, Message]):
    """One side of an engine's leases: `worker.lender.Lender` or `master.borrower.Borrower`.

    All of this runs in the coordinator's thread.
    """

    def on_message(self, sender: Sender, message: Message) -> None:
        """Take a message of the other side.

        Raises `MalformedMessage`, with nothing changed, if it names something that does not exist.
        """

    def tick(self, now_s: float, woken: bool) -> float:
        """Do what is due, and return the time of the next call. `woken`: another thread has called `Wire.wake`."""

    def describe(self, state: LendingState, with_extents: bool) -> LendingState:
        """Return `state` with this side's part filled in."""


class Coordinator:
    """The thread of an engine that lends, borrows, or does both; it reads `wire` and calls the engine's roles."""

    def __init__(
        self,
        name: str,
        wire: Wire,
        scheduler: Scheduler,
        *,
        pool_bytes: int,
        lender: Role[Route, FromBorrower | SetBudget] | None,
        borrower: Role[int, FromLender] | None,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called in the thread when it ends, even if a defect ended it: see `check`."""
        self._name = name
        self._wire = wire
        self._scheduler = scheduler
        self._pool_bytes = pool_bytes
        self._lender = lender
        self._borrower = borrower
        self._roles: tuple[Role[Route, FromBorrower | SetBudget] | Role[int, FromLender], ...] = tuple(
            role for role in (lender, borrower) if role is not None
        )
        self._on_end = on_end
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise `RuntimeError` if a defect ended the thread. Call from any other thread."""
        if self._ended.is_set():
            raise RuntimeError("the coordinator's thread has ended; its traceback is on standard error")

    def wait_for(self, done: threading.Event) -> None:
        """Block until the thread has set `done`. Raises `RuntimeError` if a defect ended it."""
        while not done.wait(_CHECK_INTERVAL_S):
            self.check()

    def close(self) -> None:
        """End the thread. Leases end with the process."""
        self._closing = True
        self._wire.wake()
        self._thread.join()

    def _run(self) -> None:
        prefer_latency()
        try:
            self._serve()
        finally:
            self._ended.set()
            self._on_end()

    def _serve(self) -> None:
        due_s = 0.0
        while not self._closing:
            due_s = self.serve_once(self._wire.wait(due_s - self._wire.now_s()))

    def serve_once(self, woken: bool) -> float:
        """Handle all messages and all due work, and return the time of the next call. Simulations call it directly."""
        for route, message in self._wire.received():
            try:
                self._on_inbound(route, message)
            except MalformedMessage as error:
                self._wire.drop(f"a borrower ({type(message).__name__})", error)
        for lender, answer in self._wire.received_from_lenders():
            assert self._borrower is not None
            try:
                self._borrower.on_message(lender, answer)
            except MalformedMessage as error:
                self._wire.drop(f"{self._wire.lender_name(lender)} ({type(answer).__name__})", error)
        now_s = self._wire.now_s()
        due_s = min((role.tick(now_s, woken) for role in self._roles), default=now_s + _LONGEST_REST_S)
        return min(due_s, now_s + _LONGEST_REST_S)

    def _on_inbound(self, route: Route, message: FromBorrower | SetBudget | ShowLending) -> None:
        if isinstance(message, ShowLending):
            self._wire.send(route, self._state(message))
        elif self._lender is not None:
            self._lender.on_message(route, message)
        elif isinstance(message, SetBudget):
            reason = f"{self._name} does not lend"
            answer = BudgetSet(
                message.request_id, budget_bytes=0, lent_bytes=0, recalled_bytes=0, took_s=0.0, refused=reason
            )
            self._wire.send(route, answer)

    def _state(self, request: ShowLending) -> LendingState:
        state = LendingState(
            request_id=request.request_id,
            name=self._name,
            pool_bytes=self._pool_bytes,
            groups=[
                msgspec.convert(group, GroupBlocks, from_attributes=True) for group in self._scheduler.stats().groups
            ],
            messages_dropped_total=self._wire.dropped_total,
        )
        for role in self._roles:
            state = role.describe(state, request.with_extents)
        return state
