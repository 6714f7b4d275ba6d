"""The borrower's side of leases: accepts extents, gives back those that are recalled, and copes with dead lenders.

It runs in the coordinator's thread, with two exceptions. The engine's thread calls `apply_pending` and `give_up`.
`PeerPools.find` may have to wait for a lender, so it runs in threads of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from swiftkv._core import Scheduler
from swiftkv.errors import TransferError
from swiftkv.lease.messages import (
    Accept,
    Attached,
    Detached,
    FromLender,
    Heartbeat,
    Hello,
    LendingSpec,
    LendingState,
    MalformedMessage,
    Recall,
    Return,
    Welcome,
    named_leases,
    reported_extents,
)
from swiftkv.lease.process import Identity, PeerProcess
from swiftkv.lease.wire import Wire
from swiftkv.master.lenders import Asking, Attaching, BorrowLink, InUse, LenderPeer, lenders_of, state_of_link
from swiftkv.transport.base import PeerHandle
from swiftkv.transport.rendezvous import withdraw_pool

if TYPE_CHECKING:
    from swiftkv._lease import Int32Array, UInt32Array

_HELLO_RETRY_S = 0.2
_ATTACH_RETRY_S = 1.0
_DRAIN_POLL_S = 0.002  # short: planning a step already drains blocks, long before the step is over

_log = logging.getLogger(__name__)


class PeerPools(Protocol):
    """Finds, attaches and detaches the pools of lenders. `find` and `attach` raise `TransferError` if they fail."""

    def find(self, store_path: str) -> PeerHandle:
        """Return the pool that a lender publishes at `store_path`. Called in a thread of its own; may wait."""

    def attach(self, link: int, pool: PeerHandle) -> None:
        """Map a pool, without waiting; called in the engine's thread."""

    def detach(self, link: int) -> None:
        """Detach a pool, if one is attached; called in the engine's thread."""


@dataclass(frozen=True, slots=True)
class _Attachment:
    """An attempt to attach one lender, with the path of its pool for each link and, once found, the pools."""

    lender: int
    attempt: int
    store_paths: list[str]
    found: Future[list[PeerHandle]]


class Borrower:
    """Owns the replicas of the lenders' tables, and tells the scheduler which extents it may use.

    A pool is attached in three stages:

    1. A thread of `_finders` finds the pool, so that a stopped lender delays no other. `_searches` has these searches.
    2. The engine's thread attaches the pool, between two steps. It takes the order from `_orders`.
    3. The coordinator's thread takes the outcome from `_outcomes`, and tells the lender.
    """

    def __init__(
        self,
        me: Identity,
        spec: LendingSpec,
        wire: Wire,
        *,
        scheduler: Scheduler,
        pools: PeerPools,
        wake_engine: Callable[[], None],
    ) -> None:
        self._me = me
        self._rendezvous = Path(spec.rendezvous)
        self._scheduler = scheduler
        self._pools = pools
        self._wake_engine = wake_engine
        self._wire = wire
        self._peers = lenders_of(spec)
        self._links = [link for peer in self._peers for link in peer.links]
        self._peer_at = [peer for peer in self._peers for _ in peer.links]  # by link number
        # Two threads for each lender: one may still be waiting for a previous process that died during its attachment.
        self._finders = ThreadPoolExecutor(2 * len(self._peers), "attach")
        self._searches: list[_Attachment] = []
        self._orders: deque[_Attachment | int] = deque()  # to attach; or the index of a lender to detach
        self._outcomes: deque[tuple[_Attachment, str | None]] = deque()  # None: attached; otherwise the failure
        self._given_up: deque[tuple[Sequence[int], threading.Event]] = deque()
        self._is_draining = False
        self.borrowed_total_bytes = 0
        self.given_back_total_bytes = 0  # including lost extents

    def close(self) -> None:
        """Wait until no thread calls `Wire.wake` any more; call after the coordinator's thread has ended."""
        self._finders.shutdown()

    @property
    def borrowed_bytes(self) -> int:
        """The bytes of all borrowed extents, including those that are being given back."""
        return sum(link.borrowed * link.geometry.extent_bytes for link in self._links)

    @property
    def is_attached(self) -> bool:
        """Whether the pools of all lenders are attached."""
        return all(peer.is_attached for peer in self._peers)

    # In the engine's thread.

    def apply_pending(self, finish_steps: Callable[[], None]) -> None:
        """Attach and detach lenders' pools, before each `schedule()` and before the engine waits for messages.

        `finish_steps` commits all steps in progress. It is called first, because a restarted lender may at once offer
        extents that such a step still uses.
        """
        if self._orders:
            finish_steps()
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, int):
                self._detach_all(self._peers[order])
            else:
                self._outcomes.append((order, self._try_to_attach(order)))
                self._wire.wake()
        if self._is_draining:  # the step before may have drained extents
            self._wire.wake()

    def give_up(self, links: Sequence[int]) -> threading.Event:
        """Detach the lenders of these links, because copies over them failed. Return an event that is set at the end.

        Call it after `transport.settle()` and `scheduler.abandon()`. The blocks borrowed from these lenders are lost,
        and the lenders are attached again a little later.
        """
        for peer in {self._peer_at[link].index: self._peer_at[link] for link in links}.values():
            self._detach_all(peer)
        done = threading.Event()
        self._given_up.append((links, done))
        self._wire.wake()
        return done

    def _try_to_attach(self, order: _Attachment) -> str | None:
        peer = self._peers[order.lender]
        try:
            for link, pool in zip(peer.links, order.found.result(), strict=True):
                self._pools.attach(link.number, pool)
        except TransferError as error:
            self._detach_all(peer)
            return str(error)
        return None

    def _detach_all(self, peer: LenderPeer) -> None:
        for link in peer.links:
            self._pools.detach(link.number)

    # In the coordinator's thread.

    def tick(self, now_s: float, woken: bool) -> float:
        while self._given_up:
            links, done = self._given_up.popleft()
            for index in {self._peer_at[link].index for link in links}:
                self._let_go(self._peers[index], now_s)
            done.set()
        for search in [search for search in self._searches if search.found.done()]:
            self._searches.remove(search)
            self._on_found(search, now_s)
        while self._outcomes:
            self._on_outcome(*self._outcomes.popleft(), now_s)
        for peer in self._peers:
            if isinstance(peer.phase, Asking) and now_s >= peer.phase.hello_due_s:
                peer.phase.hello_due_s = now_s + _HELLO_RETRY_S
                self._say_hello(peer)
        if self._is_draining:
            for link in self._links:
                self._give_back_drained(link)
            self._is_draining = any(link.ledger.recalled for link in self._links)
        if self._is_draining:
            return now_s + _DRAIN_POLL_S
        phases = (peer.phase for peer in self._peers)
        return min((phase.hello_due_s for phase in phases if isinstance(phase, Asking)), default=float("inf"))

    def describe(self, state: LendingState, with_extents: bool) -> LendingState:
        now_s = self._wire.now_s()
        links = [
            state_of_link(peer, link, now_s=now_s, with_extents=with_extents)
            for peer in self._peers
            for link in peer.links
        ]
        return msgspec.structs.replace(state, borrows=links)

    def on_message(self, sender: int, message: FromLender) -> None:
        """Take a message; `sender` is the index of the lender."""
        if message.receiver != self._me.incarnation:
            return
        peer = self._peers[sender]
        if isinstance(message, Welcome):
            self._on_welcome(peer, message)
            return
        if peer.process is None or message.sender != peer.incarnation:
            return
        peer.heard_s = self._wire.now_s()
        if isinstance(message, Heartbeat):
            peer.reported = reported_extents(message, peer.spec.links)
            borrowed = [link.borrowed for link in peer.links]
            self._wire.send_to_lender(sender, Heartbeat(self._me.incarnation, peer.incarnation, borrowed))
            return
        extents, epochs = named_leases(message, peer.spec.links)
        link = peer.links[message.link]
        if isinstance(message, Recall):
            self._on_recall(peer, link, extents, epochs)
        else:
            self._on_offer(peer, link, extents, epochs)

    def _say_hello(self, peer: LenderPeer) -> None:
        me = self._me
        hello = Hello(
            borrower=me.name,
            sender=me.incarnation,
            attempt=peer.attempt,
            pid=me.pid,
            start_ticks=me.start_ticks,
            links=peer.spec.links,
            others=list(me.others),
        )
        self._wire.send_to_lender(peer.index, hello)

    def _on_welcome(self, peer: LenderPeer, welcome: Welcome) -> None:
        if not isinstance(peer.phase, Asking) or welcome.attempt != peer.attempt:
            return
        if welcome.refused is not None:
            self._try_later(peer, welcome.refused)
            return
        if len(welcome.store_paths) != len(peer.links):
            raise MalformedMessage(f"it names {len(welcome.store_paths)} pools for {len(peer.links)} links")
        if any(Path(path).parent != self._rendezvous for path in welcome.store_paths):
            raise MalformedMessage(f"it names a pool outside of {self._rendezvous}: {welcome.store_paths}")
        if peer.process is not None and peer.incarnation != welcome.sender:
            return  # the end of the previous process must be handled first
        if peer.process is None:
            try:
                peer.process = PeerProcess.find(welcome.pid, welcome.start_ticks)
            except OSError as error:
                self._try_later(peer, f"its process cannot be watched: {error}")
                return
            if peer.process is None:
                return
            self._wire.watch_exit(peer.process, lambda: self._on_exit(peer))
        peer.incarnation = welcome.sender
        peer.heard_s = self._wire.now_s()
        peer.phase = Attaching()
        found = self._finders.submit(self._find_all, welcome.store_paths)
        self._searches.append(_Attachment(peer.index, peer.attempt, welcome.store_paths, found))
        found.add_done_callback(lambda _: self._wire.wake())

    def _try_later(self, peer: LenderPeer, reason: str) -> None:
        if reason != peer.state:
            _log.warning("%s lends nothing: %s", peer.spec.name, reason)
        peer.ask_anew(reason, self._wire.now_s() + _ATTACH_RETRY_S)

    def _find_all(self, store_paths: Sequence[str]) -> list[PeerHandle]:
        return [self._pools.find(path) for path in store_paths]

    def _on_found(self, search: _Attachment, now_s: float) -> None:
        error = search.found.exception()
        if isinstance(error, TransferError):
            self._on_outcome(search, str(error), now_s)
        elif error is not None:
            raise error
        elif self._is_current(search):
            self._orders.append(search)
            self._wake_engine()
        else:
            self._on_outcome(search, "the lender has ended", now_s)

    def _is_current(self, attachment: _Attachment) -> bool:
        peer = self._peers[attachment.lender]
        return not isinstance(peer.phase, Asking) and attachment.attempt == peer.attempt

    def _on_outcome(self, attachment: _Attachment, failure: str | None, now_s: float) -> None:
        peer = self._peers[attachment.lender]
        if failure is not None:
            for store_path in attachment.store_paths:  # the next attempt uses other paths
                withdraw_pool(Path(store_path))
        if not self._is_current(attachment):
            return
        if failure is not None:
            _log.warning("cannot attach to the pool of %s: %s", peer.spec.name, failure)
            peer.ask_anew(failure, now_s + _ATTACH_RETRY_S)
            return
        peer.phase = InUse()
        _log.info("attached to the pool of %s", peer.spec.name)
        self._wire.send_to_lender(peer.index, Attached(self._me.incarnation, peer.incarnation, peer.attempt))

    def _on_exit(self, peer: LenderPeer) -> None:
        """Give up the extents of a dead lender. The engine detaches its pool once no step needs it."""
        if any(link.ledger.held + link.ledger.recalled for link in peer.links):
            _log.warning("%s has ended; the blocks that it lent are lost", peer.spec.name)
        for link in peer.links:
            self._scheduler.lose(link.number)
            self._count_given_back(link, link.ledger.lender_died())
        self._orders.append(peer.index)
        self._wake_engine()
        self._wire.reconnect(peer.index)
        peer.ask_anew("not there", hello_due_s=0.0)
        peer.process = None
        peer.reported = []

    def _let_go(self, peer: LenderPeer, now_s: float) -> None:
        """Give everything back to a lender whose pool is detached. No copy of this engine may be in flight."""
        if not peer.is_attached:
            return
        for link in peer.links:
            self._scheduler.lose(link.number)
            lost = np.flatnonzero(link.ledger.table()[0]).astype(np.int32)
            link.ledger.give_back(lost)
            self._count_given_back(link, lost)
        self._wire.send_to_lender(peer.index, Detached(self._me.incarnation, peer.incarnation))
        peer.ask_anew("a transfer failed", now_s + _ATTACH_RETRY_S)

    def _on_offer(self, peer: LenderPeer, link: BorrowLink, extents: Int32Array, epochs: UInt32Array) -> None:
        taken, accepted, accepted_epochs = link.ledger.on_offer(extents, epochs)
        if not peer.is_attached:  # the lender made the offer before it knew
            self._return(peer, link, taken, link.ledger.give_back(taken))
            return
        if len(taken):
            self._scheduler.borrow(link.number, taken)
            self.borrowed_total_bytes += len(taken) * link.geometry.extent_bytes
            self._wake_engine()
        if len(accepted):
            self._wire.send_to_lender(peer.index, Accept.of(accepted, accepted_epochs, **self._names(peer, link)))

    def _on_recall(self, peer: LenderPeer, link: BorrowLink, extents: Int32Array, epochs: UInt32Array) -> None:
        to_drain, returned, returned_epochs = link.ledger.on_recall(extents, epochs)
        self._return(peer, link, returned, returned_epochs)
        if len(to_drain):
            self._scheduler.recall(link.number, to_drain)
            self._give_back_drained(link)
            if link.ledger.recalled:
                self._is_draining = True
                self._wake_engine()

    def _give_back_drained(self, link: BorrowLink) -> None:
        drained = self._scheduler.take_returned(link.number)
        if len(drained):
            self._return(self._peer_at[link.number], link, drained, link.ledger.give_back(drained))
            self._count_given_back(link, drained)

    def _count_given_back(self, link: BorrowLink, extents: Int32Array) -> None:
        self.given_back_total_bytes += len(extents) * link.geometry.extent_bytes

    def _return(self, peer: LenderPeer, link: BorrowLink, extents: Int32Array, epochs: UInt32Array) -> None:
        if len(extents):
            self._wire.send_to_lender(peer.index, Return.of(extents, epochs, **self._names(peer, link)))

    def _names(self, peer: LenderPeer, link: BorrowLink) -> dict[str, int]:
        return {"sender": self._me.incarnation, "receiver": peer.incarnation, "link": link.index}
