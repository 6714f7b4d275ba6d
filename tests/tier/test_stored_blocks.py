"""Blocks of several ranks in storage: whole, or not there."""

from __future__ import annotations

import time
from uuid import uuid4

import numpy as np

from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.stored_blocks import BlockName, StoredBlocks
from tests.support.storage import TIMEOUT_S, MemoryMedium

GROUP = KVGroup((0,), num_kv_heads=1, head_dim=32, dtype="float32", block_size=16)
KEYS = ObjectKeys([GROUP], "weights", "cpu", num_ranks=2)
NAMES = [BlockName(bytes([number]) * 32, 0) for number in range(3)]
BLOCKS = np.arange(6, dtype=np.uint8).repeat(GROUP.block_bytes).reshape(3, 2, -1)  # [blocks, ranks, bytes]


def deadline_s() -> float:
    return time.monotonic() + TIMEOUT_S


def part(number: int, rank: int) -> bytes:
    return KEYS.of(NAMES[number].block_key, 0, rank)


def parts(blocks: np.ndarray) -> list[list[memoryview]]:
    return [[part.data for part in block] for block in blocks]


def stored() -> tuple[StoredBlocks, list[MemoryMedium]]:
    """Return blocks in two levels, of which the lower one was added later, and what lies in each."""
    media = [MemoryMedium(f"{tier} {uuid4()}") for tier in ("host", "storage")]
    backends = [SealedBackend(GuardedMedium(medium, Breaker()), KEYS.fingerprint) for medium in media]
    levels = Levels([Level("host", backends[0])])
    blocks = StoredBlocks(levels, KEYS)
    levels.add(Level("storage", backends[1]))
    return blocks, media


def test_every_rank_gets_its_own_part() -> None:
    blocks, _ = stored()
    assert blocks.put(NAMES, parts(BLOCKS), deadline_s()) == [Status.OK] * 3
    assert blocks.exists(NAMES, deadline_s()) == [True] * 3
    into = np.zeros_like(BLOCKS)
    statuses, tiers = blocks.get(NAMES, parts(into), deadline_s())
    assert (statuses, tiers) == ([Status.OK] * 3, ["host"] * 3)
    assert np.array_equal(into, BLOCKS)


def test_a_block_is_there_with_all_of_its_parts_only() -> None:
    blocks, media = stored()
    blocks.put(NAMES, parts(BLOCKS), deadline_s())
    for medium in media:
        medium.drop([part(0, 1), part(2, 0)])
    assert blocks.exists(NAMES, deadline_s()) == [False, True, False]
    statuses, _ = blocks.get(NAMES, parts(np.zeros_like(BLOCKS)), deadline_s())
    assert statuses == [Status.MISSING, Status.OK, Status.MISSING]


def test_a_block_comes_from_the_lowest_tier_of_its_parts() -> None:
    blocks, media = stored()
    blocks.put(NAMES, parts(BLOCKS), deadline_s())
    media[0].drop([part(1, 0)])
    statuses, tiers = blocks.get(NAMES, parts(np.zeros_like(BLOCKS)), deadline_s())
    assert statuses == [Status.OK] * 3
    assert tiers == ["host", "storage", "host"]
