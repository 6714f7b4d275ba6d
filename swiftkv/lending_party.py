"""One engine's part in leases: the side that lends, the side that borrows, and the coordinator of both.

Engines, simulations and tests connect, publish pools and reach them in different ways. Everything else is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftkv._core import Link, Scheduler
from swiftkv.lease.coordinator import Coordinator
from swiftkv.lease.messages import LendingSpec
from swiftkv.lease.process import Identity
from swiftkv.lease.wire import Wire
from swiftkv.master.borrower import Borrower, PeerPools
from swiftkv.worker.lender import Lender


@dataclass(frozen=True, slots=True)
class LendingParty:
    """The roles that an engine has, one or both, and their coordinator, which is not started yet."""

    lender: Lender | None
    borrower: Borrower | None
    coordinator: Coordinator


def open_party(
    name: str,
    spec: LendingSpec,
    wire: Wire,
    *,
    scheduler: Scheduler,
    pool_bytes: int,
    serve_link: Callable[[str], threading.Thread | None],
    peer_pools: PeerPools,
    wake_engine: Callable[[], None],
    other_pids: Sequence[int] = (),
) -> LendingParty:
    """Make the roles that `spec` names. The other arguments are those of `Lender` and `Borrower`.

    `wake_engine` is called when the engine has something to do for lending, and when the coordinator ends.
    `other_pids` are the engine's other processes, which also copy to and from lent memory.
    """
    me = Identity.of_this_process(name, other_pids)
    lender = borrower = None
    if spec.borrowers:
        lender = Lender(
            me, spec, wire, scheduler=scheduler, pool_bytes=pool_bytes, serve_link=serve_link, wake_engine=wake_engine
        )
    if spec.lenders:
        borrower = Borrower(me, spec, wire, scheduler=scheduler, pools=peer_pools, wake_engine=wake_engine)
    coordinator = Coordinator(
        name, wire, scheduler, pool_bytes=pool_bytes, lender=lender, borrower=borrower, on_end=wake_engine
    )
    return LendingParty(lender, borrower, coordinator)


def lend_links(spec: LendingSpec | None) -> list[Link]:
    """Return the links over which an engine lends, as its scheduler takes them; none without a `spec`."""
    return [
        Link(link.lender_group, link.num_extents, link.meu_w)
        for peer in (spec.borrowers if spec else [])
        for link in peer.links
    ]


def borrow_links(spec: LendingSpec | None) -> list[Link]:
    """Return the links over which an engine borrows, as its scheduler takes them; none without a `spec`."""
    return [
        Link(link.borrower_group, link.num_extents, link.meu_m, link.extent_bytes, link.lender_base_offset_bytes)
        for peer in (spec.lenders if spec else [])
        for link in peer.links
    ]
