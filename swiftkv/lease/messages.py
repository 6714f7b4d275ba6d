"""The messages between coordinators, and between them and the gateway: MessagePack over ZeroMQ.

A `LendingSpec` tells an engine about its peers when it starts.

Extents are little-endian int32 as bytes, epochs uint32. A *link* within a message is an index in the list of links
between the two engines, which is the same on both sides. `sender` and `receiver` are incarnations: messages from or to
a process that has ended are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec
import numpy as np

from swiftkv.histogram import Histogram
from swiftkv.policies import IoBackend

if TYPE_CHECKING:
    from swiftkv._lease import BorrowerLedger, Int32Array, LenderLedger, UInt32Array

MAX_LEASE_MESSAGE_BYTES = 64 << 20
"""ZMQ_MAXMSGSIZE of all lease sockets: a link of ten million extents can be shown in one message."""


MAX_OTHERS = 63
"""The most processes of a borrower beside the one that says Hello."""

Pid = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class LinkGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV group of a lender, paired with one of a borrower; `meu_w` lender blocks hold `meu_m` borrower blocks."""

    lender_group: int
    borrower_group: int
    meu_w: int
    meu_m: int
    extent_bytes: int
    num_extents: int  # all extents of the lender's group, whatever the budget
    lender_base_offset_bytes: int  # from the first byte of the lender's pool to extent 0
    borrower_group_bytes: int  # the group's part of the borrower's own pool: its groups borrow in proportion


class PeerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another engine, and the links between it and this one."""

    name: str
    leases_address: str  # ipc://…: its coordinator binds ROUTER here
    links: list[LinkGeometry]


class LendingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's part in lending. Its borrow links are those of `lenders` in order, its lend links of `borrowers`."""

    leases_address: str  # the address of the engine's own coordinator
    lenders: list[PeerSpec]
    borrowers: list[PeerSpec]
    budget_bytes: int  # the most that is lent at first
    window_s: float
    policy: Literal["total", "longest"]
    transport: Literal["shm", "peer", "p2p"]
    stream_buffers: Literal[1, 2]
    rendezvous: str  # a directory of mode 0700 that all engines of the node share
    max_wait_s: float  # the longest wait of a request that needs more memory than is lent
    io_backend: IoBackend = "kernel"  # how the transport `peer` copies
    max_programs: int = 32  # programs with which kernels copy at once, each up to 16 warps
    retry_after_s: float = 60.0  # the time after which lenders lend again what their own requests needed


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Borrower to lender, until a Welcome comes. Repeating it with the same `attempt` changes nothing."""

    borrower: str
    sender: int
    attempt: int  # counts the attachments of the lender's memory
    pid: Pid
    start_ticks: int  # `process.start_ticks`, which with the pid names a process for ever
    links: list[LinkGeometry]
    others: Annotated[list[tuple[Pid, int]], msgspec.Meta(max_length=MAX_OTHERS)] = []
    """The pid and start ticks of the borrower's other processes, which also write to the lender's memory."""


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    sender: int
    receiver: int
    attempt: int
    pid: Pid
    start_ticks: int
    store_paths: list[str]  # per link, where the transport finds the pool
    refused: str | None = None  # why nothing will be lent; the rest then means nothing


class Attached(msgspec.Struct, tag="attached", array_like=True, frozen=True):
    """The borrower can reach the lender's pool: extents may be offered."""

    sender: int
    receiver: int
    attempt: int


class Detached(msgspec.Struct, tag="detached", array_like=True, frozen=True):
    """The borrower has detached the pool, so all its leases end. It will say Hello again."""

    sender: int
    receiver: int


class NamedLeases(msgspec.Struct, array_like=True, frozen=True):
    """Extents of one link, and the epochs of their leases."""

    sender: int
    receiver: int
    link: int
    extents: bytes
    epochs: bytes

    @classmethod
    def of(cls, extents: Int32Array, epochs: UInt32Array, *, sender: int, receiver: int, link: int) -> Self:
        return cls(sender, receiver, link, extents.tobytes(), epochs.tobytes())


class Offer(NamedLeases, tag="offer", array_like=True, frozen=True):
    """Lender to borrower: use these extents."""


class Accept(NamedLeases, tag="accept", array_like=True, frozen=True):
    """Borrower to lender: these extents are in use."""


class Recall(NamedLeases, tag="recall", array_like=True, frozen=True):
    """Lender to borrower: give these extents back."""


class Return(NamedLeases, tag="return", array_like=True, frozen=True):
    """Borrower to lender: these extents are the lender's again."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, frozen=True):
    """Sent by the lender, and answered by the borrower with one of its own. It shows which side is stuck.

    A missing answer ends no lease: only a process that has ended loses its leases. One that is merely stopped may still
    write to the lender's memory when it continues.
    """

    sender: int
    receiver: int
    extents: list[int]  # per link: extents that are lent and not home, or borrowed


class SetBudget(msgspec.Struct, tag="set_budget", array_like=True, frozen=True):
    request_id: int
    budget_bytes: int
    dry_run: bool = False


class BudgetSet(msgspec.Struct, tag="budget_set", array_like=True, frozen=True):
    """Answers `SetBudget` when the recalled extents are home; at once if it is refused or a dry run."""

    request_id: int
    budget_bytes: int  # now in force, or asked for in a dry run
    lent_bytes: int  # not home at this moment
    recalled_bytes: int  # bytes that came home, or in a dry run would be recalled
    took_s: float
    refused: str | None = None


class ShowLending(msgspec.Struct, tag="show_lending", array_like=True, frozen=True):
    request_id: int
    with_extents: bool = False


LENDER_STATES = ("home", "offered", "lent", "recalled")
BORROWER_STATES = ("none", "held", "recalled")
"""The states of an extent on each side of a link, as the ledgers number them from 0 on."""


class LinkState(msgspec.Struct, array_like=True, frozen=True):
    """One link as one side sees it, with LENDER_STATES on a lend link and BORROWER_STATES on a borrow link."""

    peer: str
    peer_state: str  # "attached", or why not
    geometry: LinkGeometry
    counts: dict[str, int]  # extents by state
    num_bytes: int  # lent and not home, or borrowed
    heard_s_ago: float | None  # seconds since the peer's last message; None: it does not run
    peer_extents: int | None  # extents of this link in the peer's last heartbeat
    states: bytes | None = None  # uint8 [num_extents], numbers of states
    epochs: bytes | None = None  # uint32 [num_extents]
    no_offer_s: float | None = None  # seconds until offers resume: the lender needed blocks itself; None: no pause


def link_state(
    geometry: LinkGeometry,
    ledger: LenderLedger | BorrowerLedger,
    states: Sequence[str],
    *,
    peer: str,
    peer_state: str,
    num_bytes: int,
    heard_s_ago: float | None,
    peer_extents: int | None,
    with_extents: bool,
    no_offer_s: float | None = None,
) -> LinkState:
    """Return a link's state with the counts of its ledger by `states`, and with all extents if `with_extents`."""
    numbers, epochs = ledger.table() if with_extents else (None, None)
    return LinkState(
        peer=peer,
        peer_state=peer_state,
        geometry=geometry,
        counts={state: getattr(ledger, state) for state in states},
        num_bytes=num_bytes,
        heard_s_ago=heard_s_ago,
        peer_extents=peer_extents,
        states=None if numbers is None else numbers.tobytes(),
        epochs=None if epochs is None else epochs.tobytes(),
        no_offer_s=no_offer_s,
    )


class LeasedBytes(msgspec.Struct, array_like=True, frozen=True):
    """The bytes that one model lent, took back, borrowed and gave back, since its engine started or in some period.

    Extents that a dead lender takes with it count as given back.
    """

    lent: int = 0
    taken_back: int = 0
    borrowed: int = 0
    given_back: int = 0

    def __add__(self, other: LeasedBytes) -> LeasedBytes:
        return LeasedBytes(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def __sub__(self, other: LeasedBytes) -> LeasedBytes:
        return LeasedBytes(*map(sub, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class GroupBlocks(msgspec.Struct, frozen=True):
    """Blocks of one KV group: free + used + cached + lent + in_flight + staging + loading + elsewhere = total.

    Blocks `elsewhere` are in extents of other groups, or of none. Borrowed blocks, and blocks in host memory that this
    engine attends to, are not part of the sum.
    """

    free: int
    used: int
    cached: int
    lent: int
    in_flight: int
    staging: int
    loading: int
    elsewhere: int
    total: int
    borrowed_free: int
    borrowed_used: int
    borrowed_cached: int
    borrowed_in_flight: int
    staging_layer_blocks: int
    pinned: int = 0  # the blocks in use that pins hold
    host_used: int = 0
    host_cached: int = 0
    host_in_flight: int = 0
    host_loading: int = 0


class LendingState(msgspec.Struct, tag="lending_state", array_like=True, frozen=True):
    """Answers `ShowLending`. Counters are since the start of the engine."""

    request_id: int
    name: str
    pool_bytes: int
    groups: list[GroupBlocks]
    messages_dropped_total: int  # messages that could not be read, or named something that does not exist
    budget_bytes: int = 0
    lends: list[LinkState] = []
    borrows: list[LinkState] = []
    recalls_total: dict[str, int] = {}  # by reason: budget, demand, share
    recall_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram(()))  # until all its extents are home


FromBorrower = Hello | Attached | Detached | Accept | Return | Heartbeat
FromLender = Welcome | Offer | Recall | Heartbeat
FromAdmin = SetBudget | ShowLending
ToAdmin = BudgetSet | LendingState


class MalformedMessage(Exception):
    """A message that names something that does not exist. It is dropped, so one side's mistake cannot end the other."""


def named_leases(message: NamedLeases, links: Sequence[LinkGeometry]) -> tuple[Int32Array, UInt32Array]:
    """Return the extents and epochs that a message about one of `links` names.

    Raises `MalformedMessage` unless all of them are possible.
    """
    if not 0 <= message.link < len(links):
        raise MalformedMessage(f"it names link {message.link}, but there are {len(links)} links")
    if len(message.extents) % 4 or len(message.extents) != len(message.epochs):
        raise MalformedMessage(f"it has {len(message.extents)} bytes of extents and {len(message.epochs)} of epochs")
    extents, epochs = np.frombuffer(message.extents, np.int32), np.frombuffer(message.epochs, np.uint32)
    num_extents = links[message.link].num_extents
    outside = extents[(extents < 0) | (extents >= num_extents)]
    if len(outside):
        raise MalformedMessage(f"it names extent {outside[0]} of a link that has {num_extents}")
    if len(np.unique(extents)) != len(extents):
        raise MalformedMessage("it names an extent twice")
    if not epochs.all():
        raise MalformedMessage("it names epoch 0, which no offer has")
    return extents, epochs


def reported_extents(heartbeat: Heartbeat, links: Sequence[LinkGeometry]) -> list[int]:
    """Return how many extents the sender says are lent or borrowed, by link.

    Raises `MalformedMessage` unless there is a number for each of `links`.
    """
    if len(heartbeat.extents) != len(links):
        raise MalformedMessage(f"the heartbeat is about {len(heartbeat.extents)} links, but there are {len(links)}")
    return heartbeat.extents
