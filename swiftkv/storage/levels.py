"""Several backends below one pool, the nearest first: a block is read from the first that has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swiftkv.storage.backend import Status, StorageBackend


@dataclass(frozen=True, slots=True)
class Level:
    """One backend, the name of its tier in metrics, and the outcomes of its reads and writes, by block.

    A missing block is counted for the last level only.
    """

    tier: str
    backend: StorageBackend
    gets: Counter[Status] = field(default_factory=Counter)
    puts: Counter[Status] = field(default_factory=Counter)


class Levels:
    """Backends of one model and layout below each other. One thread may read while another writes.

    A block is written to every level, and read from the first that has it. Then it is copied to the levels above, so
    that it is found there the next time.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        assert levels
        self.levels = tuple(levels)

    def add(self, level: Level) -> None:
        """Add the lowest level. A call that is in progress may not use it yet."""
        self.levels = (*self.levels, level)

    @property
    def is_degraded(self) -> bool:
        """Whether all levels refuse calls for now."""
        return len(self.degraded_tiers) == len(self.levels)

    @property
    def degraded_tiers(self) -> list[str]:
        """The tiers that refuse calls for now."""
        return [level.tier for level in self.levels if level.backend.is_degraded]

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys are in any level."""
        found = [False] * len(keys)
        for level in self.levels:
            asked = [i for i, is_there in enumerate(found) if not is_there]
            answers = level.backend.exists([keys[i] for i in asked], deadline_s)
            for i, is_there in zip(asked, answers, strict=True):
                found[i] = is_there
        return found

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float
    ) -> tuple[list[Status], list[str]]:
        """Read each block from the first level that has it intact.

        Returns the statuses (for a block that was not read, that of the last level), and the tiers of the blocks.
        """
        statuses = [Status.MISSING] * len(keys)
        tiers = [""] * len(keys)
        for depth, level in enumerate(self.levels):
            asked = [i for i, status in enumerate(statuses) if status is not Status.OK]
            if not asked:
                break
            answers = level.backend.get([keys[i] for i in asked], [into[i] for i in asked], deadline_s)
            for i, status in zip(asked, answers, strict=True):
                statuses[i], tiers[i] = status, level.tier
                if status is not Status.MISSING or level is self.levels[-1]:
                    level.gets[status] += 1
            read = [i for i in asked if statuses[i] is Status.OK]
            for above in self.levels[:depth]:
                above.backend.put([keys[i] for i in read], [into[i] for i in read], deadline_s)
        return statuses, tiers

    def count_gets(self, tier: str, statuses: Iterable[Status]) -> None:
        """Count blocks that were used in a level where they lie, or should have been."""
        for level in self.levels:
            if level.tier == tier:
                level.gets.update(statuses)

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview], deadline_s: float) -> list[Status]:
        """Write blocks to every level, sealed once. The statuses are those of the last level."""
        sealed = self.levels[0].backend.seal(keys, sources)
        statuses: list[Status] = []
        for level in self.levels:
            statuses = level.backend.put_sealed(keys, sealed, deadline_s)
            level.puts.update(statuses)
        return statuses

    def close(self) -> None:
        """Close every level, which ends a call that is in progress. No other call may follow."""
        for level in self.levels:
            level.backend.close()
