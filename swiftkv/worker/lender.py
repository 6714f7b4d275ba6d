"""The lender's side of leases: offers, recalls, and the end of a borrower's leases.

Everything here runs in the coordinator's thread. The file has more than 400 lines because it is one class: offers,
recalls, budgets and the deaths of borrowers all change the same tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from swiftkv._core import Scheduler
from swiftkv.errors import TransferError
from swiftkv.lease.messages import (
    Accept,
    Attached,
    BudgetSet,
    Detached,
    FromBorrower,
    Heartbeat,
    Hello,
    LendingSpec,
    LendingState,
    LinkState,
    Offer,
    Recall,
    Return,
    SetBudget,
    Welcome,
    named_leases,
    reported_extents,
)
from swiftkv.lease.process import Identity, PeerProcess
from swiftkv.lease.wire import Route, Wire
from swiftkv.transport.rendezvous import withdraw_pool
from swiftkv.worker.borrowers import BorrowerPeer, LendLink, Phase, borrowers_of, state_of_link
from swiftkv.worker.division import Division
from swiftkv.worker.lend_policy import Demand
from swiftkv.worker.recalls import RecallBatch, Recalls

if TYPE_CHECKING:
    from swiftkv._lease import Int32Array

_HEARTBEAT_S = 1.0
_QUIET_S = 0.1  # time for the driver to stop a dead process's work on a GPU; not measured
_LONGEST_INTERVAL_S = 1.0
_INTERVALS_PER_WINDOW = 20
_END_POLL_S = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _BudgetRequest:
    """A `SetBudget` that waits for extents to come home."""

    route: Route
    request: SetBudget
    begun_s: float
    batch: RecallBatch | None


class Lender:
    """Owns the lender's tables and the budget.

    Each attached borrower has a target: an even part of the budget, limited by the blocks that the policy keeps for the
    engine's own requests. Whenever something has changed, extents are offered up to the target. Extents are recalled
    when the engine's requests are short of blocks, when the budget falls, or when a new borrower is due its part. After
    a recall for the engine's own demand, nothing of that KV group is offered for a window.
    """

    def __init__(
        self,
        me: Identity,
        spec: LendingSpec,
        wire: Wire,
        *,
        scheduler: Scheduler,
        pool_bytes: int,
        serve_link: Callable[[str], threading.Thread | None],
        wake_engine: Callable[[], None],
    ) -> None:
        """`serve_link(store_path)` publishes the pool at that path for one link. It returns the thread that serves the
        link, or `None` if the transport needs none. It runs in the coordinator's thread; on failure it raises
        `TransferError`.
        """
        self._me = me
        self._rendezvous = Path(spec.rendezvous)
        self._window_s = spec.window_s
        self._interval_s = min(spec.window_s / _INTERVALS_PER_WINDOW, _LONGEST_INTERVAL_S)
        self._scheduler = scheduler
        self._pool_bytes = pool_bytes
        self._quiet_s = _QUIET_S if spec.transport == "peer" else 0.0
        self._serve_link = serve_link
        self._wake_engine = wake_engine
        self._wire = wire
        self._peers = {peer.spec.name: peer for peer in borrowers_of(spec)}
        self._links = [link for peer in self._peers.values() for link in peer.links]
        self._peer_at = [peer for peer in self._peers.values() for _ in peer.links]  # by link number
        self._recalls = Recalls([link.geometry.num_extents for link in self._links])
        group_stats = scheduler.stats().groups
        self._division = Division(spec, list(self._peers.values()), [group.total for group in group_stats])
        self._no_offer_before_s = [0.0] * len(group_stats)
        self._demand_due_s = 0.0
        self._waiting: list[_BudgetRequest] = []
        self.budget_bytes = min(spec.budget_bytes, pool_bytes)
        self.lent_total_bytes = 0  # includes offers that were not accepted
        self.taken_back_total_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """The bytes of all extents that are not home."""
        return sum(link.away_bytes for link in self._links)

    @property
    def recalls_total(self) -> dict[str, int]:
        """The number of recalls so far, by reason."""
        return dict(self._recalls.total)

    def tick(self, now_s: float, woken: bool) -> float:
        if woken or now_s >= self._demand_due_s:
            self._look_at_demand(now_s)
        for peer in self._peers.values():
            self._end_leases(peer, now_s)
            self._ask_for_life(peer, now_s)
        self._offer(now_s)
        self._answer_budget_requests(now_s)
        return min(
            self._demand_due_s,
            min((peer.heartbeat_due_s for peer in self._peers.values() if peer.is_attached), default=float("inf")),
            now_s + _END_POLL_S if any(peer.is_ending for peer in self._peers.values()) else float("inf"),
        )

    def describe(self, state: LendingState, with_extents: bool) -> LendingState:
        now_s = self._wire.now_s()
        return msgspec.structs.replace(
            state,
            budget_bytes=self.budget_bytes,
            lends=[self._link_state(link, now_s, with_extents) for link in self._links],
            recalls_total=self.recalls_total,
            recall_seconds=self._recalls.seconds,
        )

    def _link_state(self, link: LendLink, now_s: float, with_extents: bool) -> LinkState:
        no_offer_before_s = self._no_offer_before_s[link.geometry.lender_group]
        peer = self._peer_at[link.number]
        return state_of_link(peer, link, now_s=now_s, no_offer_before_s=no_offer_before_s, with_extents=with_extents)

    # Messages of borrowers.

    def on_message(self, sender: Route, message: FromBorrower | SetBudget) -> None:
        now_s = self._wire.now_s()
        if isinstance(message, SetBudget):
            self._set_budget(sender, message, now_s)
            return
        if isinstance(message, Hello):
            self._on_hello(sender, message)
            return
        peer = self._peer_of(message)
        if peer is None:
            return
        peer.heard_s = now_s
        match message:
            case Attached(attempt=attempt):
                if peer.welcome is not None and attempt == peer.welcome.attempt and not peer.is_attached:
                    peer.phase = Phase.ATTACHED
                    peer.heartbeat_due_s = now_s
                    _log.info("%s is attached", peer.spec.name)
                    self._make_room_for_all(now_s)
            case Detached():
                _log.warning("%s cannot reach the pool; its leases end", peer.spec.name)
                peer.phase = Phase.DETACHED
            case Accept():
                extents, epochs = named_leases(message, peer.spec.links)
                peer.links[message.link].ledger.on_accept(extents, epochs)
            case Return():
                extents, epochs = named_leases(message, peer.spec.links)
                link = peer.links[message.link]
                self._take_home(link, link.ledger.on_return(extents, epochs), now_s)
            case Heartbeat():
                peer.reported = reported_extents(message, peer.spec.links)
                peer.is_asked = False

    def _peer_of(self, message: Attached | Detached | Accept | Return | Heartbeat) -> BorrowerPeer | None:
        """Return the borrower that sent a message; `None` if it is unknown, or its leases are ending."""
        if message.receiver != self._me.incarnation:
            return None
        there = (peer for peer in self._peers.values() if peer.is_there)
        return next((peer for peer in there if peer.incarnation == message.sender), None)

    def _on_hello(self, route: Route, hello: Hello) -> None:
        peer = self._peers.get(hello.borrower)
        if peer is None or hello.links != [link.geometry for link in peer.links]:
            reason = f"{self._me.name} is not configured to lend to {hello.borrower} over these links"
            self._wire.send(route, self._welcome(hello, [], reason))
            return
        is_known = peer.phase is not Phase.NOT_THERE
        if is_known and peer.incarnation != hello.sender:
            return  # the previous process may still write; this one asks again
        if not is_known:
            try:
                processes = PeerProcess.find_all([(hello.pid, hello.start_ticks), *hello.others])
            except OSError as error:
                peer.route = route
                self._refuse(peer, hello, f"its process cannot be watched: {error}")
                return
            if not processes:
                return
            peer.phase = Phase.KNOWN
            peer.incarnation = hello.sender
            peer.welcome = None
            peer.num_running = len(processes)
            for process in processes:
                self._wire.watch_exit(process, lambda: self._on_exit(peer))
        if peer.is_ending:
            return
        peer.route = route
        peer.heard_s = self._wire.now_s()
        if peer.welcome is None or peer.welcome.attempt < hello.attempt:
            peer.phase = Phase.KNOWN
            peer.is_asked = False
            store_paths: list[str] = []
            try:
                for link in peer.links:
                    store_paths.append(self._publish(peer, hello, link))  # noqa: PERF401  (those before one that fails)
            except TransferError as error:
                for store_path in store_paths:
                    withdraw_pool(Path(store_path))
                self._refuse(peer, hello, str(error))
                return
            peer.refusal = None
            peer.welcome = self._welcome(hello, store_paths)
        self._wire.send(route, peer.welcome)

    def _refuse(self, peer: BorrowerPeer, hello: Hello, reason: str) -> None:
        """Tell a borrower why nothing can be lent to it. It asks again later, and then gets new paths."""
        if reason != peer.refusal:
            _log.warning("cannot lend to %s: %s", peer.spec.name, reason)
        peer.refusal = reason
        self._wire.send(peer.route, self._welcome(hello, [], reason))

    def _welcome(self, hello: Hello, store_paths: list[str], refused: str | None = None) -> Welcome:
        me = self._me
        return Welcome(
            sender=me.incarnation,
            receiver=hello.sender,
            attempt=hello.attempt,
            pid=me.pid,
            start_ticks=me.start_ticks,
            store_paths=store_paths,
            refused=refused,
        )

    def _publish(self, peer: BorrowerPeer, hello: Hello, link: LendLink) -> str:
        name = f"{self._me.incarnation:016x}-{hello.sender:016x}-{hello.attempt}-{link.index}"
        store_path = str(self._rendezvous / name)
        server = self._serve_link(store_path)
        if server is not None:
            peer.servers.append(server)
        return store_path

    # The end of a borrower's leases.

    def _on_exit(self, peer: BorrowerPeer) -> None:
        """Note the end of one of a borrower's processes. While another runs, its copies may still arrive."""
        peer.num_running -= 1
        if peer.num_running:
            return
        _log.warning("%s has ended; its leases end, too", peer.spec.name)
        peer.phase = Phase.GONE
        peer.quiet_s = self._wire.now_s() + self._quiet_s

    def _end_leases(self, peer: BorrowerPeer, now_s: float) -> None:
        """End the leases of a borrower that is gone or has detached, once no thread that serves it may still write."""
        peer.servers = [server for server in peer.servers if server.is_alive()]
        if not peer.is_ending or peer.servers or now_s < peer.quiet_s:
            return
        peer.phase = Phase.NOT_THERE if peer.phase is Phase.GONE else Phase.KNOWN
        for link in peer.links:
            self._take_home(link, link.ledger.peer_died(), now_s)

    def _ask_for_life(self, peer: BorrowerPeer, now_s: float) -> None:
        """Send a heartbeat, unless the last is unanswered, so that none pile up for a stopped borrower."""
        if peer.is_attached and now_s >= peer.heartbeat_due_s:
            peer.heartbeat_due_s = now_s + _HEARTBEAT_S
            if not peer.is_asked:
                peer.is_asked = True
                beat = Heartbeat(self._me.incarnation, peer.incarnation, [link.away for link in peer.links])
                self._wire.send(peer.route, beat)

    # Demand.

    def _look_at_demand(self, now_s: float) -> None:
        self._demand_due_s = now_s + self._interval_s
        demands = self._scheduler.take_demand()
        for group, seen in enumerate(demands):
            self._division.observe(now_s, group, Demand(seen.total_peak, seen.longest, seen.total_now, seen.shortfall))
            if seen.shortfall > 0:
                self._no_offer_before_s[group] = now_s + self._window_s
                self._recall("demand", self._division.short_of(group, seen.shortfall), now_s)

    # Budget.

    def _set_budget(self, route: Route, request: SetBudget, now_s: float) -> None:
        refused = self._why_not(request.budget_bytes)
        if refused is not None:
            self._wire.send(route, self._budget_set(request, 0, 0.0, refused))
            return
        counts = self._division.over_budget(request.budget_bytes)
        if request.dry_run:
            num_bytes = sum(n * self._links[number].geometry.extent_bytes for number, n in counts.items())
            self._wire.send(route, self._budget_set(request, num_bytes, 0.0))
            return
        if request.budget_bytes > self.budget_bytes:  # lend the addition at once, in spite of recent recalls
            self._no_offer_before_s = [0.0] * len(self._no_offer_before_s)
        self.budget_bytes = request.budget_bytes
        batch = self._recall("budget", counts, now_s)
        self._waiting.append(_BudgetRequest(route, request, now_s, batch))

    def _why_not(self, budget_bytes: int) -> str | None:
        if budget_bytes < 0:
            return f"a budget of {budget_bytes} bytes is negative"
        if budget_bytes > self._pool_bytes:
            return (
                f"a budget of {budget_bytes} bytes is more than the pool of {self._me.name} ({self._pool_bytes} bytes)"
            )
        return None

    def _budget_set(
        self, request: SetBudget, recalled_bytes: int, took_s: float, refused: str | None = None
    ) -> BudgetSet:
        budget_bytes = self.budget_bytes if refused else request.budget_bytes
        return BudgetSet(
            request.request_id,
            budget_bytes=budget_bytes,
            lent_bytes=self.lent_bytes,
            recalled_bytes=recalled_bytes,
            took_s=took_s,
            refused=refused,
        )

    def _answer_budget_requests(self, now_s: float) -> None:
        """Answer each request when the extents recalled for it are home.

        The last request's budget is in force. It is answered only when no more than that budget is lent.
        """
        waiting = []
        for i, entry in enumerate(self._waiting):
            is_in_force = i == len(self._waiting) - 1
            owed = entry.batch.missing if entry.batch else 0
            if owed or (is_in_force and self.lent_bytes > self.budget_bytes):
                waiting.append(entry)
                continue
            num_bytes = entry.batch.num_bytes if entry.batch else 0
            self._wire.send(entry.route, self._budget_set(entry.request, num_bytes, now_s - entry.begun_s))
        self._waiting = waiting

    # Offers and recalls.

    def _make_room_for_all(self, now_s: float) -> None:
        """Recall extents from the other borrowers so that a new one can get its part."""
        targets = self._division.lendable_targets(self.budget_bytes, now_s)
        self._recall("share", {link.number: link.asked_for - targets[link.number] for link in self._links}, now_s)

    def _offer(self, now_s: float) -> None:
        targets = self._division.lendable_targets(self.budget_bytes, now_s)
        room_bytes = self.budget_bytes - self.lent_bytes
        for group in range(len(self._no_offer_before_s)):
            if now_s < self._no_offer_before_s[group]:
                continue
            links = self._division.links_of(group)
            blocks = self._division.lendable_blocks(group, now_s) - sum(
                link.away * link.geometry.meu_w for link in links
            )
            for link in links:
                geometry = link.geometry
                count = min(
                    targets[link.number] - link.away, blocks // geometry.meu_w, room_bytes // geometry.extent_bytes
                )
                if count > 0:
                    count = self._offer_over(link, count)
                    blocks -= count * geometry.meu_w
                    room_bytes -= count * geometry.extent_bytes

    def _offer_over(self, link: LendLink, count: int) -> int:
        """Offer up to `count` extents over a link; return how many there were to offer."""
        extents = self._scheduler.lend(link.number, count)
        if len(extents):
            peer = self._peer_at[link.number]
            epochs = link.ledger.offer(extents)
            self.lent_total_bytes += len(extents) * link.geometry.extent_bytes
            self._wire.send(peer.route, Offer.of(extents, epochs, **self._names(peer, link)))
            self._wake_engine()  # even an idle engine must report that its blocks have changed
        return len(extents)

    def _recall(self, reason: str, counts: dict[int, int], now_s: float) -> RecallBatch | None:
        """Recall `counts[number]` extents of each link; return `None` if there are none to recall."""
        counts = {number: count for number, count in counts.items() if count > 0}
        if not counts:
            return None
        serial, batch = self._recalls.begin(reason, now_s)
        for number, count in counts.items():
            link = self._links[number]
            peer = self._peer_at[link.number]
            extents, epochs = link.ledger.recall(count)
            self._recalls.add(serial, number, extents, link.geometry.extent_bytes)
            self._wire.send(peer.route, Recall.of(extents, epochs, **self._names(peer, link)))
        return batch

    def _names(self, peer: BorrowerPeer, link: LendLink) -> dict[str, int]:
        return {"sender": self._me.incarnation, "receiver": peer.incarnation, "link": link.index}

    def _take_home(self, link: LendLink, extents: Int32Array, now_s: float) -> None:
        if len(extents):
            self._scheduler.take_back(link.number, extents)
            self.taken_back_total_bytes += len(extents) * link.geometry.extent_bytes
            self._recalls.came_home(link.number, extents, now_s)
            self._wake_engine()
