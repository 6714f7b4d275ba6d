"""One thread per engine that deals with leases, whatever the engine's own thread is busy with."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from swiftkv._core import Scheduler
from swiftkv.latency import prefer_latency
from swiftkv.lease.messages import (
    BudgetSet,
    FromBorrower,
    FromLender,
    GroupBlocks,
    Histogram,
    LendingSpec,
    LendingState,
    LinkState,
    MalformedMessage,
    SetBudget,
    ShowLending,
)
from swiftkv.lease.wire import Route, Wire

_NOBODY_BORROWS = Histogram([], [], 0, 0.0)


class LenderHalf(Protocol):
    """What an engine that lends does; `swiftkv.worker.lender`. Everything runs in the coordinator's thread."""

    @property
    def budget_bytes(self) -> int: ...
    @property
    def recalls_total(self) -> dict[str, int]: ...
    @property
    def recall_seconds(self) -> Histogram: ...
    def start(self, wire: Wire) -> None: ...
    def on_message(self, route: Route, message: FromBorrower) -> None: ...
    def set_budget(self, route: Route, request: SetBudget) -> None: ...
    def tick(self, now_s: float, woken: bool) -> float:
        """Do what is due; `woken`: the engine said that demand has changed. Returns when to come again."""

    def link_states(self, with_extents: bool) -> list[LinkState]: ...


class BorrowerHalf(Protocol):
    """What an engine that borrows does; `swiftkv.master.borrower`."""

    def start(self, wire: Wire, wake: Callable[[], None]) -> None:
        """`wake` makes the coordinator's thread call `tick`."""

    def on_message(self, lender: int, message: FromLender) -> None: ...
    def tick(self, now_s: float) -> float: ...
    def link_states(self, with_extents: bool) -> list[LinkState]: ...
    def apply_pending(self, finish_steps: Callable[[], None]) -> None:
        """In the engine's thread. Calls `finish_steps` before anything for which no step may be in progress."""

    def give_up(self, links: Sequence[int]) -> threading.Event:
        """In the engine's thread, between steps. Returns what is set when it is done."""

    def close(self) -> None:
        """After the coordinator's thread has ended: wait until nothing calls `wake` any more."""


class Coordinator:
    """Owns the thread and its sockets. An engine lends, borrows, or does both.

    `wake_engine` is called from the thread when the engine has something to do that no request tells it of: it then
    calls `apply_pending()` and, if there is work, `schedule()`.
    """

    def __init__(
        self,
        name: str,
        spec: LendingSpec,
        context: zmq.Context[zmq.Socket[bytes]],
        scheduler: Scheduler,
        pool_bytes: int,
        lender: LenderHalf | None,
        borrower: BorrowerHalf | None,
        wake_engine: Callable[[], None],
    ) -> None:
        assert (lender is None) == (not spec.borrowers)
        assert (borrower is None) == (not spec.lenders)
        self._name = name
        self._scheduler = scheduler
        self._pool_bytes = pool_bytes
        self._lender = lender
        self._borrower = borrower
        self._wake_engine = wake_engine
        self._wire = Wire(context, spec.leases_address, spec.lenders)
        self._lenders = spec.lenders
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wire.watch_fd(self._wakeup)
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """From any thread: a request came that does not fit, or a step was committed while extents are asked back."""
        os.eventfd_write(self._wakeup, 1)

    def apply_pending(self, finish_steps: Callable[[], None]) -> None:
        """In the engine's thread, before each `schedule()` and before it waits for messages.

        Attaches and detaches lenders' pools, after `finish_steps()`, which commits all steps in progress: a lender that
        is back may offer at once what such a step still has of its former life. Raises `RuntimeError` if a defect ended
        the coordinator's thread.
        """
        self._check_thread()
        if self._borrower is not None:
            self._borrower.apply_pending(finish_steps)

    def give_up(self, links: Sequence[int]) -> None:
        """In the engine's thread, after `transport.settle()` and `scheduler.abandon()`: copies over these borrow links
        failed. What was borrowed from their lenders is lost, and the lenders are attached anew in a while.
        """
        assert self._borrower is not None
        done = self._borrower.give_up(links)
        self.wake()
        while not done.wait(0.1):
            self._check_thread()

    def close(self) -> None:
        """End the thread. Leases are left to end with the process."""
        self._closing = True
        self.wake()
        self._thread.join()
        if self._borrower is not None:
            self._borrower.close()
        os.close(self._wakeup)

    def _check_thread(self) -> None:
        if self._ended.is_set():
            raise RuntimeError("the coordinator's thread has ended; its traceback is on standard error")

    def _run(self) -> None:
        prefer_latency()
        try:
            self._serve()
        finally:
            self._wire.close()
            self._ended.set()
            self._wake_engine()

    def _serve(self) -> None:
        if self._lender is not None:
            self._lender.start(self._wire)
        if self._borrower is not None:
            self._borrower.start(self._wire, self.wake)
        due_s = 0.0
        while not self._closing:
            self._wire.wait(due_s - time.monotonic())
            woken = self._was_woken()
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
                    self._wire.drop(f"{self._lenders[lender].name} ({type(answer).__name__})", error)
            now_s = time.monotonic()
            due_s = now_s + 60.0
            if self._lender is not None:
                due_s = min(due_s, self._lender.tick(now_s, woken))
            if self._borrower is not None:
                due_s = min(due_s, self._borrower.tick(now_s))

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._wakeup) > 0
        except BlockingIOError:
            return False

    def _on_inbound(self, route: Route, message: FromBorrower | SetBudget | ShowLending) -> None:
        if isinstance(message, ShowLending):
            self._wire.send(route, self._state(message))
        elif isinstance(message, SetBudget):
            if self._lender is None:
                reason = f"{self._name} lends to nobody"
                self._wire.send(route, BudgetSet(message.request_id, 0, 0, 0, 0.0, refused=reason))
            else:
                self._lender.set_budget(route, message)
        elif self._lender is not None:
            self._lender.on_message(route, message)

    def _state(self, request: ShowLending) -> LendingState:
        lender, borrower = self._lender, self._borrower
        return LendingState(
            request_id=request.request_id,
            name=self._name,
            budget_bytes=lender.budget_bytes if lender else 0,
            pool_bytes=self._pool_bytes,
            lends=lender.link_states(request.with_extents) if lender else [],
            borrows=borrower.link_states(request.with_extents) if borrower else [],
            groups=[
                msgspec.convert(group, GroupBlocks, from_attributes=True) for group in self._scheduler.stats().groups
            ],
            recalls_total=lender.recalls_total if lender else {},
            recall_seconds=lender.recall_seconds if lender else _NOBODY_BORROWS,
            messages_dropped_total=self._wire.dropped_total,
        )
