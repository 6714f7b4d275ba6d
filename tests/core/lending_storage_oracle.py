"""An engine that borrows, lends and stores at once: `lending_oracle` with storage below all its pools, to the byte."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from lending_oracle import WIDTH_BYTES, LendingEngine, LendingSetup, Marks

from swiftkv import _core
from swiftkv.policies import WritePolicy

KEY_BYTES = 32


@dataclass(frozen=True)
class Loading:
    """A block on its way up, with the bytes that storage has of it."""

    group: int
    block: int
    marks: list[Marks]  # by layer


@dataclass(eq=False)
class Transfer:
    """Blocks that are being read for a request, in order."""

    blocks: list[Loading]
    end: int  # of the prefix that is loaded, in blocks
    is_forgotten: bool = False


class StoringEngine(LendingEngine):
    """Stores what the scheduler offers, wherever it lies, and checks every byte; loads it again as far as it may."""

    def __init__(self, setup: LendingSetup, rng: random.Random, write_policy: WritePolicy = "write_through") -> None:
        super().__init__(setup, rng)
        self.scheduler.set_write_policy(write_policy)
        self.storage: dict[tuple[bytes, int], list[Marks]] = {}
        self.transfers: list[Transfer] = []
        self.waiting: set[int] = set()  # requests that are held
        self.num_stored_from_lenders = 0
        self._marks_of: dict[bytes, list[int]] = {}  # the prefixes that end at each token of a block, by its key

    # ---- requests ----

    def add(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        *,
        skip_prefix_match: bool = False,
        priority: int = 0,
    ) -> None:
        super().add(request_id, prompt, max_tokens, skip_prefix_match=skip_prefix_match, priority=priority)
        self._note_keys(prompt)

    def add_held(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self.add(request_id, prompt, max_tokens)
        self.scheduler.hold(request_id)
        self.waiting.add(request_id)

    def let_go(self, request_id: int) -> None:
        self.scheduler.let_go(request_id)
        self.waiting.discard(request_id)

    def abort(self, request_id: int) -> None:
        super().abort(request_id)
        self.waiting.discard(request_id)

    def schedule(self) -> bool:
        is_planned = super().schedule()
        if is_planned:
            assert not self.waiting & set(self.planned[-1].plan.request_ids.tolist()), "who is held runs"
        return is_planned

    def _append(self, request_id: int, token: int, reason: int) -> None:
        tokens = self.requests[request_id].tokens
        super()._append(request_id, token, reason)
        if len(tokens) % self.setup.block_size == 0:
            self._note_keys(tokens)

    def _note_keys(self, tokens: list[int]) -> None:
        size = self.setup.block_size
        keys = _core.block_keys(b"", np.array(tokens, np.int32), size)
        prefixes = self.prefixes.of(b"", tokens)
        for i in range(len(tokens) // size):
            self._marks_of[keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]] = prefixes[i * size : (i + 1) * size]

    # ---- down ----

    def store(self, max_blocks: int = 1 << 20) -> int:
        """Copy down what is on offer. Returns how many blocks that were."""
        keys, groups, links, offsets = self.scheduler.take_offers(max_blocks)
        places = zip(groups.tolist(), links.tolist(), offsets.tolist(), strict=True)
        for i, (group, link, offset) in enumerate(places):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            num_layers = self.setup.groups[group][0]
            marks = [self._bytes_at(group, link, offset + layer * WIDTH_BYTES) for layer in range(num_layers)]
            assert marks == [[(prefix, group, layer) for prefix in self._marks_of[key]] for layer in range(num_layers)]
            self.storage[key, group] = marks
            self.num_stored_from_lenders += link >= 0
        self.scheduler.end_copying()
        assert len(groups) <= max_blocks
        return len(groups)

    def _bytes_at(self, group: int, link: int, offset: int) -> Marks:
        if link < 0:
            return list(self.local.get(offset, []))
        self._may_reach(group, link, offset)
        return list(self.peers[link].get(offset, []))

    # ---- up ----

    def meet(self, request_id: int, first: int) -> None:
        """Begin to load the back of a request's prompt, from its end, and have it compute its front meanwhile."""
        transfer = self.begin_load(request_id, first=first)
        if transfer is not None:
            transfer.blocks.reverse()
            self.scheduler.meet(request_id, transfer.end)
            self.waiting.discard(request_id)

    def begin_load(self, request_id: int, max_blocks: int = 1 << 20, first: int = 0) -> Transfer | None:
        """Begin to load what storage has of a request's prompt from block `first` on; `None`: nothing, or no room."""
        found, is_resident, _ = self.scheduler.look_up(request_id)
        keys = [found[i : i + KEY_BYTES] for i in range(0, len(found), KEY_BYTES)]
        groups = range(len(self.setup.groups))
        is_stored = np.array([(key, g) in self.storage for key in keys for g in groups], np.uint8)
        length = self.scheduler.loadable(request_id, is_stored, max_blocks)
        blocks = []
        loading = self.scheduler.begin_load(request_id, length, min(first, length))
        for index, group, block, offset in zip(*(array.tolist() for array in loading), strict=True):
            assert not is_resident[index * len(groups) + group]
            assert offset == self.setup.base_bytes(group) + block * self.setup.block_bytes(group)
            blocks.append(Loading(group, block, self.storage[keys[index], group]))
            self._empty_block(group, block)
        if not blocks:
            return None
        self.transfers.append(Transfer(blocks, length))
        return self.transfers[-1]

    def read(self, transfer: Transfer, num_blocks: int, is_loaded: bool = True) -> None:
        """Storage has read the next blocks, or did not."""
        part, transfer.blocks = transfer.blocks[:num_blocks], transfer.blocks[num_blocks:]
        for loading in part:
            first = self.setup.base_bytes(loading.group) + loading.block * self.setup.block_bytes(loading.group)
            for layer, marks in enumerate(loading.marks):
                self.local[first + layer * WIDTH_BYTES] = list(marks) if is_loaded else [None] * len(marks)
        self.scheduler.end_load(*_arrays(part), is_loaded)
        if not transfer.blocks:
            self.transfers.remove(transfer)

    def give_up(self, transfer: Transfer) -> None:
        """Nobody waits for the rest any more, though storage may still write to it."""
        self.scheduler.forget_loading(*_arrays(transfer.blocks))
        transfer.is_forgotten = True

    # ---- checks ----

    def check(self) -> None:
        super().check()
        loading = [0] * len(self.setup.groups)
        for transfer in self.transfers:
            for block in transfer.blocks:
                loading[block.group] += 1
        assert [group.loading for group in self.scheduler.stats().groups] == loading

    def drain(self) -> None:
        while self.planned:
            self.commit()
        for transfer in list(self.transfers):
            self.read(transfer, len(transfer.blocks))
        for request_id in list(self.waiting):
            self.let_go(request_id)
        super().drain()


def _arrays(blocks: list[Loading]) -> tuple[np.ndarray, np.ndarray]:
    """Return groups and blocks, as the core wants them."""
    groups = np.array([loading.group for loading in blocks], np.int32)
    return groups, np.array([loading.block for loading in blocks], np.int32)
