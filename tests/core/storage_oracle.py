"""A simulated engine with storage below its pool, which knows what bytes lie in every block and in every object.

Every read of a block is checked, as in `kv_oracle`; there is no oracle of what is scheduled beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
import numpy.typing as npt
from kv_oracle import Engine, Row, rows_of
from naive_scheduler import Setup

from swiftkv import _core
from swiftkv._core import GroupSpec, Link, Scheduler

KEY_BYTES = 32


@dataclass(eq=False)
class Transfer:
    """Blocks that are being read for a request, in order: (index, group, block)."""

    request_id: int
    keys: list[bytes]
    blocks: list[tuple[int, int, int]]
    is_forgotten: bool = False


def naive_usable(is_there: npt.NDArray[np.bool_], windows: list[int], block_size: int) -> int:
    """Return the longest prefix that can be used, block by block and from its definition."""
    for length in range(len(is_there), 0, -1):
        first = [max(0, length - -(-(window - 1) // block_size)) if window else 0 for window in windows]
        if all(is_there[begin:length, g].all() for g, begin in enumerate(first)):
            return length
    return 0


class StorageEngine(Engine):
    """Stores what the scheduler offers, and loads it again in pieces that may fail."""

    def __init__(self, setup: Setup, write_policy: str = "write_through", num_lent_extents: int = 0) -> None:
        super().__init__(setup)
        self.predicted_by = []
        # A layer block has one byte, so that an offset is the number of a layer block.
        sizes = setup.blocks_per_extent or [0] * len(setup.groups)
        specs = [
            GroupSpec(*group, 1, 0, size, *self._host_chunks(g))
            for g, (group, size) in enumerate(zip(setup.groups, sizes, strict=True))
        ]
        self.scheduler = Scheduler(
            specs,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            enable_prefix_caching=setup.enable_prefix_caching,
            enable_chunked_prefill=setup.enable_chunked_prefill,
            lend_links=[Link(0, num_lent_extents, 2)] if num_lent_extents else [],
            retention_interval=setup.retention_interval,
        )
        self.write_policy = write_policy
        self.scheduler.set_write_policy(write_policy)  # type: ignore[arg-type]
        self.storage: dict[tuple[bytes, int], list[int]] = {}
        self.transfers: list[Transfer] = []
        self.held: set[int] = set()
        self.backs: dict[int, int] = {}  # the blocks up to which backs are loaded, by request that computes its front
        self.begins: dict[int, int] = {}  # the blocks that requests found when they began, by request
        self.brought: dict[int, int] = {}  # the blocks up to which something was loaded, by request that has not begun
        self.lent: list[int] = []
        self.unsure: set[int] = set()  # requests that may have given up their backs
        self.num_met = 0  # backs that requests came to
        self.windows = [window for _, _, window in setup.groups]

    def _host_chunks(self, group: int) -> tuple[int, int, int]:
        """Return where a group's chunks of host memory begin, how far apart they are, and how many there are."""
        return 0, 1, 0

    def add_held(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int = 4,
        namespace: bytes = b"",
        priority: int = 0,
        flow: int = 0,
    ) -> None:
        self.add(request_id, prompt, max_tokens, namespace=namespace, priority=priority, flow=flow)
        self.scheduler.hold(request_id)
        self.held.add(request_id)

    def let_go(self, request_id: int) -> None:
        self.scheduler.let_go(request_id)
        self.held.discard(request_id)

    def abort(self, *request_ids: int) -> None:
        super().abort(*request_ids)
        self.held.difference_update(request_ids)
        for request_id in request_ids:
            self.backs.pop(request_id, None)
            self.brought.pop(request_id, None)

    def schedule(self) -> _core.StepPlan | None:
        before = {request_id: self._is_here(request_id) for request_id in self.backs}
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            rows = rows_of(plan)
            self._note_meetings(plan)
            self._note_admissions(plan)
            self._check_budget(rows)
            for request_id, cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
                self.begins[request_id] = cached // self.setup.block_size
                self.brought.pop(request_id, None)
            for row in rows:
                assert row.request_id not in self.held
                self._check_progress(self.requests[row.request_id], row)
                if row.request_id in self.backs:
                    self._check_front(row, before[row.request_id])
            for request_id in plan.preempted_request_ids.tolist():
                self.backs.pop(request_id, None)
            self.plans.append(plan)
            self.drafts.append({i: [] for i in plan.request_ids[plan.logits_seqs].tolist()})
        return plan

    def store(self, max_blocks: int = 1 << 20) -> int:
        """Copy down what is on offer. Returns how many blocks that were."""
        is_on_offer = self.write_policy != "write_back" or self.scheduler.num_offers() or not self._is_a_quarter_free()
        keys, groups, links, offsets = self.scheduler.take_offers(max_blocks)
        self.scheduler.end_copying()
        assert is_on_offer or not len(groups)
        assert (links == -1).all()
        assert len(keys) == KEY_BYTES * len(groups)
        assert len(groups) <= max_blocks
        for i, (group, offset) in enumerate(zip(groups.tolist(), offsets.tolist(), strict=True)):
            numbers = self.numbers(group, self.block_at(group, offset))
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            assert self.storage.setdefault((key, group), numbers) == numbers, "one key names different bytes"
        return len(groups)

    def _is_a_quarter_free(self) -> bool:
        """Whether a quarter of every group's blocks is free, or nobody's: then write-back wants nothing."""
        groups = self.scheduler.stats().groups
        sizes = self.setup.blocks_per_extent or [0] * len(groups)
        num_held = sum((g.total - g.elsewhere) // size for g, size in zip(groups, sizes, strict=True) if size)
        unheld = self.setup.num_extents - num_held if self.setup.blocks_per_extent else 0
        return all(g.free + unheld * size >= (g.total - g.lent) // 4 for g, size in zip(groups, sizes, strict=True))

    def look_up(self, request_id: int) -> tuple[list[bytes], npt.NDArray[np.bool_], int]:
        found, is_resident, num_usable = self.scheduler.look_up(request_id)
        keys = [found[i : i + KEY_BYTES] for i in range(0, len(found), KEY_BYTES)]
        resident = is_resident.astype(bool).reshape(len(keys), len(self.windows))
        assert num_usable == naive_usable(resident, self.windows, self.setup.block_size)
        return keys, resident, num_usable

    def _is_here(self, request_id: int) -> list[bool | None]:
        """Return for each block before the end of a request's back whether all that it needs of it is here.

        `None`: it is loading.
        """
        end = self.backs[request_id]
        found, is_resident, _ = self.scheduler.look_up(request_id)
        resident = is_resident.reshape(-1, len(self.windows)).astype(bool)
        loading = {
            (transfer.keys[index], group)
            for transfer in self.transfers
            if not transfer.is_forgotten
            for index, group, _ in transfer.blocks
        }
        blocks: list[bool | None] = []
        for i in range(min(end, len(resident))):
            groups = [g for g, first in enumerate(self._first_needed(end)) if i >= first]
            key = found[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            is_coming = any((key, g) in loading for g in groups)
            blocks.append(False if not resident[i, groups].all() else None if is_coming else True)
        return blocks

    def _first_needed(self, length: int) -> list[int]:
        """Return the first block that each group needs of a prefix of so many blocks."""
        size = self.setup.block_size
        return [max(0, length - -(-(window - 1) // size)) if window else 0 for window in self.windows]

    def _note_meetings(self, plan: _core.StepPlan) -> None:
        """Go on behind the backs of requests, which must be here."""
        for request_id, (first, end) in zip(plan.met_request_ids.tolist(), plan.met_blocks.tolist(), strict=True):
            if request_id not in self.requests:
                continue  # it has ended since
            request = self.requests[request_id]
            assert request.computed is not None
            assert first == request.computed // self.setup.block_size
            assert end == self.backs.pop(request_id)
            request.computed = end * self.setup.block_size
            self.num_met += 1

    def _check_front(self, row: Row, before: list[bool | None]) -> None:
        """Check that a front ends where its back begins.

        It goes on at most half-way to the part that is here, and less where more was loaded than computed.
        """
        end = self.backs[row.request_id]
        if self._is_here(row.request_id) != before:
            self.unsure.add(row.request_id)  # the step has taken some of it, before it looked or after
        if row.request_id in self.unsure:
            return
        first = row.begin // self.setup.block_size
        if first >= end or before[end - 1] is False:
            del self.backs[row.request_id]  # all of it was here when the request began, or it has failed
            return
        coming = end - next(i for i, is_here in enumerate([*before[::-1], False]) if is_here is False)
        here = end - next(i for i, is_here in enumerate([*before[::-1], False]) if not is_here)
        assert here > first, "the back is here"
        num_computed, num_loaded = first - self.begins[row.request_id], end - here
        share = min(Fraction(1, 2), Fraction(num_computed + 1, num_computed + num_loaded + 2))
        limit = coming if coming > first else first + ceil(share * (here - first))
        assert row.end <= limit * self.setup.block_size

    def begin_load(self, request_id: int, max_blocks: int = 1 << 20, first: int = 0) -> Transfer | None:
        """Begin to load what storage has of a request's prompt, from block `first` on.

        `None`: nothing, or there is no room.
        """
        pinned = self.pin_host(request_id)
        length, keys, resident, stored = self._loadable(request_id, max_blocks, pinned)
        first = min(first, length)
        blocks = []
        before = self._brought_for_others(request_id)
        loading = self.scheduler.begin_load(request_id, length, first, pinned)
        assert before <= self._brought_for_others(request_id), "one load evicts what another has brought"
        for index, group, block, offset, has_pin in zip(*(array.tolist() for array in loading), strict=True):
            assert bool(has_pin) == self.is_of_host(group, block)
            assert not resident[index, group]
            assert stored[index, group]
            assert self.block_at(group, offset) == block
            blocks.append((index, group, block))
        self.unpin_rest(pinned, blocks)
        if not blocks:
            return None
        begins = self._first_needed(length)
        missing = {(i, g) for g, begin in enumerate(begins) for i in range(begin, length) if not resident[i, g]}
        assert {(index, group) for index, group, _ in blocks} == {(i, g) for i, g in missing if i >= first}
        self.transfers.append(Transfer(request_id, keys, blocks))
        self.brought[request_id] = length
        return self.transfers[-1]

    def _brought_for_others(self, request_id: int) -> set[tuple[int, int, int]]:
        """Return what is here of the prefixes that were loaded for others that go before: (request, index, group).

        Lending may leave less than a request needs: then it keeps nothing from others.
        """
        priority = self.requests[request_id].priority
        return {
            (other, index, group)
            for other, end in self.brought.items()
            if other != request_id and self.requests[other].priority <= priority and not self.lent
            for group, first in enumerate(self._first_needed(end))
            for index in range(first, end)
            if self.look_up(other)[1][index, group]
        }

    def meet(self, request_id: int, first: int, max_blocks: int = 1 << 20) -> Transfer | None:
        """Begin to load the back of a request's prompt, from its end, and have it compute its front meanwhile."""
        pinned = self.pin_host(request_id)
        length = self._loadable(request_id, max_blocks, pinned)[0]
        self.unpin_rest(pinned, [])
        transfer = self.begin_load(request_id, max_blocks, first)
        if transfer is not None:
            transfer.blocks.sort(reverse=True)
        self.scheduler.meet(request_id, length)
        self.held.discard(request_id)
        if length > 0:
            self.backs[request_id] = length
        return transfer

    def pin_host(self, request_id: int) -> npt.NDArray[np.int32] | None:
        """Pin what host memory has of a prompt, and return the chunks by key and group. `None`: nothing is pinned."""
        return None

    def unpin_rest(self, pinned: npt.NDArray[np.int32] | None, taken: list[tuple[int, int, int]]) -> None:
        """Give back the pins that the scheduler has not taken over."""

    def is_pinned(self, pinned: npt.NDArray[np.int32] | None, index: int, group: int) -> bool:
        return pinned is not None and bool(pinned[index * len(self.windows) + group] >= 0)

    def _loadable(
        self, request_id: int, max_blocks: int, pinned: npt.NDArray[np.int32] | None
    ) -> tuple[int, list[bytes], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return how many blocks of a request could be used, its keys, and which blocks are here and in storage."""
        keys, resident, num_usable = self.look_up(request_id)
        stored = np.array(
            [
                [(key, g) in self.storage or self.is_pinned(pinned, i, g) for g in range(len(self.windows))]
                for i, key in enumerate(keys)
            ],
            bool,
        )
        stored = stored.reshape(resident.shape)
        length = self.scheduler.loadable(request_id, stored.astype(np.uint8).ravel(), max_blocks, pinned)
        max_blocks = min(max_blocks, *self._local_room(keys, resident, pinned))
        assert length == naive_usable((resident | stored)[:max_blocks], self.windows, self.setup.block_size)
        assert length >= num_usable or num_usable > max_blocks  # a shorter prefix may lack the tail of its end
        return length, keys, resident, stored

    def _local_room(
        self, keys: list[bytes], resident: npt.NDArray[np.bool_], pinned: npt.NDArray[np.int32] | None
    ) -> list[int]:
        """Return for each full-attention group how many leading blocks fit in its pool, and a large number."""
        stats = self.scheduler.stats().groups
        return [
            1 << 20,
            *(
                self._prefix_in(g, group.total - group.lent, keys, resident, pinned)
                for g, group in enumerate(stats)
                if not self.windows[g]
            ),
        ]

    def _prefix_in(
        self,
        group: int,
        num_local: int,
        keys: list[bytes],
        resident: npt.NDArray[np.bool_],
        pinned: npt.NDArray[np.int32] | None,
    ) -> int:
        """Return how many leading blocks fit in so many local blocks of a group; those in host memory need none."""
        for i, key in enumerate(keys):
            is_in_host = self.is_in_host(key, group) if resident[i, group] else self.is_pinned(pinned, i, group)
            num_local -= not is_in_host
            if num_local < 0:
                return i
        return 1 << 20

    def is_in_host(self, key: bytes, group: int) -> bool:
        """Whether the prefix index has the block in host memory."""
        return False

    def read(self, transfer: Transfer, num_blocks: int, is_loaded: bool = True) -> None:
        """Storage has read the next blocks, or did not."""
        part, transfer.blocks = transfer.blocks[:num_blocks], transfer.blocks[num_blocks:]
        is_loaded &= all(self.has_bytes(transfer.keys[index], group, block) for index, group, block in part)
        for index, group, block in part:
            if self.is_of_host(group, block):
                continue
            numbers = self.storage.get((transfer.keys[index], group), [-1] * self.setup.block_size)
            self.fill(group, block, numbers if is_loaded else [-1] * self.setup.block_size)
        groups, blocks = (np.array([block[i] for block in part], np.int32) for i in (1, 2))
        self.scheduler.end_load(groups, blocks, is_loaded)
        if not transfer.blocks:
            self.transfers.remove(transfer)

    def has_bytes(self, key: bytes, group: int, block: int) -> bool:
        """Whether a block can be read: storage may forget it meanwhile."""
        return (key, group) in self.storage

    def is_of_host(self, group: int, block: int) -> bool:
        return block >= self.setup.groups[group][1]

    def give_up(self, transfer: Transfer) -> None:
        """Nobody waits for the rest any more, though storage may still write to it."""
        groups, blocks = (np.array([block[i] for block in transfer.blocks], np.int32) for i in (1, 2))
        self.scheduler.forget_loading(groups, blocks)
        transfer.is_forgotten = True
        for _, group, block in transfer.blocks:
            if not self.is_of_host(group, block):
                self.fill(group, block, [-1] * self.setup.block_size)

    def lend(self, max_extents: int) -> None:
        self.lent += (extents := self.scheduler.lend(0, max_extents).tolist())
        for extent in extents:
            for block in (2 * extent, 2 * extent + 1):
                self.fill(0, block, [-1] * self.setup.block_size)

    def take_back(self) -> None:
        extents, self.lent = self.lent, []
        if extents:
            self.scheduler.take_back(0, np.array(extents, np.int32))

    def drain(self) -> None:
        while self.plans:
            self.commit()
        for transfer in list(self.transfers):
            self.read(transfer, len(transfer.blocks))
        for request_id in list(self.held):
            self.let_go(request_id)
        self.take_back()
        super().drain()

    def check(self) -> None:
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.requests)
        loading = [0] * len(self.windows)
        for transfer in self.transfers:
            for _, group, _ in transfer.blocks:
                loading[group] += 1
        assert [group.loading + group.host_loading for group in stats.groups] == loading
