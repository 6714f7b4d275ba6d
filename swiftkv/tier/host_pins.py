"""The pins of an engine on blocks in host memory, which its steps attend to where they lie."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import drop_corrupt, verify
from swiftkv.storage.host_medium import HostMedium

Int32Array = npt.NDArray[np.int32]


class HostPins:
    """Pins blocks of one KV group in host memory, and gives every pin back once.

    A pin belongs to the search that took it (`SearchPins`), and then perhaps to the scheduler, whose cache keeps blocks
    pinned, whatever storage is attached meanwhile. So this object lives as long as the engine.
    """

    def __init__(self, medium: HostMedium, group: int) -> None:
        """`group` is the KV group whose blocks are chunks of the memory."""
        self.group = group
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

    def verify(self, keys: Sequence[bytes], chunks: Sequence[int], fingerprint: bytes) -> list[Status]:
        """Return whether pinned blocks are intact, as `SealedBackend.get` does, and drop those that are not."""
        headers = self._medium.headers(chunks)
        statuses = [
            Status.OK if header is None else verify(memoryview(header), fingerprint, key, self._block(chunk))
            for key, chunk, header in zip(keys, chunks, headers, strict=True)
        ]
        self._medium.note_verified(
            [chunk for chunk, status in zip(chunks, statuses, strict=True) if status is Status.OK]
        )
        drop_corrupt(self.guarded, keys, statuses)
        return statuses

    def close(self) -> None:
        """Give back all pins, once all searches were given up and no step follows."""
        with self._lock:
            assert not self._num_searched, f"searches hold {self._num_searched} pins"
            self._is_closed = True
            self._medium.give_back()

    def _block(self, chunk: int) -> memoryview:
        begin = self._medium.chunks_offset_bytes + chunk * self._medium.chunk_bytes
        return self._medium.memory[begin : begin + self._medium.chunk_bytes]

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


class SearchPins:
    """The pins of one search, until the scheduler takes them over or they are given back.

    The loader's thread takes them, and the engine's thread gives them back. Either may come first: the search may be
    given up while the thread is at it.
    """

    def __init__(self, host: HostPins, num_cells: int) -> None:
        self._host = host
        self._chunks = np.full(num_cells, -1, np.int32)
        self._is_over = False

    @property
    def group(self) -> int:
        return self._host.group

    @property
    def chunks(self) -> Int32Array:
        """The pinned chunk of each cell, -1 where there is none: [keys * groups]."""
        return self._chunks

    def take(self, cells: npt.NDArray[np.int64], keys: Sequence[bytes], deadline_s: float) -> npt.NDArray[np.bool_]:
        """Pin the blocks of `cells`, which have these keys, and return which are pinned. Call it once."""
        taken = self._host._pin(keys, deadline_s)
        with self._host._lock:
            if not self._is_over:
                self._chunks[cells] = taken
                self._host._num_searched += int(np.count_nonzero(taken >= 0))
                return taken >= 0
        self._host._unpin(taken[taken >= 0])
        return np.zeros(len(cells), np.bool_)

    def hand_over(self, cell: int) -> int:
        """Note that the scheduler has taken over the pin of a cell, and return its chunk."""
        with self._host._lock:
            chunk = int(self._chunks[cell])
            assert chunk >= 0, f"cell {cell} is not pinned"
            self._chunks[cell] = -1
            self._host._num_searched -= 1
        return chunk

    def give_back(self) -> None:
        """Give back the pins that are left. The search, if it is still at it, keeps none."""
        with self._host._lock:
            self._is_over = True
            left = self._chunks[self._chunks >= 0]
            self._chunks[:] = -1
            self._host._num_searched -= len(left)
        if len(left):
            self._host._unpin(left)
