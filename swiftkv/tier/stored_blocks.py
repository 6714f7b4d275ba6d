"""The blocks of one engine in storage: each rank's part of a block is an object of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from swiftkv.storage.backend import Status
from swiftkv.storage.levels import Levels
from swiftkv.tier.host_pins import SearchPins
from swiftkv.tier.keys import ObjectKeys

T = TypeVar("T")

HOST_TIER = "host"
"""The tier of host memory."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """One group's block of a prompt."""

    block_key: bytes
    group: int


RankParts = Sequence[memoryview]
"""The bytes of one block: a part for each rank."""


class StoredBlocks:
    """Searches, reads and writes whole blocks: without one of its parts, a block is of no use to any rank.

    One process does this for all ranks, so they need not agree on what storage has.
    """

    def __init__(self, levels: Levels, keys: ObjectKeys) -> None:
        self._levels = levels
        self._keys = keys

    def exists(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        """Return for each block whether all of its parts are there."""
        found = self._levels.exists(self._objects(names), deadline_s)
        return [all(parts) for parts in self._by_block(found)]

    def pin(
        self, pins: SearchPins, cells: npt.NDArray[np.int64], names: Sequence[BlockName], deadline_s: float
    ) -> None:
        """Pin those of a search's blocks that steps can read in host memory, as far as they are there."""
        wanted = [i for i, name in enumerate(names) if name.group in pins.groups]
        pins.take(cells[wanted], self._objects([names[i] for i in wanted]), deadline_s)

    def verify(self, pins: SearchPins) -> list[Status]:
        """Verify some of the blocks that a search has pinned. Return the statuses of those that are not intact."""
        statuses = pins.verify(self._keys.fingerprint)
        self._levels.count_gets(HOST_TIER, statuses)
        return [status for status in statuses if status is not Status.OK]

    def get(
        self, names: Sequence[BlockName], into: Sequence[RankParts], deadline_s: float
    ) -> tuple[list[Status], list[str]]:
        """Read blocks.

        Returns for each block its status, which is OK or that of the first part that was not read, and its tier, which
        is the lowest of its parts' tiers.
        """
        statuses, tiers = self._levels.get(self._objects(names), [part for parts in into for part in parts], deadline_s)
        depths = {level.tier: depth for depth, level in enumerate(self._levels.levels)}
        lowest = [max(parts, key=lambda tier: depths.get(tier, -1)) for parts in self._by_block(tiers)]
        return [_status_of(parts) for parts in self._by_block(statuses)], lowest

    def put(self, names: Sequence[BlockName], sources: Sequence[RankParts], deadline_s: float) -> list[Status]:
        """Write blocks, and return the status of each."""
        objects = [part for parts in sources for part in parts]
        return [
            _status_of(parts) for parts in self._by_block(self._levels.put(self._objects(names), objects, deadline_s))
        ]

    def _objects(self, names: Sequence[BlockName]) -> list[bytes]:
        ranks = range(self._keys.num_ranks)
        return [self._keys.of(name.block_key, name.group, rank) for name in names for rank in ranks]

    def _by_block(self, of_parts: Sequence[T]) -> list[Sequence[T]]:
        size = self._keys.num_ranks
        return [of_parts[begin : begin + size] for begin in range(0, len(of_parts), size)]


def _status_of(parts: Sequence[Status]) -> Status:
    return next((status for status in parts if status is not Status.OK), Status.OK)
