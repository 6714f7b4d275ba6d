"""An engine that borrows, lends and stores at once: `lending_oracle` with storage below all its pools, to the byte."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from lending_oracle import HOST_BASE_BYTES, WIDTH_BYTES, LendingEngine, LendingSetup, Marks

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
        self.load_end = 0  # of the prefix that was loaded last, in blocks
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
        if self.load_end > 0:
            self.scheduler.meet(request_id, self.load_end)
            self.waiting.discard(request_id)

    def begin_load(self, request_id: int, max_blocks: int = 1 << 20, first: int = 0) -> Transfer | None:
        """Begin to load what is below of a request's prompt from block `first` on.

        `None`: storage reads nothing, or there is no room.
        """
        found, is_resident, _ = self.scheduler.look_up(request_id)
        keys = [found[i : i + KEY_BYTES] for i in range(0, len(found), KEY_BYTES)]
        names = [(key, g) for key in keys for g in range(len(self.setup.groups))]
        pinned = self.pin_host(names, is_resident)
        is_stored = np.array([name in self.storage for name in names], np.uint8) | (pinned >= 0)
        length = self.scheduler.loadable(request_id, is_stored, max_blocks, pinned)
        blocks = []
        loading = self.scheduler.begin_load(request_id, length, min(first, length), pinned)
        self.load_end = length if len(loading[0]) else 0
        for index, group, block, offset, has_pin in zip(*(array.tolist() for array in loading), strict=True):
            cell = index * len(self.setup.groups) + group
            assert not is_resident[cell]
            assert offset == self.setup.base_bytes(group) + block * self.setup.block_bytes(group)
            assert bool(has_pin) == bool(pinned[cell] >= 0)
            self._empty_block(group, block)
            if has_pin:
                self.take_over(names[cell], block, int(pinned[cell]))
                pinned[cell] = -1
            else:
                blocks.append(Loading(group, block, self.storage[names[cell]]))
        self.unpin_chunks(pinned[pinned >= 0].tolist())
        if not blocks:
            return None
        self.transfers.append(Transfer(blocks))
        return self.transfers[-1]

    def pin_host(self, names: list[tuple[bytes, int]], is_resident: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Pin what host memory has of a prompt, and return the chunks by key and group; -1: there is none."""
        return np.full(len(names), -1, np.int32)

    def take_over(self, name: tuple[bytes, int], block: int, chunk: int) -> None:
        """Note that the scheduler has a pin."""
        raise AssertionError("there is no host memory")

    def unpin_chunks(self, chunks: list[int]) -> None:
        """Give pins back."""

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
        loading = self.loading_groups()
        for g, stats in enumerate(self.scheduler.stats().groups):
            assert stats.loading == loading.count(g)

    def loading_groups(self) -> list[int]:
        """Return the group of each block that is loading."""
        return [block.group for transfer in self.transfers for block in transfer.blocks]

    def drain(self) -> None:
        while self.planned:
            self.commit()
        for transfer in list(self.transfers):
            self.read(transfer, len(transfer.blocks))
        for request_id in list(self.waiting):
            self.let_go(request_id)
        super().drain()


@dataclass
class Chunk:
    """A chunk of host memory, which holds one block. That can be found by its key and group, unless they are `None`."""

    name: tuple[bytes, int] | None = None
    marks: list[Marks] = field(default_factory=list)  # by layer
    num_pins: int = 0


@dataclass(frozen=True)
class Coming:
    """A block that the scheduler has taken to copy its chunk there."""

    name: tuple[bytes, int]
    block: int
    chunk: int


class MovingEngine(StoringEngine):
    """Shares host memory with others, who overwrite what nobody has pinned; its steps copy blocks from there."""

    def __init__(self, setup: LendingSetup, rng: random.Random, write_policy: WritePolicy = "write_through") -> None:
        super().__init__(setup, rng, write_policy)
        self.chunks = [Chunk() for _ in range(setup.num_chunks)]
        self.coming: list[Coming] = []
        self.moving: dict[int, list[int]] = {}  # chunks, by the number of the step that copies them
        self.owed = Counter[int]()  # chunks that the scheduler has done with
        self.num_moved = 0

    # ---- host memory ----

    def store(self, max_blocks: int = 1 << 20) -> int:
        num_stored = super().store(max_blocks)
        known = {chunk.name for chunk in self.chunks}
        free = [chunk for chunk in self.chunks if chunk.name is None and chunk.num_pins == 0]
        for name, marks in self.storage.items():
            if free and name not in known and name[1] in self.setup.sources:
                chunk = free.pop(0)
                chunk.name, chunk.marks = name, [list(layer) for layer in marks]
        return num_stored

    def storage_forgets(self, name: tuple[bytes, int]) -> None:
        """Leave a block to host memory, if it is there."""
        del self.storage[name]

    def host_forgets(self, number: int) -> None:
        """Another engine takes a chunk. A pinned one can only be forgotten, as a corrupt one is."""
        chunk = self.chunks[number]
        chunk.name = None
        if chunk.num_pins == 0:
            chunk.marks = []

    def unpin_chunks(self, chunks: list[int]) -> None:
        for number in chunks:
            chunk = self.chunks[number]
            chunk.num_pins -= 1
            assert chunk.num_pins >= 0
            if chunk.num_pins == 0 and (chunk.name is None or number % 2):
                self.host_forgets(number)  # others wait for some of them

    def take_unpinned(self) -> None:
        chunks = self.scheduler.take_unpinned().tolist()
        assert Counter(chunks) == self.owed
        self.owed.clear()
        self.unpin_chunks(chunks)

    def pin_host(self, names: list[tuple[bytes, int]], is_resident: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        number_of = {chunk.name: number for number, chunk in enumerate(self.chunks) if chunk.name is not None}
        pinned = [-1 if here else number_of.get(name, -1) for name, here in zip(names, is_resident, strict=True)]
        for number in pinned:
            if number >= 0:
                self.chunks[number].num_pins += 1
        return np.array(pinned, np.int32)

    def take_over(self, name: tuple[bytes, int], block: int, chunk: int) -> None:
        self.coming.append(Coming(name, block, chunk))

    # ---- steps ----

    def schedule(self) -> bool:
        self.take_unpinned()
        is_planned = super().schedule()
        moved = self._moves_up() if is_planned else []
        num_left = sum(group.loading for group in self.scheduler.stats().groups) - len(super().loading_groups())
        if num_left:  # a step copies other blocks, and goes alone
            assert num_left == len(self.coming)
            assert not moved
            assert self.planned
            assert not is_planned or not len(self.planned[-1].plan.request_ids)
            return is_planned
        places = {(each.name[1], each.block, each.chunk): each for each in self.coming}
        assert len(set(moved)) == len(moved)
        assert set(moved) <= places.keys()
        if is_planned:
            self.moving[self.planned[-1].number] = [chunk for _, _, chunk in moved]
        self.num_moved += len(moved)
        self.owed.update(each.chunk for place, each in places.items() if place not in moved)
        self.coming.clear()
        return is_planned

    def _moves_up(self) -> list[tuple[int, int, int]]:
        """Return group, block and chunk of each block that the step planned last copies from host memory."""
        plan, moves = self.planned[-1].plan, []
        for group in range(len(self.setup.groups)):
            runs = [plan.copies(group, "load", buffer) for buffer in range(plan.num_stream_buffers)]
            ups = [part[part[:, 0] == self.host_link] for part in runs]
            assert all((part == ups[0]).all() for part in ups)
            for _, peer, local in self._layer_blocks(group, ups[0], 0) if ups else ():
                chunk, rest = divmod(peer - HOST_BASE_BYTES, self.setup.block_bytes(group))
                block, rest_of_local = divmod(local - self.setup.base_bytes(group), self.setup.block_bytes(group))
                assert rest == rest_of_local == 0
                moves.append((group, block, chunk))
        assert not moves or plan.has_copies
        return moves

    @property
    def host_link(self) -> int:
        return len(self.setup.borrow)

    def _bytes_of_peer(self, group: int, link: int, peer: int) -> Marks:
        if link != self.host_link:
            return super()._bytes_of_peer(group, link, peer)
        number, offset = divmod(peer - HOST_BASE_BYTES, self.setup.block_bytes(group))
        layer, rest = divmod(offset, WIDTH_BYTES)
        assert group in self.setup.sources
        assert rest == 0
        chunk = self.chunks[number]
        assert chunk.num_pins > 0, "a step reads what others may overwrite"
        return list(chunk.marks[layer])

    def _end_step(self) -> None:
        self.owed.update(self.moving.pop(self.planned[0].number, []))
        super()._end_step()

    # ---- checks ----

    def loading_groups(self) -> list[int]:
        return super().loading_groups() + [each.name[1] for each in self.coming]

    def check(self) -> None:
        super().check()
        moving = (chunk for chunks in self.moving.values() for chunk in chunks)
        wanted = Counter([each.chunk for each in self.coming]) + Counter(moving) + self.owed
        assert [chunk.num_pins for chunk in self.chunks] == [wanted[i] for i in range(len(self.chunks))]

    def drain(self) -> None:
        super().drain()
        self.take_unpinned()
        assert all(chunk.num_pins == 0 for chunk in self.chunks), "a pin is kept by an engine at rest"


def _arrays(blocks: list[Loading]) -> tuple[np.ndarray, np.ndarray]:
    """Return groups and blocks, as the core wants them."""
    groups = np.array([loading.group for loading in blocks], np.int32)
    return groups, np.array([loading.block for loading in blocks], np.int32)
