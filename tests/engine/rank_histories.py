"""Random histories of an engine of several ranks that borrows, all of it in one process and one thread at a time.

Every part that decides is the real one: the engine's loop, rank 0 and its followers, both sides of the leases and their
coordinators. Sockets, the group of the ranks, process ends and the moments of copies are the history's: any part may be
late by as much as the seed says. Each engine process has a real process as its body, which is watched and killed.

A lender fills the extents that are at home with poison, which no borrower may change or read. In *twin* checkpoints all
ranks have the same keys and values, so their pools must be equal, byte by byte, whatever was moved or copied.

It is one file of more than 400 lines, so that what a history does stands beside what it may find. `rank_world` has what
the engines see of the world.
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftkv._core import StepPlan
from swiftkv.background import FOREGROUND
from swiftkv.cache.pool import region_view
from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import CacheCommand, CacheReport, FromEngine, Shutdown, ToEngine
from swiftkv.engine.ranks import Follower, LeadingRunner, of_rank
from swiftkv.errors import TransferError
from swiftkv.lease.coordinator import Coordinator
from swiftkv.lease.messages import LendingSpec, PeerSpec
from swiftkv.lease.process import Identity, start_ticks
from swiftkv.master.lenders import BorrowLink, LenderPeer
from swiftkv.models.registry import read_config
from swiftkv.tier.messages import TierSpec
from swiftkv.transport.base import PeerHandle
from tests.engine.engine_process import Answer, EngineClient, EngineProcess
from tests.engine.rank_world import (
    BLOCK_SIZE,
    Body,
    Finders,
    Group,
    GroupMember,
    Inbox,
    LateTransport,
    LenderLife,
    LenderShape,
    Orders,
    Outbox,
    Wire,
    is_readable,
)
from tests.support.actors import Actor, Actors
from tests.support.checkpoints import make_checkpoint

MAX_MODEL_LEN = 320
MAX_IN_FLIGHT = 5
MAX_SLICES = 400_000


FULL, WINDOW = "full_attention", "sliding_attention"
_LAYERS = {"layer_types": [WINDOW, FULL, WINDOW, FULL, WINDOW], "use_sliding_window": True, "sliding_window": 40}
MODELS: dict[str, dict[str, Any]] = {
    "two ranks": {"arch": "llama", "num_key_value_heads": 2},
    "four ranks": {"arch": "llama", "num_key_value_heads": 4, "is_twin": True},
    "twins": {"arch": "llama", "num_key_value_heads": 2, "is_twin": True},
    "hybrid": {"arch": "qwen3", "num_hidden_layers": 5, "num_key_value_heads": 2, "is_twin": True, **_LAYERS},
}
"""Each rank has one head of keys and values."""


class Checkpoints:
    """Checkpoints of models on ranks, and the answers of ranks that have room for everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines = ExitStack()
        self._roomy: dict[Path, EngineProcess] = {}
        self._known: dict[tuple[Path, int, tuple[int, ...]], Answer] = {}

    def path(self, name: str) -> Path:
        path = self._directory / name
        if not path.exists():
            shape = {"num_hidden_layers": 3, **MODELS[name]}
            is_twin = shape.pop("is_twin", False)
            make_checkpoint(path, **shape)
            if is_twin:
                _make_twin(path / "model.safetensors", shape["num_key_value_heads"])
        return path

    def learn(self, path: Path, num_ranks: int, asked: Sequence[tuple[list[int], int]]) -> list[Answer]:
        """Return the right answers to prompts, each with the number of tokens."""
        if path not in self._roomy:
            options = {"tensor_parallel_size": num_ranks, "max_model_len": MAX_MODEL_LEN}
            self._roomy[path] = self._engines.enter_context(EngineProcess(path, kv_bytes=1 << 23, **options))
        engine = self._roomy[path]
        keys = [(path, max_tokens, tuple(prompt)) for prompt, max_tokens in asked]
        new = {key: engine.add(key[2], max_tokens=key[1], logprobs=1) for key in keys if key not in self._known}
        self._known |= zip(new, engine.wait(new.values()), strict=True)
        return [self._known[key] for key in keys]

    def close(self) -> None:
        self._engines.close()


def _make_twin(file: Path, num_ranks: int) -> None:
    """Give all heads of keys and values the weights of the first, so that no rank's differ from another's."""
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = weight[: len(weight) // num_ranks].repeat(num_ranks, 1)
    save_file(weights, file, {"format": "pt"})


class CheckedRunner(LeadingRunner):
    """Rank 0, which compares the ranks when a step has ended."""

    life: BorrowerLife

    def forward(self, plan: StepPlan) -> Tensor:  # type: ignore[override]
        self.life.note_step(plan)
        try:
            hidden = super().forward(plan)
        except TransferError:
            self.life.note_failure()
            raise
        self.life.compare_ranks(plan)
        return hidden

    def detach_lender(self, link: int) -> None:
        is_attached = self.transport is not None and self.transport.lender_pool(link) is not None
        self.life.history.reached["detached"] += is_attached
        super().detach_lender(link)

    def _attach(self, link: int, pool: PeerHandle) -> None:
        super()._attach(link, pool)
        self.life.history.reached["attached"] += 1


class HistoryEngine(Engine):
    """The loop of rank 0, which rests as an actor does."""

    def __init__(self, life: BorrowerLife, *args: Any) -> None:
        self.life = life
        super().__init__(*args)

    def _wait(self) -> None:
        actors, inbox, wakeups = self.life.history.actors, self.life.inbox, (self._lending.wakeup, self._tier.wakeup)
        due_s = actors.now_s + (0.1 if self._scheduler.has_work() else math.inf)
        actors.pause(lambda: bool(inbox.messages) or any(is_readable(wakeup.fd) for wakeup in wakeups), due_s)
        for wakeup in wakeups:
            wakeup.take()


class BorrowerLife(EngineClient):
    """One life of the engine: its ranks, their copiers, its coordinator, and the client that asks it."""

    engine: HistoryEngine
    runner: CheckedRunner

    def __init__(self, history: History) -> None:
        self.history = history
        self.num_ranks = history.num_ranks
        self.bodies = [Body() for _ in range(self.num_ranks)]
        self.group = Group(history.actors, self.num_ranks)
        self.orders = Orders(history.actors, [os.getpid() for _ in self.bodies[1:]])  # which has their pools
        self.inbox, self.outbox = Inbox(history.actors), Outbox()
        self.transports: dict[int, LateTransport] = {}
        self.others: list[tuple[int, Actor]] = []  # the copiers, and the coordinator and finder of rank 0
        self.pools: dict[int, Tensor] = {}
        self.has_torn = history.host_fd is not None  # blocks that are being read from there
        super().__init__(
            history.checkpoint, tensor_parallel_size=self.num_ranks, max_model_len=MAX_MODEL_LEN, **history.options
        )
        spawn = history.actors.spawn
        self.ranks = [
            spawn("rank 0", self._lead),
            *(
                spawn(f"rank {rank}", lambda rank=rank: self._follow(rank), rank)  # type: ignore[misc]
                for rank in range(1, self.num_ranks)
            ),
        ]

    def _lead(self) -> None:
        with torch.inference_mode():
            self.runner = CheckedRunner(self.config, self.orders, FOREGROUND)  # type: ignore[arg-type]
            self.runner.life = self
            self.pools[0] = self.runner.pool.tensor
            arguments = (self.config, self.runner, self.inbox, self.outbox, self._context)
            self.engine = HistoryEngine(self, *arguments)
            self.engine.run()

    def _follow(self, rank: int) -> None:
        with torch.inference_mode():
            follower = Follower(of_rank(self.config, rank), FOREGROUND)
            follower._orders.close(linger=0)
            follower._orders = self.orders.inboxes[rank - 1]  # type: ignore[assignment]
            self.pools[rank] = follower._runner.pool.tensor
            follower.run()

    def spawn_other(self, name: str, run: Callable[[], None], rank: int = 0) -> None:
        self.others.append((rank, self.history.actors.spawn(name, run, rank)))

    # the client

    def send(self, message: ToEngine | bytes) -> None:
        self.inbox.messages.append(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        self.history.run_until(lambda: bool(self.outbox.messages))
        message: FromEngine = self._decoder.decode(self.outbox.messages.popleft())
        return message

    def take(self, message: FromEngine) -> None:
        if not isinstance(message, CacheReport):
            super().take(message)

    def drain(self) -> None:
        while self.outbox.messages:
            self.take_one()

    # the end

    @property
    def is_dying(self) -> bool:
        return any(rank.is_killed for rank in self.ranks)

    def kill(self, rank: int) -> None:
        """End one process of the engine, and what it was about to copy."""
        for actor in (self.ranks[rank], *(other for number, other in self.others if number == rank)):
            self.history.actors.kill(actor)
        if rank == 0:
            self.history.listening["tiny"].close()
        self.bodies[rank].kill()

    def close(self) -> None:
        for body in self.bodies:
            body.kill()
        super().close()

    # what is noted and checked

    def note_step(self, plan: StepPlan) -> None:
        reached = self.history.reached
        reached["steps"] += 1
        reached["steps with copies"] += plan.has_copies
        reached["steps of copies alone"] += plan.has_copies and not len(plan.token_ids)
        reached["blocks moved"] += len(plan.local_moves) > 0
        reached["steps of moves alone"] += len(plan.local_moves) > 0 and not len(plan.token_ids)
        reached["streamed through one buffer"] += plan.num_stream_buffers == 1
        reached["streamed through two buffers"] += plan.num_stream_buffers == 2
        reached["preempted"] += len(plan.preempted_request_ids) > 0
        reached["planned ahead"] += plan.has_unknown_tokens
        reached["a rank was two orders behind"] += any(len(inbox.messages) > 1 for inbox in self.orders.inboxes)

    def note_failure(self) -> None:
        self.has_torn = True
        self.history.reached["copies failed"] += 1
        self.history.reached["detached with blocks in use"] += self.num_borrowed_used > 0

    @property
    def num_borrowed_used(self) -> int:
        return sum(group.borrowed_used for group in self.engine._scheduler.stats().groups)

    @property
    def is_copying(self) -> bool:
        return any(transport.jobs for transport in self.transports.values())

    def compare_ranks(self, plan: StepPlan) -> None:
        """Check that all ranks have ended the step: no copy is in flight, and in twins all hold the same."""
        assert not self.is_copying, "a step ends before its copies"
        if not self.history.is_twin:
            return
        if not self.has_torn:
            for rank in range(1, self.num_ranks):
                assert torch.equal(self.pools[rank], self.pools[0]), f"rank {rank} has other blocks than rank 0"
            self.history.compare_parts()
            return
        # A block that a failed step left half-written may differ, but nobody reads it.
        for number, region in enumerate(self.runner.pool.regions):
            starts, width = plan.table_starts[number].tolist(), region.group.layer_block_bytes
            for row, context_len in enumerate(plan.context_lens.tolist()):
                table = plan.stream_tables[0][number][starts[row] : starts[row + 1]][: context_len // BLOCK_SIZE]
                first = torch.from_numpy(table[table >= 0].astype(np.int64))
                for layer in range(region.group.num_layers):
                    parts = [region_view(pool, region).view(-1, width)[first + layer] for pool in self.pools.values()]
                    assert all(torch.equal(part, parts[0]) for part in parts), "a rank has other blocks"


class History:
    """One history: `run` lets it happen and compares; `reached` counts what it came to."""

    newborn: LenderLife  # the lender that is being made

    def __init__(self, seed: int, checkpoints: Checkpoints, directory: Path, host_fd: int | None = None) -> None:
        """`host_fd` is the host memory under the engine, if there is any: its threads run when they like."""
        self.host_fd = host_fd
        self.rng = rng = random.Random(seed)
        self.actors = Actors(rng)
        self.directory = directory
        self.reached: Counter[str] = Counter()
        self.wires: dict[bytes, Wire] = {}
        self.listening: dict[str, Wire] = {}
        self.model = rng.choice([*MODELS])
        self.num_ranks = int(MODELS[self.model]["num_key_value_heads"])
        self.is_twin = "is_twin" in MODELS[self.model]
        self._checkpoints = checkpoints
        self.checkpoint = checkpoints.path(self.model)
        self.failing_copies = rng.choice([0.0, 0.01])
        self.failing_attaches = rng.choice([0.0, 0.2])
        self._groups = read_config(self.checkpoint).of_rank(self.num_ranks).kv_groups(BLOCK_SIZE, "float32")
        self._shapes = {
            name: LenderShape.draw(rng, num_pools, self.num_ranks, self._groups)
            for name, num_pools in (("whole", 1), ("halves", 2))
        }
        self.options = self._draw_options()
        self._incarnations = count(1)
        self._texts = [self._tokens(rng.randint(40, 250)) for _ in range(3)]
        self._asked: dict[int, tuple[list[int], int]] = {}  # by request
        self._aborted: set[int] = set()
        self._dying_in: int | None = None  # slices until the rest of the borrower dies, too

    def run(self, num_events: int) -> None:
        with _world(self), ExitStack() as stack:
            stack.callback(self.actors.close)
            self._lenders = {name: LenderLife(self, name, shape) for name, shape in self._shapes.items()}
            self._life = BorrowerLife(self)
            stack.callback(self._end_bodies)
            for _ in range(num_events):
                self._act()
            self._settle()
            self._part()

    # what is drawn

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(3, 320) for _ in range(length)]

    def _draw_options(self) -> dict[str, Any]:
        rng = self.rng
        lending = LendingSpec(
            leases_address="",
            lenders=[PeerSpec(name, "", shape.links) for name, shape in self._shapes.items()],
            borrowers=[],
            budget_bytes=0,
            window_s=0.5,
            policy="total",
            transport="shm",
            stream_buffers=rng.choice([1, 2]),
            rendezvous=str(self.directory),
            max_wait_s=math.inf,
        )
        host = TierSpec(None, "/", self.host_fd, prefetch_policy="wait_complete", prefetch_threshold=BLOCK_SIZE)
        return {
            "lending": lending,
            "storage": None if self.host_fd is None else host,
            "kv_bytes": rng.choice([10, 14, 22]) * sum(group.block_bytes for group in self._groups),
            "shares_extents": len(self._groups) > 1,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": rng.choice([2, 4, 8]),
            "max_num_batched_tokens": rng.choice([40, 100, 256]),
            "async_scheduling": rng.random() < 0.5,
        }

    # the world that the engines see

    def identify(self, name: str, other_pids: Sequence[int] = ()) -> Identity:
        pid = self._life.bodies[0].pid if name == "tiny" else self.newborn.body.pid
        followers = [body.pid for body in self._life.bodies[1:]] if other_pids else []
        others = tuple((follower, start_ticks(follower)) for follower in followers)
        return Identity(name, next(self._incarnations), pid, start_ticks(pid), others)

    def join(self, config: Any) -> GroupMember:
        return GroupMember(self._life.group, config.rank)

    def open_transport(self, kind: str, pool: Any, **_: object) -> LateTransport:
        rank = self.actors.current.rank
        transport = self._life.transports[rank] = LateTransport(pool, self._life, rank)
        self._life.spawn_other(f"copier {rank}", transport.copy, rank)
        return transport

    def open_wire(self, _context: object, _address: str, lenders: Sequence[PeerSpec]) -> Wire:
        return Wire(self, "tiny", [peer.name for peer in lenders])

    def open_finders(self, _num_threads: int, _name: str) -> Finders:
        finders = Finders(self.actors)
        self._life.spawn_other("finder", finders.run)
        return finders

    def start_coordinator(self, coordinator: Coordinator) -> None:
        name = coordinator._name
        if name == "tiny":
            self._life.spawn_other("coordinator", coordinator._serve)
        else:
            self.newborn.actor = self.actors.spawn(f"coordinator of {name}", coordinator._serve)

    # what happens

    def _act(self) -> None:
        events = {self._go_on: 60.0, self._add: 10, self._crowd: 3, self._abort: 2}
        events |= {self._set_budget: 6, self._ask_lender: 5, self._lenders_step: 10, self._let_time_pass: 8}
        events |= {self._kill_lender: 2, self._kill_borrower: 1.5}
        self.rng.choices([*events], [*events.values()])[0]()

    def _go_on(self) -> None:
        for _ in range(self.rng.choice([3, 30, 150])):
            self._run_one()

    def _num_in_flight(self) -> int:
        return sum(not self._life.answers[k].has_ended for k in self._asked.keys() - self._aborted)

    def _crowd(self) -> None:
        """Ask for short answers, and for a long one that needs their memory."""
        if self._num_in_flight() < MAX_IN_FLIGHT:
            for _ in range(4):
                self._ask(self._tokens(self.rng.randint(1, 40)), self.rng.randint(5, 30))
            self._ask(self._tokens(290), 4)

    def _add(self) -> None:
        if self._num_in_flight() < MAX_IN_FLIGHT:
            text = self.rng.choice(self._texts)
            prompt = text[: self.rng.randint(1, len(text))] + self._tokens(self.rng.choice([0, 1, 16, 40]))
            self._ask(prompt, min(self.rng.choice([1, 5, 20, 50]), MAX_MODEL_LEN - len(prompt)))

    def _ask(self, prompt: list[int], max_tokens: int) -> None:
        self._asked[self._life.add(prompt, max_tokens=max_tokens, logprobs=1)] = prompt, max_tokens

    def _abort(self) -> None:
        alive = [k for k in self._asked if not self._life.answers[k].has_ended]
        if alive:
            gone = self.rng.choice(alive)
            self._life.abort(gone)
            self._aborted.add(gone)

    def _go_on_until_copying(self) -> None:
        """Bring the engine, now and then, into a step that copies."""
        if self.rng.random() < 0.7:
            for _ in range(300):
                if self._life.is_copying:
                    return
                self._run_one()

    def _set_budget(self) -> None:
        self._go_on_until_copying()
        lender = self.rng.choice([*self._lenders.values()])
        all_bytes = lender.shape.pool_bytes
        lender.set_budget(self.rng.choice([0, all_bytes, all_bytes, self.rng.randint(0, all_bytes)]))

    def _ask_lender(self) -> None:
        lender = self.rng.choice([*self._lenders.values()])
        lender.add(self.rng.randint(1, 8 * BLOCK_SIZE))

    def _lenders_step(self) -> None:
        for lender in self._lenders.values():
            lender.step()

    def _let_time_pass(self) -> None:
        self.actors.now_s += self.rng.choice([0.01, 0.2, 1.2])

    def _kill_lender(self) -> None:
        """End a lender where it stands, and start the next one; another lender may recall meanwhile."""
        self._go_on_until_copying()
        name = self.rng.choice([*self._lenders])
        lender = self._lenders[name]
        if hasattr(self._life, "engine") and not self._life.is_dying and any(ledger.lent for ledger in lender.ledgers):
            self.reached["a lender died"] += 1
            self.reached["a lender died with blocks in use"] += self._life.num_borrowed_used > 0
            self.reached["a lender died during a step that copies"] += self._life.is_copying
        self._end_lender(lender)
        self._lenders[name] = LenderLife(self, name, self._shapes[name])
        if self.rng.random() < 0.5:
            self.run_until(lambda: any(inbox.is_attaching for inbox in self._life.orders.inboxes))
            for other in self._lenders.values():
                if other.name != name:
                    other.set_budget(0)

    def _end_lender(self, lender: LenderLife) -> None:
        lender.check()
        lender.wire.close()
        self.actors.kill(lender.actor)
        lender.body.kill()

    def _kill_borrower(self) -> None:
        """End one rank where it stands; the others go on for a while."""
        if self._life.is_dying or not hasattr(self._life, "engine"):
            return
        self._go_on_until_copying()
        first = self.rng.randrange(self.num_ranks)
        self.reached[f"{'rank 0' if first == 0 else 'another rank'} died"] += 1
        self.reached["a rank died during a step that copies"] += self._life.is_copying
        self._life.kill(first)
        self._dying_in = self.rng.choice([0, 20, 200])

    def _bury_borrower(self) -> None:
        """End the other ranks, one by one, and start the engine again with what it had not answered."""
        ranks = [rank for rank in range(self.num_ranks) if not self._life.ranks[rank].is_killed]
        self._life.drain()
        self._life.kill(self.rng.choice(ranks))
        if len(ranks) > 1:
            self._dying_in = self.rng.choice([0, 20])
            return
        self._dying_in = None
        self._compare()
        answers = self._life.answers
        open_requests = [self._asked[k] for k in self._asked if not answers[k].has_ended and k not in self._aborted]
        self._life.close()
        self._asked, self._aborted = {}, set()
        self._life = BorrowerLife(self)
        for prompt, max_tokens in open_requests:
            self._ask(prompt, max_tokens)

    def _run_one(self) -> None:
        assert self.actors.num_slices < MAX_SLICES, "the history does not come to rest"
        actor = self.actors.run_one()
        if actor is not None and actor.name.startswith("coordinator"):
            self._note_leases()
        life = self._life
        if hasattr(life, "engine") and not life.is_dying:
            life.engine._scheduler.check_invariants()
            self._check_ledgers()
        if self._dying_in is not None:
            self._dying_in -= 1
            if self._dying_in < 0:
                self._bury_borrower()

    def run_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._run_one()

    def note_recall(self) -> None:
        life = self._life
        self.reached["recalled"] += 1
        self.reached["recalled while a rank had yet to attach"] += any(x.is_attaching for x in life.orders.inboxes)
        self.reached["recalled during a step that copies"] += life.is_copying

    # what must hold

    def _note_leases(self) -> None:
        for lender in self._lenders.values():
            lender.note_leases()

    def _links(self) -> Iterator[tuple[LenderLife, LenderPeer, BorrowLink]]:
        """Yield the links to the lenders that the borrower knows in this life."""
        borrower = self._life.engine._lending._borrower
        assert borrower is not None
        for peer in borrower._peers:
            lender = self._lenders[peer.spec.name]
            if peer.process is not None and peer.incarnation == lender.lender._me.incarnation:
                for link in peer.links:
                    yield lender, peer, link

    def _check_ledgers(self) -> None:
        """Check that no extent that the borrower may use is at home, and that both sides know the same epoch."""
        for lender, _, link in self._links():
            states, epochs = link.ledger.table()
            lent, lent_epochs = lender.ledgers[link.index].table()
            is_borrowed = states != 0
            assert (lent[is_borrowed] != 0).all(), "an extent is borrowed and at home"
            assert (epochs[is_borrowed] == lent_epochs[is_borrowed]).all(), "an extent is borrowed at two epochs"

    def compare_parts(self) -> None:
        """Check that all ranks have equal parts of each lent extent, in whichever of the lender's pools they lie."""
        for lender, _, link in self._links():
            held = np.flatnonzero(link.ledger.table()[0])
            if len(held):
                shape, ends_at = lender.shape, lender.shape.used_bytes[link.index] // 4
                extents = [shape.extents(memory, link.index)[held, :ends_at] for memory in lender.memory]
                parts = [part.view(len(held), self.num_ranks // shape.num_pools, -1) for part in extents]
                every = torch.cat(parts, dim=1)
                assert (every == every[:, :1]).all(), "the ranks hold different parts of an extent"

    def _compare(self) -> None:
        """Compare the answers with the right ones; one that was cut off has to be right so far."""
        asked = [*self._asked.items()]
        right = self._checkpoints.learn(self.checkpoint, self.num_ranks, [each for _, each in asked])
        for (request_id, (prompt, max_tokens)), expected in zip(asked, right, strict=True):
            answer = self._life.answers[request_id]
            what = f"{len(prompt)} tokens, {max_tokens} more"
            assert answer.error is None, f"{what}: {answer.error}"
            begun = len(answer.token_ids)
            assert answer.token_ids == expected.token_ids[:begun], what
            assert answer.logprobs == expected.logprobs[:begun], what
            assert answer.finish_reason in (0, expected.finish_reason)
            self.reached["answered"] += answer.has_ended
            self.reached["found in host memory"] += answer.hit_tokens.get("host", 0) > 0

    def _settle(self) -> None:
        """Let all lenders lend all, and wait for all answers and for rest."""
        self.run_until(lambda: self._dying_in is None and hasattr(self._life, "engine"))
        self.failing_copies = self.failing_attaches = 0.0
        for lender in self._lenders.values():
            lender.set_budget(lender.shape.pool_bytes)
        wanted = self._asked.keys() - self._aborted
        while not all(self._life.answers[k].has_ended for k in wanted):
            self._run_one()
            self._life.drain()
            if self.rng.random() < 0.02:
                self._lenders_step()
        self._compare()
        self._life.send(CacheCommand(1))  # it has taken all that was sent before
        self.run_until(self._is_at_rest)

    def _is_at_rest(self) -> bool:
        self._life.drain()
        if any(wire.has_messages for wire in self.listening.values()) or self._life.inbox.messages:
            return False
        if self._life.engine._scheduler.has_work():
            return False
        for lender in self._lenders.values():
            if lender.scheduler.has_work():
                lender.step()
                return False
        links = [*self._links()]
        if len({peer.index for _, peer, _ in links if peer.is_attached}) < len(self._lenders):
            return False
        for lender, _, link in links:
            ledger = lender.ledgers[link.index]
            # A lender keeps its memory for a while after a request of its own.
            if ledger.offered or ledger.recalled or link.ledger.recalled or not ledger.lent:
                return False
            assert ledger.lent == link.ledger.held
        for number, group in enumerate(self._life.engine._scheduler.stats().groups):
            assert group.used == group.borrowed_used == group.in_flight == group.borrowed_in_flight == 0
            ours = [link for *_, link in links if link.geometry.borrower_group == number]
            held = sum(link.ledger.held * link.geometry.meu_m for link in ours)
            assert group.borrowed_free + group.borrowed_cached == held
        return True

    def _part(self) -> None:
        """End the borrower, rank 0 first as it should, and wait until everything is home."""
        life = self._life
        life.send(Shutdown())
        self.run_until(lambda: life.ranks[0].is_over)
        for rank in range(self.num_ranks):
            life.kill(rank)
        self._run_until_home()

    def _run_until_home(self) -> None:
        ledgers = [ledger for lender in self._lenders.values() for ledger in lender.ledgers]
        while any(ledger.home < ledger.num_extents for ledger in ledgers):
            assert self.actors.num_slices < MAX_SLICES, "extents do not come home"
            self.actors.run_one()
            self._note_leases()
        for lender in self._lenders.values():
            lender.check()
            lender.scheduler.check_invariants()
            assert lender.scheduler.stats().groups[0].lent == 0

    def _end_bodies(self) -> None:
        self._life.close()
        for lender in self._lenders.values():
            lender.body.kill()
            lender.wire.close()
        gc.collect()  # closes the descriptors of pools, which are in cycles


@contextmanager
def _world(history: History) -> Iterator[None]:
    """Replace what reaches out of a process: threads, sockets, and other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftkv.engine.ranks._join_group", history.join)
        patch.setattr("swiftkv.engine.runner.open_transport", history.open_transport)
        patch.setattr("swiftkv.engine.lending.SocketWire", history.open_wire)
        patch.setattr("swiftkv.master.borrower.ThreadPoolExecutor", history.open_finders)
        patch.setattr(Identity, "of_this_process", history.identify)
        patch.setattr(Coordinator, "start", lambda coordinator: history.start_coordinator(coordinator))
        patch.setattr(Coordinator, "close", lambda coordinator: setattr(coordinator, "_closing", True))
        patch.setattr(Coordinator, "wait_for", lambda _, done: history.actors.pause(done.is_set))
        yield
