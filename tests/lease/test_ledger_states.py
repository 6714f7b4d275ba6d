"""Random histories of one link: messages late, reordered and repeated, and both sides killed at any point."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftkv._lease import BorrowerLedger, LenderLedger

HOME, OFFERED, LENT, RECALLED = range(4)
NONE, HELD, DRAINING = range(3)
ANY = st.integers(0, 1 << 16)


@dataclass(frozen=True)
class Message:
    kind: str
    sender: int  # incarnations
    receiver: int
    extents: tuple[int, ...]
    epochs: tuple[int, ...]

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.extents, np.int32), np.array(self.epochs, np.uint32)


@dataclass
class Lender:
    ledger: LenderLedger
    incarnation: int
    peer: int | None = None  # the incarnation of the borrower that it deals with
    pool: set[int] = field(default_factory=set)  # extents that it writes to itself

    @classmethod
    def start(cls, num_extents: int, incarnation: int) -> Lender:
        return cls(LenderLedger(num_extents), incarnation, pool=set(range(num_extents)))


@dataclass
class Borrower:
    ledger: BorrowerLedger
    incarnation: int
    peer: int | None = None
    draining: set[int] = field(default_factory=set)


class LinkMachine(RuleBasedStateMachine):
    @initialize(num_extents=st.integers(1, 8))
    def start(self, num_extents: int) -> None:
        self.num_extents = num_extents
        self.incarnations = 2
        self.lender = Lender.start(num_extents, 1)
        self.borrower = Borrower(BorrowerLedger(num_extents), 2)
        self.wire: list[Message] = []
        self.connect()

    def next_incarnation(self) -> int:
        self.incarnations += 1
        return self.incarnations

    @property
    def connected(self) -> bool:
        return self.lender.peer == self.borrower.incarnation and self.borrower.peer == self.lender.incarnation

    def send(self, kind: str, sender: Lender | Borrower, extents: np.ndarray, epochs: np.ndarray) -> None:
        if sender.peer is not None and len(extents):
            names = tuple(extents.tolist()), tuple(epochs.tolist())
            self.wire.append(Message(kind, sender.incarnation, sender.peer, *names))

    # The actions of both sides.

    @precondition(lambda self: self.lender.peer is not None and self.lender.pool)
    @rule(which=st.lists(ANY, min_size=1, max_size=4))
    def offer(self, which: list[int]) -> None:
        pool = sorted(self.lender.pool)
        extents = np.array(sorted({pool[i % len(pool)] for i in which}), np.int32)
        self.lender.pool -= set(extents.tolist())
        self.send("offer", self.lender, extents, self.lender.ledger.offer(extents))

    @rule(count=st.integers(1, 4))
    def recall(self, count: int) -> None:
        out = self.lender.ledger.offered + self.lender.ledger.lent
        extents, epochs = self.lender.ledger.recall(count)
        assert len(set(extents.tolist())) == min(count, out)
        self.send("recall", self.lender, extents, epochs)

    @precondition(lambda self: self.borrower.draining)
    @rule(which=ANY)
    def drain(self, which: int) -> None:
        draining = sorted(self.borrower.draining)
        self.give_back(np.array([draining[which % len(draining)]], np.int32))

    @precondition(lambda self: self.borrower.ledger.held)
    @rule(which=ANY)
    def give_back_unasked(self, which: int) -> None:
        held = np.flatnonzero(self.borrower.ledger.table()[0] == HELD)
        self.give_back(held[[which % len(held)]].astype(np.int32))

    def give_back(self, extents: np.ndarray) -> None:
        self.borrower.draining -= set(extents.tolist())
        self.send("return", self.borrower, extents, self.borrower.ledger.give_back(extents))

    # The fate of messages.

    @precondition(lambda self: self.wire)
    @rule(which=ANY, again=st.booleans())
    def deliver(self, which: int, again: bool) -> None:
        message = self.wire[which % len(self.wire)]
        if not again:
            self.wire.remove(message)
        at: Lender | Borrower = self.borrower if message.kind in ("offer", "recall") else self.lender
        if (message.sender, message.receiver) == (at.peer, at.incarnation):
            getattr(self, f"on_{message.kind}")(*message.arrays)

    def on_offer(self, extents: np.ndarray, epochs: np.ndarray) -> None:
        borrowed = {e for e in extents.tolist() if self.borrower.ledger.table()[0][e] != NONE}
        taken, accepted, accepted_epochs = self.borrower.ledger.on_offer(extents, epochs)
        assert not borrowed & set(taken.tolist())
        self.send("accept", self.borrower, accepted, accepted_epochs)

    def on_recall(self, extents: np.ndarray, epochs: np.ndarray) -> None:
        to_drain, returned, returned_epochs = self.borrower.ledger.on_recall(extents, epochs)
        assert not self.borrower.draining & set(to_drain.tolist())
        self.borrower.draining |= set(to_drain.tolist())
        self.send("return", self.borrower, returned, returned_epochs)

    def on_accept(self, extents: np.ndarray, epochs: np.ndarray) -> None:
        self.lender.ledger.on_accept(extents, epochs)

    def on_return(self, extents: np.ndarray, epochs: np.ndarray) -> None:
        self.come_home(self.lender.ledger.on_return(extents, epochs))

    def come_home(self, extents: np.ndarray) -> None:
        home = set(extents.tolist())
        assert len(home) == len(extents)
        assert not home & self.lender.pool
        self.lender.pool |= home

    # Ends and beginnings of processes. Whoever dies is known to be dead before its next incarnation is dealt with.

    @rule()
    def kill_borrower(self) -> None:
        self.borrower = Borrower(BorrowerLedger(self.num_extents), self.next_incarnation())

    @rule()
    def kill_lender(self) -> None:
        self.lender = Lender.start(self.num_extents, self.next_incarnation())

    @precondition(lambda self: self.lender.peer is not None and self.lender.peer != self.borrower.incarnation)
    @rule()
    def lender_sees_death(self) -> None:
        self.lender.peer = None
        self.come_home(self.lender.ledger.peer_died())
        assert len(self.lender.pool) == self.num_extents

    @precondition(lambda self: self.borrower.peer is not None and self.borrower.peer != self.lender.incarnation)
    @rule()
    def borrower_sees_death(self) -> None:
        self.borrower.peer = None
        self.borrower.draining.clear()
        self.borrower.ledger.lender_died()

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        if self.lender.peer is not None:
            self.lender_sees_death()
        if self.borrower.peer is not None:
            self.borrower_sees_death()
        self.lender.peer, self.borrower.peer = self.borrower.incarnation, self.lender.incarnation

    @invariant()
    def nobody_writes_where_another_may(self) -> None:
        if not hasattr(self, "lender"):
            return
        states, epochs = self.lender.ledger.table()
        replica, replica_epochs = self.borrower.ledger.table()
        borrowed = replica != NONE
        if self.connected:
            assert (states[borrowed] != HOME).all()
            assert (epochs[borrowed] == replica_epochs[borrowed]).all()
        else:
            assert self.borrower.peer != self.lender.incarnation or not borrowed.any()
        assert set(np.flatnonzero(states == HOME).tolist()) == self.lender.pool
        assert set(np.flatnonzero(replica == DRAINING).tolist()) == self.borrower.draining

    @invariant()
    def states_are_counted(self) -> None:
        if not hasattr(self, "lender"):
            return
        lender, borrower = self.lender.ledger, self.borrower.ledger
        counted = [lender.home, lender.offered, lender.lent, lender.recalled]
        assert counted == np.bincount(lender.table()[0], minlength=4).tolist()
        counted = [borrower.none, borrower.held, borrower.recalled]
        assert counted == np.bincount(borrower.table()[0], minlength=3).tolist()

    def settle(self) -> None:
        while self.wire or self.borrower.draining:
            while self.wire:
                self.deliver(0, again=False)
            self.give_back(np.array(sorted(self.borrower.draining), np.int32))

    def teardown(self) -> None:
        if not hasattr(self, "lender"):
            return
        if not self.connected:
            self.connect()
        self.settle()
        states, epochs = self.lender.ledger.table()
        replica, replica_epochs = self.borrower.ledger.table()
        assert set(states.tolist()) <= {HOME, LENT}
        assert ((states == LENT) == (replica == HELD)).all()
        assert (epochs[states == LENT] == replica_epochs[states == LENT]).all()
        self.recall(self.num_extents)
        self.settle()
        assert len(self.lender.pool) == self.lender.ledger.home == self.borrower.ledger.none == self.num_extents


TestLink = LinkMachine.TestCase
TestLink.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
