"""Writes blocks to storage in a thread of its own, from copies in a bounded queue."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftkv.storage.backend import Status
from swiftkv.storage.buffers import queue_rows
from swiftkv.tier.reach import Reach
from swiftkv.tier.storage_thread import StorageThread
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks

_PUT_DEADLINE_S = 5.0
_BLOCKS_PER_PUT = 16
_PUT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Copy:
    """A block in the queue's memory."""

    name: BlockName
    row: int  # its row of the memory
    part_bytes: int  # of each rank


def queue_memory(reach: Reach, queue_bytes: int, max_block_bytes: int) -> Tensor:
    """Return memory for a queue of blocks of all ranks, uint8 [rows, ranks, max_block_bytes].

    `max_block_bytes`: one rank's part of the largest block. Raises `ConfigError` if there is no such memory.
    """
    num_ranks = len(reach.pools)
    num_rows = queue_rows(queue_bytes, num_ranks * max_block_bytes)
    return reach.buffer(num_rows * num_ranks * max_block_bytes).view(num_rows, num_ranks, max_block_bytes)


class Writer:
    """A queue of copies of blocks, and the thread that empties it while no prompt waits for storage.

    The engine's thread calls all methods.
    """

    def __init__(
        self,
        stored: StoredBlocks,
        reach: Reach,
        memory: Tensor,
        *,
        may_write: Callable[[], bool],
        on_room: Callable[[], None],
    ) -> None:
        """The queue uses `memory`, from `queue_memory`.

        The thread writes only while `may_write` returns true, and calls `on_room` when the queue has room again.
        """
        self._stored = stored
        self._reach = reach
        self._may_write = may_write
        self._on_room = on_room
        self._memory = memory
        self._free = deque(range(len(memory)))
        self._queue: deque[_Copy] = deque()
        self.stored_blocks = 0
        self.stored_bytes = 0
        self.failures: Counter[Status] = Counter()
        self._thread = StorageThread("storage writer", self._serve, on_room)
        self._thread.start()

    @property
    def memory(self) -> memoryview:
        """The memory of the queue; all blocks that the backend is given to write lie in it."""
        return self._memory.view(-1).numpy().data

    @property
    def num_free(self) -> int:
        """The number of blocks that `add` has room for."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """The number of blocks that were added and are not written yet."""
        return len(self._memory) - len(self._free)

    @property
    def queue_bytes(self) -> int:
        with self._thread.changed:
            return sum(map(self._num_bytes, self._queue))

    def add(self, blocks: Sequence[tuple[BlockName, Sequence[Tensor]]]) -> None:
        """Copy blocks into the queue, which must have room. A block has a part for each rank, uint8 [part_bytes].

        Returns when they are copied. The sources may change from then on.
        """
        copies = [_Copy(name, self._free.popleft(), len(parts[0])) for name, parts in blocks]
        self._reach.take(
            (part[: copy.part_bytes], source)
            for copy, (_, sources) in zip(copies, blocks, strict=True)
            for part, source in zip(self._memory[copy.row], sources, strict=True)
        )
        with self._thread.changed:
            self._queue += copies
            self._thread.changed.notify()

    def wait_for_room(self, until_s: float) -> bool:
        """Wait until `add` has room; return false if it has none by `until_s`, on the monotonic clock."""
        timeout_s = until_s - time.monotonic()
        with self._thread.changed:
            return timeout_s > 0 and self._thread.changed.wait_for(lambda: len(self._free) > 0, timeout_s)

    def loads_changed(self) -> None:
        """Note that `may_write` may have become true. Raises `RuntimeError` if a defect ended the thread."""
        self._thread.check()
        with self._thread.changed:
            if self._queue:  # otherwise the thread would wake in every step for nothing
                self._thread.changed.notify()

    def close(self, patience_s: float) -> None:
        """Write as much of the queue as the time allows, and end the thread.

        A thread that hangs in the backend ends with the process.
        """
        self._thread.close()
        self._thread.join(patience_s)
        with self._thread.changed:
            self._queue.clear()

    def _serve(self) -> None:
        while batch := self._next():
            sources = [[part[: copy.part_bytes].numpy().data for part in self._memory[copy.row]] for copy in batch]
            statuses = self._stored.put([copy.name for copy in batch], sources, time.monotonic() + _PUT_DEADLINE_S)
            self.failures.update(status for status in statuses if status is not Status.OK)
            self.stored_blocks += sum(status is Status.OK for status in statuses)
            self.stored_bytes += sum(
                self._num_bytes(copy) for copy, status in zip(batch, statuses, strict=True) if status is Status.OK
            )
            with self._thread.changed:
                self._free.extend(copy.row for copy in batch)
                self._thread.changed.notify()
            self._on_room()

    def _next(self) -> list[_Copy]:
        """Wait for copies that may be written now; return none when the writer is closed."""
        with self._thread.changed:
            self._thread.changed.wait_for(lambda: self._thread.is_closing or (self._queue and self._may_write()))
            batch: list[_Copy] = []
            num_bytes = 0
            while self._queue and len(batch) < _BLOCKS_PER_PUT and num_bytes < _PUT_BYTES:
                batch.append(self._queue.popleft())
                num_bytes += self._num_bytes(batch[-1])
            return batch

    def _num_bytes(self, copy: _Copy) -> int:
        return len(self._reach.pools) * copy.part_bytes
