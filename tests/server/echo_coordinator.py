"""A peer for the gateway's lending routes: speaks a coordinator's ZeroMQ protocol, and lends only on paper.

`code` lends to `chat` whatever its budget allows, at once; extents that it takes back are home at once. If it lends
none, it says that its own requests needed them. `chat` says that it borrows what `code` lends at first.
"""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import zmq

from swiftkv.histogram import Histogram
from swiftkv.lease.messages import (
    BudgetSet,
    FromAdmin,
    GroupBlocks,
    LendingState,
    LinkGeometry,
    LinkState,
    SetBudget,
)

BLOCK_BYTES = 512 << 10
EXTENT_BYTES = 1 << 20
NUM_EXTENTS = 64
POOL_BYTES = NUM_EXTENTS * EXTENT_BYTES
FIRST_BUDGET_BYTES = 48 << 20
REFUSED_BUDGET_BYTES = 13 << 20  # a budget that the coordinator has something against
GEOMETRY = LinkGeometry(0, 0, 2, 3, EXTENT_BYTES, NUM_EXTENTS, 0, 1)


class EchoCoordinator:
    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.lends = name == "code"
        self.budget_bytes = FIRST_BUDGET_BYTES
        self.num_lent = FIRST_BUDGET_BYTES // EXTENT_BYTES
        self.epochs = np.zeros(NUM_EXTENTS, np.uint32)
        self.epochs[: self.num_lent] = 1
        self.recalls = 0
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.bind(address)
        self.decoder = msgspec.msgpack.Decoder(FromAdmin)

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            route, frame = self.router.recv_multipart()
            message = self.decoder.decode(frame)
            if isinstance(message, SetBudget):
                answer: object = self.set_budget(message)
            else:
                answer = self.state(message.request_id, message.with_extents)
            self.router.send_multipart([route, msgspec.msgpack.encode(answer)])

    def set_budget(self, message: SetBudget) -> BudgetSet:
        if message.budget_bytes == REFUSED_BUDGET_BYTES:
            return BudgetSet(message.request_id, self.budget_bytes, 0, 0, 0.0, "thirteen is unlucky")
        allowed = message.budget_bytes // EXTENT_BYTES
        recalled = max(0, self.num_lent - allowed)
        if not message.dry_run:
            self.budget_bytes = message.budget_bytes
            self.recalls += recalled
            self.epochs[self.num_lent : allowed] += 1
            self.num_lent = allowed
        return BudgetSet(
            message.request_id, message.budget_bytes, self.num_lent * EXTENT_BYTES, recalled * EXTENT_BYTES, 0.25
        )

    def state(self, request_id: int, with_extents: bool) -> LendingState:
        count = self.num_lent
        states = np.zeros(NUM_EXTENTS, np.uint8)
        states[:count] = 2 if self.lends else 1
        names = ("home", "lent") if self.lends else ("none", "held")
        link = LinkState(
            peer="chat" if self.lends else "code",
            peer_state="attached",
            geometry=GEOMETRY,
            counts=dict(zip(names, (NUM_EXTENTS - count, count), strict=True)),
            num_bytes=count * EXTENT_BYTES,
            heard_s_ago=0.5,
            peer_extents=count,
            states=states.tobytes() if with_extents else None,
            epochs=self.epochs.tobytes() if with_extents else None,
            no_offer_s=27.6 if self.lends and not count else None,
        )
        lent_blocks = 2 * count if self.lends else 0
        borrowed = (0, 0, 0, 0) if self.lends else (46, 30, 20, 0)  # free, used, cached, in flight
        blocks = GroupBlocks(128 - lent_blocks, 0, 0, lent_blocks, 0, 0, 0, 0, 128, *borrowed, 0)
        return LendingState(
            request_id=request_id,
            name=self.name,
            budget_bytes=self.budget_bytes if self.lends else 0,
            pool_bytes=POOL_BYTES,
            lends=[link] if self.lends else [],
            borrows=[] if self.lends else [link],
            groups=[blocks],
            messages_dropped_total=0,
            recalls_total={"budget": self.recalls, "demand": 0} if self.lends else {},
            recall_seconds=Histogram((0.1, 1.0), [0, 3, 1], 7.5) if self.lends else Histogram(()),
        )
