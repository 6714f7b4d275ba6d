"""An engine without a model: the real scheduler, coordinator and halves in a process of their own, driven by tests.

`python -m tests.lease.lending_process`: the first line of standard input is a `Setup`, each that follows a command.
Each request that ends is a line on standard output. It checks the scheduler's invariants after every step.

It is one file, for both of its ends are in it: what a test sends stands beside what the process does with it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from swiftkv._core import GroupSpec, Scheduler
from swiftkv.errors import TransferError
from swiftkv.lease.messages import (
    BudgetSet,
    LendingSpec,
    LendingState,
    LinkGeometry,
    LinkState,
    PeerSpec,
    SetBudget,
    ShowLending,
    ToAdmin,
)
from swiftkv.lease.wire import SocketWire
from swiftkv.lending_party import borrow_links, lend_links, open_party
from swiftkv.transport.base import PeerHandle
from swiftkv.wakeup import Wakeup

TIMEOUT_S = 120.0
BLOCK_SIZE = 16
LAYER_BLOCK_BYTES = 64
STEP_S = 0.002
FINISHED = (1, 2)  # stop, length; not aborted or dropped


class Group(msgspec.Struct, frozen=True):
    num_layers: int
    num_blocks: int


class Setup(msgspec.Struct, frozen=True):
    name: str
    groups: list[Group]
    lending: LendingSpec
    failing_attaches: int = 0  # the first so many fail
    gate: str | None = None  # a FIFO: no lender's pool is found until somebody opens it to write

    @property
    def pool_bytes(self) -> int:
        return sum(group.num_layers * group.num_blocks for group in self.groups) * LAYER_BLOCK_BYTES


class EngineWithoutModel:
    def __init__(self, setup: Setup, serve_link: Callable[[str], threading.Thread | None]) -> None:
        self.setup = setup
        self.wakeup = Wakeup()
        self.attached: set[int] = set()
        self.failing_attaches = setup.failing_attaches
        spec = setup.lending
        groups = []
        offset = 0
        for group in setup.groups:
            groups.append(GroupSpec(group.num_layers, group.num_blocks, 0, LAYER_BLOCK_BYTES, offset))
            offset += group.num_layers * group.num_blocks * LAYER_BLOCK_BYTES
        self.scheduler = Scheduler(
            groups,
            BLOCK_SIZE,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=min(group.num_blocks for group in setup.groups) * BLOCK_SIZE,
            lend_links=lend_links(spec),
            borrow_links=borrow_links(spec),
            stream_buffers=spec.stream_buffers,
        )
        self.context = zmq.Context()
        self.wire = SocketWire(self.context, spec.leases_address, spec.lenders)
        party = open_party(
            setup.name,
            spec,
            self.wire,
            scheduler=self.scheduler,
            pool_bytes=setup.pool_bytes,
            serve_link=serve_link,
            peer_pools=self,
            wake_engine=self.wakeup.wake,
        )
        self.borrower, self.coordinator = party.borrower, party.coordinator
        self.next_id = 1

    def find(self, store_path: str) -> PeerHandle:
        if self.setup.gate is not None:
            Path(self.setup.gate).open().close()
        return PeerHandle(int(Path(store_path).read_text()), 0, store_path, secret="", memory=None)

    def attach(self, link: int, pool: PeerHandle) -> None:
        assert link not in self.attached
        if self.failing_attaches > 0:
            self.failing_attaches -= 1
            raise TransferError("as the test wishes")
        if not Path(f"/proc/{pool.pid}/fd").exists():
            raise TransferError(f"process {pool.pid} has gone")
        self.attached.add(link)

    def detach(self, link: int) -> None:
        self.attached.discard(link)

    def run(self) -> None:
        self.coordinator.start()
        commands = os.fdopen(os.dup(0), "rb", buffering=0)
        unread = b""
        busy = False
        while True:
            ready = select.select([commands, self.wakeup.fd], [], [], 0 if busy else None)[0]
            self.wakeup.take()
            if commands in ready:
                read = commands.read(1 << 16)
                if not read:
                    return
                *lines, unread = (unread + read).split(b"\n")
                for line in lines:
                    self.obey(**json.loads(line))
            self.coordinator.check()
            if self.borrower is not None:
                self.borrower.apply_pending(lambda: None)  # each step is committed when it is computed
            busy = self.step()

    def close(self) -> None:
        """End the coordinator and close its sockets, where it does not end with its process."""
        self.coordinator.close()
        self.wire.close()
        self.context.term()

    def obey(self, command: str, **args: Any) -> None:
        if command == "give_up":
            assert self.borrower is not None
            self.coordinator.wait_for(self.borrower.give_up(args["links"]))
            return
        assert command == "add"
        none = np.zeros(0, np.int32)
        for _ in range(args.get("requests", 1)):
            prompt = np.full(args["tokens"], self.next_id, np.int32)
            self.scheduler.add_request(self.next_id, prompt, args["max_tokens"], args["max_tokens"], none, b"", False)
            self.next_id += 1
        self.wire.wake()

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        time.sleep(STEP_S)  # the forward pass: messages come while a step is in progress
        result = self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        self.scheduler.check_invariants()
        for request_id in result.request_ids[np.isin(result.finish_reasons, FINISHED)].tolist():
            print(request_id, flush=True)
        return True


def publish(store_path: str) -> None:
    """Publish, in place of a pool, the process that has it."""
    Path(store_path).write_text(str(os.getpid()))


class Admin:
    """The gateway's side of a coordinator."""

    def __init__(self, address: str) -> None:
        self.request_ids = count(1)
        self.answers: dict[int, ToAdmin] = {}  # received and not yet asked for
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(address)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def ask(self, request: SetBudget | ShowLending) -> None:
        self.socket.send(msgspec.msgpack.encode(request))

    def answer_to(self, request_id: int) -> ToAdmin:
        while request_id not in self.answers:
            assert self.socket.poll(TIMEOUT_S * 1000), "no answer"
            answer = msgspec.msgpack.decode(self.socket.recv(), type=ToAdmin)
            self.answers[answer.request_id] = answer
        return self.answers.pop(request_id)

    def show(self, with_extents: bool = False) -> LendingState:
        request_id = next(self.request_ids)
        self.ask(ShowLending(request_id, with_extents))
        state = self.answer_to(request_id)
        assert isinstance(state, LendingState)
        return state

    def ask_budget(self, budget_bytes: int, dry_run: bool = False) -> int:
        """Send the request and return its id; the answer comes when it is done."""
        request_id = next(self.request_ids)
        self.ask(SetBudget(request_id, budget_bytes, dry_run))
        return request_id

    def budget_set(self, request_id: int) -> BudgetSet:
        answer = self.answer_to(request_id)
        assert isinstance(answer, BudgetSet)
        return answer

    def set_budget(self, budget_bytes: int, dry_run: bool = False) -> BudgetSet:
        return self.budget_set(self.ask_budget(budget_bytes, dry_run))

    def wait_for(self, holds: Callable[[LendingState], bool]) -> LendingState:
        """Ask until it holds."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not holds(state := self.show()):
            assert time.monotonic() < deadline_s, state
            time.sleep(0.005)
        return state


class LendingProcess(Admin):
    """One such engine, seen from the test. It is killed at the end unless it has ended."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.lending.leases_address)
        self.setup = setup
        self.start()

    def start(self) -> None:
        """Start it again, after it was killed."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.lease.lending_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select sees all unread output
        )
        self.write(msgspec.json.encode(self.setup))

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        self.kill()
        super().close()

    def obey(self, command: str, **args: object) -> None:
        self.write(json.dumps({"command": command, **args}).encode())

    def finished_request(self) -> int:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], TIMEOUT_S)[0], "no request has ended"
        return int(self.process.stdout.readline())


class Node:
    """A context manager: lenders and borrowers in one directory, every lender linked to every borrower."""

    def __init__(
        self,
        lenders: Sequence[str] = ("w",),
        borrowers: Sequence[str] = ("m",),
        lender_layers: int = 2,
        borrower_layers: int = 3,
        num_blocks: int = 48,
        budget: float = 1.0,  # of the lender's pool
        window_s: float = 0.2,
        failing_attaches: int = 0,
        gated: bool = False,  # see `Setup.gate`
        policy: Literal["total", "longest"] = "total",
        start: Sequence[str] | None = None,  # None: all
    ) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="swiftkv-lease-")
        self.gate = Path(self.directory.name, "gate") if gated else None
        if self.gate is not None:
            os.mkfifo(self.gate)
        # An extent holds the least common multiple of both blocks: 6 layer blocks.
        extent_layer_blocks = int(np.lcm(lender_layers, borrower_layers))
        meu_w, meu_m = extent_layer_blocks // lender_layers, extent_layer_blocks // borrower_layers
        self.link = LinkGeometry(0, 0, meu_w, meu_m, extent_layer_blocks * LAYER_BLOCK_BYTES, num_blocks // meu_w, 0, 1)
        self.pool_bytes = num_blocks * lender_layers * LAYER_BLOCK_BYTES
        self.setups: dict[str, Setup] = {}
        for name, layers, owes, owed in [
            *((name, lender_layers, [], borrowers) for name in lenders),
            *((name, borrower_layers, lenders, []) for name in borrowers),
        ]:
            spec = LendingSpec(
                leases_address=self.address(name),
                lenders=[PeerSpec(peer, self.address(peer), [self.link]) for peer in owes],
                borrowers=[PeerSpec(peer, self.address(peer), [self.link]) for peer in owed],
                budget_bytes=int(budget * self.pool_bytes),
                window_s=window_s,
                policy=policy,
                transport="shm",
                stream_buffers=1,
                rendezvous=self.directory.name,
                max_wait_s=10.0,
            )
            self.setups[name] = Setup(
                name,
                [Group(layers, num_blocks)],
                spec,
                failing_attaches if owes else 0,
                str(self.gate) if self.gate is not None else None,
            )
        self.processes: dict[str, LendingProcess] = {}
        self.to_start = list(self.setups) if start is None else start

    def address(self, name: str) -> str:
        return f"ipc://{self.directory.name}/{name}"

    def __enter__(self) -> Node:
        for name in self.to_start:
            self.processes[name] = LendingProcess(self.setups[name])
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.close()
        self.directory.cleanup()

    def __getitem__(self, name: str) -> LendingProcess:
        return self.processes[name]


def lent(state: LendingState) -> list[int]:
    """Return the extents lent over each link; while something is on its way, a value that equals nothing."""
    moving = any(link.counts["offered"] or link.counts["recalled"] for link in state.lends)
    return [-1 if moving else link.counts["lent"] for link in state.lends]


def held(state: LendingState) -> list[int]:
    """Return the extents held over each link, if none is recalled."""
    return [-1 if link.counts["recalled"] else link.counts["held"] for link in state.borrows]


def agrees(lend: LinkState, borrow: LinkState) -> bool:
    """Whether the replica is the table: everything lent is held at the same epoch, and nothing else is."""
    assert lend.states is not None
    assert lend.epochs is not None
    assert borrow.states is not None
    assert borrow.epochs is not None
    is_lent = np.frombuffer(lend.states, np.uint8) == 2
    is_held = np.frombuffer(borrow.states, np.uint8) == 1
    epochs, replica = np.frombuffer(lend.epochs, np.uint32), np.frombuffer(borrow.epochs, np.uint32)
    return bool((is_lent == is_held).all() and (epochs[is_lent] == replica[is_lent]).all())


if __name__ == "__main__":
    EngineWithoutModel(msgspec.json.decode(sys.stdin.buffer.raw.readline(), type=Setup), publish).run()  # type: ignore[attr-defined]
