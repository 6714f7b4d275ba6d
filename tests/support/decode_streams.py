"""Decode steps with part of their KV in peers' pools, as a scheduler would plan them, at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv.cache.geometry import KVGroup

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

LINKS = (0, 3)


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """`EngineStep` of one KV group."""

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    stream_tables: Sequence[Sequence[Int32Array]]
    table_starts: Sequence[Int32Array]
    num_stream_buffers: int
    runs: dict[tuple[str, int], list[list[int]]]  # by kind and buffer

    has_unknown_tokens: bool = False

    @property
    def has_copies(self) -> bool:
        return any(self.runs.values())

    @property
    def local_moves(self) -> Int32Array:
        return np.empty((0, 3), np.int32)

    def copies(self, group: int, kind: str, buffer: int) -> Int64Array:
        assert group == 0
        return np.array(self.runs.get((kind, buffer), []), np.int64).reshape(-1, 5)


@dataclass(frozen=True, slots=True)
class StreamedPools:
    """Our pool, with `num_blocks` blocks and then places for two stream buffers, and a peer's of `peer_blocks` each."""

    group: KVGroup
    num_blocks: int
    num_slots: int  # the places of each buffer
    peer_blocks: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.group.block_bytes + 2 * self.num_slots * self.group.layer_block_bytes

    @property
    def peer_bytes(self) -> int:
        return self.peer_blocks * self.group.block_bytes

    def step(
        self, context_lens: Sequence[int], num_buffers: int, generator: np.random.Generator, num_moved: int = 1
    ) -> StreamedStep:
        """Return a step of one new token per sequence; with buffers, half of the blocks are borrowed, the first always.

        `num_moved` other blocks leave our pool, and as many come to their places.
        """
        group, block_size, width, block = (
            self.group, self.group.block_size, self.group.layer_block_bytes, self.group.block_bytes,
        )  # fmt: skip
        lengths = np.array(context_lens, np.int32)
        counts = -(-lengths // block_size)
        ours = generator.permutation(self.num_blocks).tolist()
        theirs = [(link, at) for link in LINKS for at in range(self.peer_blocks)]
        theirs = [theirs[i] for i in generator.permutation(len(theirs))]
        buffers = range(max(1, num_buffers))
        tables: list[list[int]] = [[] for _ in buffers]
        runs: dict[tuple[str, int], list[list[int]]] = {}

        def add(kind: str, buffer: int, peer: tuple[int, int], local_offset: int, staged: bool) -> None:
            runs.setdefault((kind, buffer), []).append([peer[0], peer[1] * block, local_offset, 1, int(staged)])

        num_staged = 0
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
            for index in range(count):
                if not num_buffers or (num_staged and generator.random() < 0.5):
                    entry = ours.pop() * group.num_layers
                    for table in tables:
                        table.append(entry)
                    continue
                place = theirs.pop()
                for buffer in buffers:
                    slot = self.num_blocks * group.num_layers + buffer * self.num_slots + num_staged
                    tables[buffer].append(~slot)
                    if index * block_size < length - 1:
                        add("load", buffer, place, slot * width, staged=True)
                    if index == count - 1:
                        add("store", buffer, place, slot * width, staged=True)
                num_staged += 1
        assert num_staged <= self.num_slots
        for home in ours[:num_moved]:
            add("spill", 0, theirs.pop(), home * block, staged=False)
            place = theirs.pop()
            for buffer in buffers:
                add("load", buffer, place, home * block, staged=False)
        return StreamedStep(
            token_ids=generator.integers(0, 50, len(lengths), np.int32),
            positions=lengths - np.int32(1),
            query_starts=np.arange(len(lengths) + 1, dtype=np.int32),
            context_lens=lengths,
            stream_tables=[[np.array(table, np.int32)] for table in tables],
            table_starts=[np.append(0, counts.cumsum()).astype(np.int32)],
            num_stream_buffers=num_buffers,
            runs=runs,
        )
