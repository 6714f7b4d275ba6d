"""The pins of an engine on blocks in host memory, which its steps attend to where they lie, or copy to the pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv._core import Scheduler
from swiftkv.arithmetic import ceil_div
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import drop_corrupt, verify
from swiftkv.storage.host_medium import HostMedium

Int32Array = npt.NDArray[np.int32]

_VERIFY_BYTES = 64 << 20
"""The bytes that one search verifies before the next search has its turn: a few milliseconds of work."""


class HostPins:
    """Pins blocks of some KV groups in host memory, and gives every pin back once.

    A pin belongs to the search that took it (`SearchPins`), until it is given back or the scheduler takes it over. The
    scheduler's cache keeps its pins even when other storage is attached, so this object lives as long as the engine.
    """

    def __init__(self, medium: HostMedium, groups: Collection[int], offset_bytes: int = 0) -> None:
        """The blocks of `groups` are chunks of the memory.

        If steps attend to them there, the memory begins `offset_bytes` behind the first byte of the pool.
        """
        self.groups = groups
        self._offset_bytes = offset_bytes
        self.guarded = GuardedMedium(medium, Breaker())
        """The memory as a tier reads and writes it, copying."""
        self._medium = medium
        self._num_wanted = medium.num_wanted()
        self._lock = threading.Lock()
        self._num_searched = 0  # pins that belong to searches, under the lock
        self._is_closed = False  # under the lock

    def search(self, num_cells: int) -> SearchPins:
        """Return the pins of a new search over `num_cells` blocks, none yet. Give them back in the end."""
        return SearchPins(self, num_cells)

    def before_step(self, scheduler: Scheduler) -> None:
        """Give back the pins that the scheduler has done with. Call between steps.

        If other engines want the room of pinned blocks, have it let go of those that no request uses.
        """
        num_wanted = self._medium.num_wanted()
        if num_wanted != self._num_wanted and scheduler.evict_host():
            self._num_wanted = num_wanted
        chunks = scheduler.take_unpinned()
        if len(chunks):
            self._unpin(chunks)

    def close(self) -> None:
        """Give back all pins, once all searches were given up and no step follows."""
        with self._lock:
            assert not self._num_searched, f"searches hold {self._num_searched} pins"
            self._is_closed = True
            self._medium.give_back()

    def block_at(self, offset_bytes: int) -> Tensor:
        """Return a block, uint8 [chunk bytes], by its offset from the first byte of the pool."""
        begin = offset_bytes - self._offset_bytes
        return torch.frombuffer(self._medium.memory, dtype=torch.uint8, count=self.chunk_bytes, offset=begin)

    @property
    def chunk_bytes(self) -> int:
        return self._medium.chunk_bytes

    def _block(self, chunk: int) -> memoryview:
        begin = self._medium.chunks_offset_bytes + chunk * self._medium.chunk_bytes
        return self._medium.memory[begin : begin + self._medium.chunk_bytes]

    def _unverified(
        self, cells: npt.NDArray[np.int64], keys: Sequence[bytes], chunks: Int32Array
    ) -> Iterator[_Unverified]:
        pinned = np.flatnonzero(chunks >= 0).tolist()
        headers = self._medium.headers(chunks[pinned].tolist())
        for i, header in zip(pinned, headers, strict=True):
            if header is not None:
                yield _Unverified(int(cells[i]), keys[i], int(chunks[i]), header)

    def _unpin(self, chunks: Int32Array) -> None:
        with self._lock:
            if self._is_closed:
                self._medium.give_back()  # a search that was given up has pinned blocks since
            else:
                self._medium.unpin(chunks.tolist())

    def _pin(self, keys: Sequence[bytes], deadline_s: float) -> Int32Array:
        """Return the chunk of each block that was pinned, and -1 for the others."""
        chunks = self.guarded.ask(
            lambda: self._medium.pin(keys, self._medium.chunk_bytes, deadline_s), deadline_s, [-1] * len(keys)
        )
        return np.array(chunks, np.int32)


@dataclass(frozen=True, slots=True)
class _Unverified:
    """A pinned block that neither this process nor an earlier search has verified."""

    cell: int
    key: bytes
    chunk: int
    header: bytes


class SearchPins:
    """The pins of one search, until the scheduler takes them over or they are given back.

    The loader's thread takes them and verifies the blocks. The engine's thread gives them back, perhaps at the same
    time.
    """

    def __init__(self, host: HostPins, num_cells: int) -> None:
        self._host = host
        self._chunks = np.full(num_cells, -1, np.int32)
        self._unverified: deque[_Unverified] = deque()
        self._is_over = False

    @property
    def groups(self) -> Collection[int]:
        """The KV groups whose blocks can be pinned."""
        return self._host.groups

    @property
    def chunks(self) -> Int32Array:
        """The pinned chunk of each cell, -1 where there is none: [keys * groups]."""
        return self._chunks

    def are_pinned(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of these cells have pinned chunks."""
        return self._chunks[cells] >= 0

    def take(self, cells: npt.NDArray[np.int64], keys: Sequence[bytes], deadline_s: float) -> None:
        """Pin the blocks of `cells`, which have these keys, as far as they are there. Call it once."""
        taken = self._host._pin(keys, deadline_s)
        with self._host._lock:
            if not self._is_over:
                self._chunks[cells] = taken
                self._host._num_searched += int(np.count_nonzero(taken >= 0))
                self._unverified.extend(self._host._unverified(cells, keys, taken))
                return
        self._host._unpin(taken[taken >= 0])

    @property
    def are_verified(self) -> bool:
        """Whether all pinned blocks are known to be intact."""
        return not self._unverified

    def verify(self, fingerprint: bytes) -> list[Status]:
        """Verify the next of the pinned blocks, as `SealedBackend.get` does, and return their statuses.

        Drop those that are corrupt, and give their pins back. Return nothing if all pins were given back meanwhile:
        then others may have overwritten the blocks.
        """
        count = ceil_div(_VERIFY_BYTES, self._host.chunk_bytes)
        batch = [self._unverified.popleft() for _ in range(min(count, len(self._unverified)))]
        statuses = [
            verify(memoryview(each.header), fingerprint, each.key, self._host._block(each.chunk)) for each in batch
        ]
        found = list(zip(batch, statuses, strict=True))
        bad = [each for each, status in found if status is not Status.OK]
        with self._host._lock:
            if self._is_over:
                self._unverified.clear()
                return []
            self._host._medium.note_verified([each.chunk for each, status in found if status is Status.OK])
            self._chunks[[each.cell for each in bad]] = -1
            self._host._num_searched -= len(bad)
        if bad:
            self._host._unpin(np.array([each.chunk for each in bad], np.int32))
            drop_corrupt(self._host.guarded, [each.key for each in batch], statuses)
        return statuses

    def hand_over(self, cells: npt.NDArray[np.integer]) -> None:
        """Note that the scheduler has taken over the pins of these cells."""
        with self._host._lock:
            assert (self._chunks[cells] >= 0).all(), "a cell is not pinned"
            self._chunks[cells] = -1
            self._host._num_searched -= len(cells)

    def give_back(self) -> None:
        """Give back the pins that are left. A search that is still going on keeps none."""
        with self._host._lock:
            self._is_over = True
            left = self._chunks[self._chunks >= 0]
            self._chunks[:] = -1
            self._host._num_searched -= len(left)
        if len(left):
            self._host._unpin(left)
