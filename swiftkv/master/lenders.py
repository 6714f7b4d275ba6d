"""The lenders of a borrower, and the links to each, as the borrower sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftkv._lease import BorrowerLedger
from swiftkv.lease.messages import BORROWER_STATES, LendingSpec, LinkGeometry, LinkState, PeerSpec, link_state
from swiftkv.lease.process import PeerProcess


@dataclass(frozen=True, slots=True)
class BorrowLink:
    """A KV group of a lender, paired with one of the borrower's."""

    number: int  # index in the borrower's links
    index: int  # index in the links with this lender
    geometry: LinkGeometry
    ledger: BorrowerLedger

    @property
    def borrowed(self) -> int:
        return self.ledger.held + self.ledger.recalled


@dataclass(slots=True)
class Asking:
    """The lender has not welcomed this attempt: the borrower says Hello to it now and then."""

    why: str  # "not there", or why the last attempt failed
    hello_due_s: float


class Attaching:
    """The lender has welcomed this attempt, and its pool is being found and attached."""


class InUse:
    """The lender's pool is attached."""


@dataclass(slots=True)
class LenderPeer:
    """A lender, whether it runs or not. `process` is set while it is known to live."""

    spec: PeerSpec
    index: int
    links: list[BorrowLink]
    process: PeerProcess | None = None
    incarnation: int = 0
    attempt: int = 1  # to attach the lender's memory
    phase: Asking | Attaching | InUse = field(default_factory=lambda: Asking("not there", hello_due_s=0.0))
    heard_s: float = 0.0
    reported: list[int] = field(default_factory=list)

    @property
    def is_attached(self) -> bool:
        return isinstance(self.phase, InUse)

    @property
    def state(self) -> str:
        match self.phase:
            case Asking(why=why):
                return why
            case Attaching():
                return "attaching"
            case InUse():
                return "attached"

    def ask_anew(self, why: str, hello_due_s: float) -> None:
        """Begin another attempt."""
        self.attempt += 1
        self.phase = Asking(why, hello_due_s)


def lenders_of(spec: LendingSpec) -> list[LenderPeer]:
    """Return the lenders that a borrower is configured for; none of them runs yet."""
    peers = []
    number = 0
    for lender, peer in enumerate(spec.lenders):
        links = []
        for index, geometry in enumerate(peer.links):
            links.append(BorrowLink(number, index, geometry, BorrowerLedger(geometry.num_extents)))
            number += 1
        peers.append(LenderPeer(peer, lender, links))
    return peers


def state_of_link(peer: LenderPeer, link: BorrowLink, *, now_s: float, with_extents: bool) -> LinkState:
    """Return the state of a link as the borrower knows it."""
    is_there = peer.process is not None
    return link_state(
        link.geometry,
        link.ledger,
        BORROWER_STATES,
        peer=peer.spec.name,
        peer_state=peer.state,
        num_bytes=link.borrowed * link.geometry.extent_bytes,
        heard_s_ago=now_s - peer.heard_s if is_there else None,
        peer_extents=peer.reported[link.index] if is_there and peer.reported else None,
        with_extents=with_extents,
    )
