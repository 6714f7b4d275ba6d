"""The lenders of a borrower, and the links to each, as the borrower sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftkv._lease import BorrowerLedger
from swiftkv.lease.messages import BORROWER_STATES, LendingSpec, LinkGeometry, LinkState, PeerSpec, Welcome
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
class LenderPeer:
    """A lender, whether it runs or not. `process` is set while it is known to live, `welcome` from its Welcome until
    its memory must be attached anew."""

    spec: PeerSpec
    index: int
    links: list[BorrowLink]
    process: PeerProcess | None = None
    incarnation: int = 0
    attempt: int = 1
    welcome: Welcome | None = None
    is_attached: bool = False
    state: str = "not there"
    hello_due_s: float = 0.0
    heard_s: float = 0.0
    reported: list[int] = field(default_factory=list)


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


def link_state(peer: LenderPeer, link: BorrowLink, *, now_s: float, with_extents: bool) -> LinkState:
    """Return the state of a link as the borrower knows it."""
    ledger = link.ledger
    states, epochs = ledger.table() if with_extents else (None, None)
    is_there = peer.process is not None
    return LinkState(
        peer=peer.spec.name,
        peer_state=peer.state,
        geometry=link.geometry,
        counts={state: getattr(ledger, state) for state in BORROWER_STATES},
        num_bytes=link.borrowed * link.geometry.extent_bytes,
        heard_s_ago=now_s - peer.heard_s if is_there else None,
        peer_extents=peer.reported[link.index] if is_there and peer.reported else None,
        states=None if states is None else states.tobytes(),
        epochs=None if epochs is None else epochs.tobytes(),
    )
