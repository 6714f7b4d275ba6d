"""The borrowers of a lender, and the links to each, as the lender sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction

from swiftkv._lease import LenderLedger
from swiftkv.lease.messages import (
    LENDER_STATES,
    LendingSpec,
    LinkGeometry,
    LinkState,
    PeerSpec,
    Welcome,
    link_state,
)
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


class Phase(Enum):
    """The stages of a borrower, from its Hello to the end of its leases."""

    NOT_THERE = auto()  # no process of it is known
    KNOWN = auto()  # its process said Hello, and has not attached the pool
    ATTACHED = auto()  # it may hold leases
    DETACHED = auto()  # it has detached; its leases end once no thread serves it
    GONE = auto()  # its last process has ended; its leases end once no thread serves it and its copies have arrived


@dataclass(slots=True)
class BorrowerPeer:
    """A borrower, running or not. A process of it is known from its Hello until it has died and its leases have ended.

    Once it is not there any more, the other fields keep what was last known of it.
    """

    spec: PeerSpec
    links: list[LendLink]
    phase: Phase = Phase.NOT_THERE
    incarnation: int = 0
    route: Route = b""
    welcome: Welcome | None = None  # the last one that was sent to this process
    refusal: str | None = None  # why nothing can be lent to it; its next Hello tries again
    num_running: int = 0  # how many of its processes run, since its Hello
    quiet_s: float = 0.0  # monotonic: stores that it launched may still arrive until then
    servers: list[threading.Thread] = field(default_factory=list)
    heard_s: float = 0.0
    heartbeat_due_s: float = 0.0
    is_asked: bool = False  # whether the last heartbeat is unanswered
    reported: list[int] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether it can be talked to: it is known, and its leases are not about to end."""
        return self.phase in (Phase.KNOWN, Phase.ATTACHED)

    @property
    def is_ending(self) -> bool:
        """Whether its leases are about to end."""
        return self.phase in (Phase.DETACHED, Phase.GONE)

    @property
    def is_attached(self) -> bool:
        return self.phase is Phase.ATTACHED

    @property
    def state(self) -> str:
        match self.phase:
            case Phase.NOT_THERE:
                return "not there"
            case Phase.KNOWN:
                return self.refusal or "not attached"
            case Phase.ATTACHED:
                return "attached"
            case Phase.DETACHED | Phase.GONE:
                return "its last transfers are ending"


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


def state_of_link(
    peer: BorrowerPeer, link: LendLink, *, now_s: float, no_offer_before_s: float, with_extents: bool
) -> LinkState:
    """Return a link's state as the lender knows it. `no_offer_before_s`: when its KV group may be offered again."""
    return link_state(
        link.geometry,
        link.ledger,
        LENDER_STATES,
        peer=peer.spec.name,
        peer_state=peer.state,
        num_bytes=link.away_bytes,
        heard_s_ago=now_s - peer.heard_s if peer.is_there else None,
        peer_extents=peer.reported[link.index] if peer.is_there and peer.reported else None,
        no_offer_s=no_offer_before_s - now_s if no_offer_before_s > now_s else None,
        with_extents=with_extents,
    )
