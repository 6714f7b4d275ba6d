"""A simulated engine that attends to blocks in host memory, where others overwrite whatever nobody has pinned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from naive_scheduler import Setup
from storage_oracle import KEY_BYTES, StorageEngine

from swiftkv import _core

HOST = 2  # the place of a block in host memory


@dataclass
class Chunk:
    """A chunk of host memory. Its block can be found under `key`, unless that is `None`."""

    key: bytes | None = None
    num_pins: int = 0


class HostEngine(StorageEngine):
    """Stores blocks of the first group with full attention in host memory, too, and attends to them there."""

    def __init__(self, setup: Setup, write_policy: str, num_chunks: int, num_lent_extents: int = 0) -> None:
        self.host_group = next(g for g, (_, _, window) in enumerate(setup.groups) if not window)
        num_layers, num_blocks, _ = setup.groups[self.host_group]
        self.first, self.stride = num_layers * num_blocks + 5, num_layers + 1  # where chunks begin, in layer blocks
        self.num_local = num_blocks
        self.chunks = [Chunk() for _ in range(num_chunks)]
        self.num_attended = 0  # blocks that were taken in host memory
        super().__init__(setup, write_policy, num_lent_extents)
        for number in range(num_chunks):
            self._spoil_chunk(number)

    def _host_chunks(self, group: int) -> tuple[int, int, int]:
        return (self.first, self.stride, len(self.chunks)) if group == self.host_group else (0, 1, 0)

    def block_at(self, group: int, entry: int) -> int:
        if group != self.host_group or entry < self.first:
            return super().block_at(group, entry)
        number, rest = divmod(entry - self.first, self.stride)
        assert rest == 0
        assert self.chunks[number].num_pins > 0, "a step reads what others may overwrite"
        return self.num_local + number

    def store(self, max_blocks: int = 1 << 20) -> int:
        self.unpin_unused()
        num_stored = super().store(max_blocks)
        for (key, group), numbers in self.storage.items():
            if group == self.host_group:
                self._put(key, numbers)
        return num_stored

    def _put(self, key: bytes, numbers: list[int]) -> None:
        """Write a block to host memory if a chunk there is free."""
        if any(chunk.key == key for chunk in self.chunks):
            return
        for number, chunk in enumerate(self.chunks):
            if chunk.key is None and chunk.num_pins == 0:
                chunk.key = key
                self.fill(self.host_group, self.num_local + number, numbers)
                return

    def host_forgets(self, number: int) -> None:
        """Another engine takes a chunk that nobody has pinned. A pinned one can only be forgotten, as a corrupt one."""
        chunk = self.chunks[number % len(self.chunks)]
        chunk.key = None
        if chunk.num_pins == 0:
            self._spoil_chunk(number % len(self.chunks))

    def _spoil_chunk(self, number: int) -> None:
        self.fill(self.host_group, self.num_local + number, [-1] * self.setup.block_size)

    def pin_host(self, request_id: int) -> npt.NDArray[np.int32] | None:
        found, is_resident, _ = self.scheduler.look_up(request_id)
        chunk_of = {chunk.key: number for number, chunk in enumerate(self.chunks) if chunk.key is not None}
        pinned = np.full(len(is_resident), -1, np.int32)
        for i in range(len(found) // KEY_BYTES):
            cell = i * len(self.windows) + self.host_group
            if not is_resident[cell]:
                pinned[cell] = chunk_of.get(found[i * KEY_BYTES : (i + 1) * KEY_BYTES], -1)
        for number in pinned[pinned >= 0].tolist():
            self.chunks[number].num_pins += 1
        return pinned

    def unpin_rest(self, pinned: npt.NDArray[np.int32] | None, taken: list[tuple[int, int, int]]) -> None:
        assert pinned is not None
        left = set(pinned[pinned >= 0].tolist())
        for index, group, block in taken:
            if self.is_of_host(group, block):
                assert pinned[index * len(self.windows) + group] == block - self.num_local
                left.remove(block - self.num_local)
                self.num_attended += 1
        for number in left:
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        self.chunks[number].num_pins -= 1
        assert self.chunks[number].num_pins >= 0
        if self.chunks[number].num_pins == 0 and self.chunks[number].key is None:
            self._spoil_chunk(number)

    def unpin_unused(self) -> None:
        """Give back the pins of chunks that the scheduler does not use any more; others overwrite some at once."""
        for number in self.scheduler.take_unpinned().tolist():
            self._unpin(number)
            if number % 2:
                self.host_forgets(number)

    def is_in_host(self, key: bytes, group: int) -> bool:
        keys, groups, places = self.scheduler.resident_blocks()
        resident = {
            (keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], g)
            for i, (g, place) in enumerate(zip(groups.tolist(), places.tolist(), strict=True))
            if place == HOST
        }
        verifying = {
            (transfer.keys[index], g)
            for transfer in self.transfers
            for index, g, block in transfer.blocks
            if self.is_of_host(g, block)
        }
        return (key, group) in resident | verifying

    def has_bytes(self, key: bytes, group: int, block: int) -> bool:
        return self.is_of_host(group, block) or super().has_bytes(key, group, block)

    def schedule(self) -> _core.StepPlan | None:
        self.unpin_unused()
        return super().schedule()

    def drain(self) -> None:
        super().drain()
        assert self.scheduler.evict_host()
        self.unpin_unused()
        assert all(chunk.num_pins == 0 for chunk in self.chunks)

    def check(self) -> None:
        super().check()
        group = self.scheduler.stats().groups[self.host_group]
        num_held = group.host_used + group.host_cached + group.host_in_flight + group.host_loading
        num_pins = sum(chunk.num_pins for chunk in self.chunks)
        assert num_pins >= num_held
        if not self.plans:
            self.unpin_unused()
            assert sum(chunk.num_pins for chunk in self.chunks) == num_held, "a pin is lost, or was given back twice"
