"""The world of an engine of several ranks in a random history: its group, sockets, copies and lenders, as actors.

Each waits where the real one waits, and goes on when the history's seed says so.
"""

from __future__ import annotations

import math
import os
import random
import select
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from swiftkv._core import GroupSpec, Scheduler
from swiftkv._lease import LenderLedger
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.engine.ranks import AttachOrder, Order
from swiftkv.errors import TransferError
from swiftkv.lease.messages import (
    BudgetSet,
    FromAdmin,
    FromBorrower,
    FromLender,
    LendingSpec,
    LinkGeometry,
    PeerSpec,
    Recall,
    SetBudget,
    ToAdmin,
)
from swiftkv.lease.process import PeerProcess
from swiftkv.lease.wire import Route
from swiftkv.lending_party import lend_links, open_party
from swiftkv.transport.base import COPY_TIMING, CopyTimings, HostMemory, PeerHandle, Runs, Ticket
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.transport.shm import ShmTransport
from tests.support.actors import Actor, Actors
from tests.support.lender import pool_of

if TYPE_CHECKING:
    from tests.engine.rank_histories import BorrowerLife, History

BLOCK_SIZE = 16
UNIT_BYTES = 4096  # a layer block of one head: of a rank
POISON = -1  # as int32; as float32 it is no number, so a token that depends on it is refused
ADMIN = b"admin"


class Group:
    """The meetings of ranks: each call is a meeting, in which all must do the same."""

    def __init__(self, actors: Actors, size: int) -> None:
        self.actors = actors
        self.size = size
        self.meetings: dict[int, tuple[str, dict[int, Tensor]]] = {}


class GroupMember:
    """One rank's `Communicator`, for one life of its engine."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group
        self._numbers = count()

    def begin(self, deadline_s: float, told: Sequence[int] = ()) -> list[list[int]]:
        numbers: list[list[int]] = self.all_gather(torch.tensor([*told])).tolist()
        return numbers

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._meet("all_gather", part, waits=True))

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([other[self.rank] for other in self._meet("all_to_all", parts, waits=True)])

    def gather(self, part: Tensor) -> Tensor | None:
        parts = self._meet("gather", part, waits=self.rank == 0)
        return torch.stack(parts) if self.rank == 0 else None

    def _meet(self, kind: str, part: Tensor, *, waits: bool) -> list[Tensor]:
        number, group = next(self._numbers), self._group
        others, parts = group.meetings.setdefault(number, (kind, {}))
        assert others == kind, f"meeting {number} is {kind} for rank {self.rank} and {others} for others"
        parts[self.rank] = part.clone()
        group.actors.pause((lambda: len(parts) == self.size) if waits else None)
        group.meetings.pop(number - 2, None)  # all are past it, for all have come to the one after it
        return [parts[rank] for rank in sorted(parts)]


class LateTransport(ShmTransport):
    """Copies in the actor that runs `copy`, or fails there, having copied or not."""

    def __init__(self, pool: Any, life: BorrowerLife, rank: int) -> None:
        super().__init__(pool)
        self._life = life
        self._history = life.history
        self._rank = rank
        self.jobs: deque[tuple[Ticket, Runs | None, Runs | None, int]] = deque()
        self._tickets = count(1)
        self._copied: Ticket = 0
        self._failed: set[Ticket] = set()

    def attach(self, link: int, peer: PeerHandle) -> None:
        history = self._history
        history.actors.pause()
        if history.rng.random() < history.failing_attaches:
            history.reached[f"attach failed on {'rank 0' if self._rank == 0 else 'another rank'}"] += 1
            raise TransferError("an attachment that the history has fail")
        super().attach(link, peer)

    def detach(self, link: int) -> None:
        self._history.actors.pause()
        self.settle()
        super().detach(link)

    def submit(self, to_peer: Runs | None, from_peer: Runs | None, layer: int) -> Ticket:
        ticket = next(self._tickets)
        self.jobs.append((ticket, to_peer, from_peer, layer))
        self._history.actors.pause()
        return ticket

    def wait(self, ticket: Ticket) -> None:
        self._history.actors.pause(lambda: self._copied >= ticket)
        if ticket in self._failed:
            self._failed.remove(ticket)
            raise TransferError("a copy that the history has fail")

    def settle(self) -> None:
        self._history.actors.pause(lambda: not self.jobs)
        self._failed.clear()

    def take_timings(self) -> CopyTimings:
        return np.empty(0, COPY_TIMING)

    def copy(self) -> None:
        """Copy job by job, in an actor of its own."""
        history = self._history
        while True:
            history.actors.pause(lambda: bool(self.jobs))
            ticket, *job = self.jobs[0]
            fails = history.rng.random() < history.failing_copies
            if not fails or history.rng.random() < 0.5:
                super().wait(super().submit(*job))
            if fails:
                self._failed.add(ticket)
            self.jobs.popleft()
            self._copied = ticket
            dead = [rank for rank in range(self._life.num_ranks) if self._life.ranks[rank].is_killed]
            history.reached["a rank copied after another had died"] += bool(dead)


class Finders(Executor):
    """Runs what it is given one after the other, in an actor."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((future, lambda: function(*args, **named)))
        return future

    def run(self) -> None:
        while True:
            self._actors.pause(lambda: bool(self._work))
            future, work = self._work.popleft()
            try:
                found = work()
            except TransferError as error:
                future.set_exception(error)
            else:
                future.set_result(found)


class Orders:
    """Rank 0's way to its followers; each reads its orders when it likes."""

    def __init__(self, actors: Actors, pids: list[int]) -> None:
        self.pids = pids
        self.inboxes = [Inbox(actors) for _ in pids]
        self._actors = actors
        self._encoder = msgspec.msgpack.Encoder()

    def tell(self, order: Order) -> None:
        message = self._encoder.encode(order)
        for inbox in self.inboxes:
            inbox.messages.append(message)
            inbox.is_attaching += isinstance(order, AttachOrder)
            self._actors.pause()


class Inbox:
    """A socket that receives."""

    def __init__(self, actors: Actors) -> None:
        self.messages: deque[bytes] = deque()
        self.is_attaching = 0  # orders to attach that were not read
        self._actors = actors

    def recv(self, flags: int = 0) -> bytes:
        if flags & zmq.NOBLOCK:
            if not self.messages:
                raise zmq.Again
            return self.messages.popleft()
        self._actors.pause(lambda: bool(self.messages))
        self.is_attaching = 0
        return self.messages.popleft()


class Outbox:
    """A socket that sends."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self.messages.append(message)


class Wire:
    """The `Wire` of one coordinator. The connections of a dead process are gone with it."""

    def __init__(self, history: History, name: str, lenders: Sequence[str]) -> None:
        self.is_open = True
        self.dropped_total = 0
        self._history = history
        self._name = name
        self._lenders = lenders
        self._route = f"{name} {len(history.wires)}".encode()
        self._inbound: deque[tuple[Route, FromBorrower | FromAdmin]] = deque()
        self._from_lenders: deque[tuple[int, FromLender]] = deque()
        self._exits: dict[PeerProcess, Callable[[], None]] = {}
        self._is_woken = False
        history.wires[self._route] = history.listening[name] = self

    @property
    def has_messages(self) -> bool:
        return bool(self._inbound or self._from_lenders)

    def now_s(self) -> float:
        return self._history.actors.now_s

    def wait(self, timeout_s: float) -> bool:
        due_s = self.now_s() + max(timeout_s, 0.0)
        self._history.actors.pause(lambda: self._is_woken or self.has_messages or bool(self._gone()), due_s)
        for process in self._gone():
            exited = self._exits.pop(process)
            process.close()
            exited()
        is_woken, self._is_woken = self._is_woken, False
        return is_woken

    def wake(self) -> None:
        self._is_woken = True

    def send(self, route: Route, message: FromLender | ToAdmin) -> None:
        if route == ADMIN:
            assert isinstance(message, BudgetSet)
            assert message.refused is None
            return
        assert isinstance(message, FromLender)
        wire = self._history.wires[route]
        if wire.is_open:
            if isinstance(message, Recall):
                self._history.note_recall()
            wire._from_lenders.append((wire._lenders.index(self._name), message))

    def send_to_lender(self, index: int, message: FromBorrower) -> None:
        wire = self._history.listening[self._lenders[index]]
        if wire.is_open:
            wire._inbound.append((self._route, message))

    def ask(self, request: SetBudget) -> None:
        self._inbound.append((ADMIN, request))

    def received(self) -> Iterator[tuple[Route, FromBorrower | FromAdmin]]:
        while self._inbound:
            yield self._inbound.popleft()

    def received_from_lenders(self) -> Iterator[tuple[int, FromLender]]:
        while self._from_lenders:
            yield self._from_lenders.popleft()

    def lender_name(self, index: int) -> str:
        return self._lenders[index]

    def reconnect(self, index: int) -> None:
        self._from_lenders = deque(entry for entry in self._from_lenders if entry[0] != index)

    def watch_exit(self, process: PeerProcess, on_exit: Callable[[], None]) -> None:
        self._exits[process] = on_exit

    def drop(self, sender: str, error: Exception) -> None:
        raise AssertionError(f"a message of {sender} means nothing: {error}")

    def close(self) -> None:
        self.is_open = False
        for process in self._exits:
            process.close()
        self._exits = {}

    def _gone(self) -> list[PeerProcess]:
        return [process for process in self._exits if is_readable(process.fd)]


def is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Body:
    """The process that stands for one of an engine's: it exists, and can be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class LenderShape:
    """The pools of a lender on one rank or on several, and what it lends of each: a link for each group."""

    num_pools: int
    num_blocks: int
    block_bytes: int
    links: list[LinkGeometry]
    used_bytes: list[int]  # of an extent, by link: the parts of as many ranks as have theirs in one pool

    @classmethod
    def draw(cls, rng: random.Random, num_pools: int, num_ranks: int, groups: Sequence[KVGroup]) -> LenderShape:
        block_bytes, num_blocks = UNIT_BYTES * rng.choice([3, 5, 8]), 60
        links, used_bytes = [], []
        for number, group in enumerate(groups):
            meu_m = rng.choice([1, 2, 3])
            used_bytes.append(num_ranks // num_pools * meu_m * group.block_bytes)
            meu_w = -(-used_bytes[-1] // block_bytes)
            num_extents = num_blocks // meu_w
            links.append(LinkGeometry(0, number, meu_w, meu_m, meu_w * block_bytes, num_extents, 0, 1))
        return cls(num_pools, num_blocks, block_bytes, links, used_bytes)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def extents(self, memory: Tensor, number: int) -> Tensor:
        """Return the extents of a link, int32 [num_extents, extent_bytes / 4]."""
        link = self.links[number]
        return memory[: link.num_extents * link.extent_bytes // 4].view(link.num_extents, -1)


class LenderLife:
    """One life of a lender: its pools, its half of the leases, and requests of its own, whose blocks are poison."""

    actor: Actor

    def __init__(self, history: History, name: str, shape: LenderShape) -> None:
        self.body = Body()
        self.name = name
        self.shape = shape
        self._history = history
        self._ids = count(1)
        self.pools: list[Pool] = [pool_of(shape.pool_bytes) for _ in range(shape.num_pools)]
        self.memory = [pool.tensor.view(torch.int32) for pool in self.pools]
        for memory in self.memory:
            memory.fill_(POISON)
        self._is_home = np.ones(shape.num_blocks, np.bool_)
        self._leases = [LenderLedger(link.num_extents).table() for link in shape.links]
        self.spec = LendingSpec(
            leases_address="",
            lenders=[],
            borrowers=[PeerSpec("tiny", "", shape.links)],
            budget_bytes=history.rng.choice([0, shape.pool_bytes // 2, shape.pool_bytes]),
            window_s=0.5,
            policy=history.rng.choice(["total", "longest"]),
            transport="shm",
            stream_buffers=1,
            rendezvous=str(history.directory),
            max_wait_s=math.inf,
        )
        self.scheduler = Scheduler(
            [GroupSpec(1, shape.num_blocks, 0, shape.block_bytes, 0)],
            BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=shape.num_blocks * BLOCK_SIZE,
            lend_links=lend_links(self.spec),
        )
        self.wire = Wire(history, name, [])
        history.newborn = self
        party = open_party(
            name,
            self.spec,
            self.wire,
            scheduler=self.scheduler,
            pool_bytes=shape.pool_bytes,
            serve_link=self._serve_link,
            peer_pools=None,  # type: ignore[arg-type]  # it borrows nothing
            wake_engine=lambda: None,
        )
        assert party.lender is not None
        self.lender = party.lender
        party.coordinator.start()

    @property
    def ledgers(self) -> list[LenderLedger]:
        return [link.ledger for link in self.lender._links]

    def set_budget(self, num_bytes: int) -> None:
        self.wire.ask(SetBudget(next(self._ids), num_bytes))

    def add(self, num_tokens: int) -> None:
        prompt, none = np.full(num_tokens, next(self._ids), np.int32), np.zeros(0, np.int32)
        self.scheduler.add_request(next(self._ids), prompt, 3, 3, none, b"", False)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        elif self.scheduler.is_short():
            self.wire.wake()
        self.scheduler.check_invariants()

    def note_leases(self) -> None:
        """Check and poison the memory; call it whenever leases may have changed.

        Extents that have come home are poisoned, even if they were lent again at once.
        """
        tables = [ledger.table() for ledger in self.ledgers]
        is_home, has_come = np.ones_like(self._is_home), np.zeros_like(self._is_home)
        for link, (states, epochs), (_, epochs_before) in zip(self.shape.links, tables, self._leases, strict=True):
            of_blocks = slice(link.num_extents * link.meu_w)
            is_home[of_blocks] &= np.repeat(states == 0, link.meu_w)
            has_come[of_blocks] |= np.repeat(epochs != epochs_before, link.meu_w)
        has_come |= is_home & ~self._is_home
        if not has_come.any() and (is_home == self._is_home).all():
            return
        self.check()
        for memory in self.memory:
            memory.view(self.shape.num_blocks, -1)[np.flatnonzero(has_come)] = POISON
        self._is_home, self._leases = is_home, tables

    def check(self) -> None:
        """Check that nobody has written to memory at home, nor behind the last block of an extent that is lent."""
        for memory in self.memory:
            blocks = memory.view(self.shape.num_blocks, -1)
            assert (blocks[np.flatnonzero(self._is_home)] == POISON).all(), f"memory of {self.name} is used by two"
            for number, (states, _) in enumerate(self._leases):
                lent = self.shape.extents(memory, number)[np.flatnonzero(states)]
                assert (lent[:, self.shape.used_bytes[number] // 4 :] == POISON).all(), "the end of an extent is used"

    def _serve_link(self, store_path: str) -> None:
        others = [HostMemory(os.getpid(), *pool.identity()) for pool in self.pools[1:]]
        publish_pool(Path(store_path), self.pools[0], others)
