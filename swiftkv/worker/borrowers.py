"""The borrowers of a lender, and the links to each, as the lender sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from swiftkv._lease import LenderLedger
from swiftkv.lease.messages import LENDER_STATES, LendingSpec, LinkGeometry, LinkState, PeerSpec, Welcome
from swiftkv.lease.process import PeerProcess
from swiftkv.lease.wire import Route


@dataclass(frozen=True, slots=True)
class LendLink:
    """A KV group of the lender, paired with one of a borrower's."""

    number: int  # index in the lender's links
    index: int  # index in the links with this borrower
    geometry: LinkGeometry
    ledger: LenderLedger
    share: Fraction  # this link's part of the memory that its borrower gets

    @property
    def asked_for(self) -> int:
        """The extents that are neither home nor on their way home."""
        return self.ledger.offered + self.ledger.lent

    @property
    def away(self) -> int:
        """The extents that are not home."""
        return self.asked_for + self.ledger.recalled

    @property
    def away_bytes(self) -> int:
        return self.away * self.geometry.extent_bytes


@dataclass(slots=True)
class BorrowerPeer:
    """A borrower, running or not. `process` is set from its Hello until it has died and its leases have ended."""

    spec: PeerSpec
    links: list[LendLink]
    process: PeerProcess | None = None
    incarnation: int = 0
    route: Route = b""
    welcome: Welcome | None = None
    refusal: str | None = None  # why the pool could not be published; the borrower's next Hello tries again
    is_attached: bool = False
    is_ending: bool = False  # its leases are about to end: they do once no thread serves it
    num_running: int = 0  # how many of its processes run, since its Hello
    is_gone: bool = False  # its leases are ending because its last process has ended
    quiet_s: float = 0.0  # monotonic: stores that it launched may still arrive until then
    servers: list[threading.Thread] = field(default_factory=list)
    heard_s: float = 0.0
    heartbeat_due_s: float = 0.0
    is_asked: bool = False  # whether the last heartbeat is unanswered
    reported: list[int] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.is_ending:
            return "its last transfers are ending"
        if self.process is None:
            return "not there"
        if self.is_attached:
            return "attached"
        return self.refusal or "not attached"


def borrowers_of(spec: LendingSpec) -> Iterator[BorrowerPeer]:
    """Yield the borrowers that a lender is configured for; none of them runs yet."""
    number = 0
    for peer in spec.borrowers:
        # A sequence needs room in each of the borrower's KV groups, so the memory of a lender's group is divided among
        # them as the borrower divides its own pool. `planning.lending` does the same.
        weights = [Fraction(link.num_extents * link.extent_bytes * link.borrower_group_bytes) for link in peer.links]
        links = []
        for index, (geometry, weight) in enumerate(zip(peer.links, weights, strict=True)):
            share = weight / sum(weights)
            links.append(LendLink(number, index, geometry, LenderLedger(geometry.num_extents), share))
            number += 1
        yield BorrowerPeer(peer, links)


def link_state(
    peer: BorrowerPeer, link: LendLink, *, now_s: float, no_offer_before_s: float, with_extents: bool
) -> LinkState:
    """Return a link's state as the lender knows it. `no_offer_before_s`: when its KV group may be offered again."""
    ledger = link.ledger
    states, epochs = ledger.table() if with_extents else (None, None)
    is_there = peer.process is not None and not peer.is_ending
    return LinkState(
        peer=peer.spec.name,
        peer_state=peer.state,
        geometry=link.geometry,
        counts={state: getattr(ledger, state) for state in LENDER_STATES},
        num_bytes=link.away_bytes,
        heard_s_ago=now_s - peer.heard_s if is_there else None,
        peer_extents=peer.reported[link.index] if is_there and peer.reported else None,
        states=None if states is None else states.tobytes(),
        epochs=None if epochs is None else epochs.tobytes(),
        no_offer_s=no_offer_before_s - now_s if no_offer_before_s > now_s else None,
    )
