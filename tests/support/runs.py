"""Random runs between pools: disjoint layer blocks on both sides, several links, staged and whole blocks mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class LayerMoves:
    """One layer's copies, and the sizes of the pools that they need."""

    runs: npt.NDArray[np.int64]  # [R, 5]: link, peer_offset_bytes, local_offset_bytes, count, staged
    width_bytes: int
    block_bytes: int
    layer: int
    to_peer: bool
    pool_bytes: int
    peer_bytes: int  # of each link's pool

    def pools(self, generator: torch.Generator) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return our pool and each link's, of random bytes, on the CPU."""
        links = sorted(set(self.runs[:, 0].tolist()))
        sizes = [self.pool_bytes, *[self.peer_bytes] * len(links)]
        pool, *peers = (torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes)
        return pool, dict(zip(links, peers, strict=True))


@st.composite
def layer_moves(draw: st.DrawFn, max_width_bytes: int = 1 << 10) -> LayerMoves:
    num_layers = draw(st.integers(1, 5))
    width = 16 * draw(st.integers(1, max_width_bytes // 16))
    block = num_layers * width
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    staged = [draw(st.booleans()) for _ in counts]
    total = sum(counts)
    # Staged layer blocks lie before our whole blocks; both sides have gaps between runs, and the peer's blocks begin
    # anywhere.
    num_staged = sum(count for count, is_staged in zip(counts, staged, strict=True) if is_staged)
    stage, ours, theirs = 0, num_staged * width, 16 * draw(st.integers(0, 7))
    rows = []
    for count, is_staged in zip(counts, staged, strict=True):
        theirs += block * draw(st.integers(0, 2))
        if not is_staged:
            ours += block * draw(st.integers(0, 2))
        rows.append([draw(st.integers(0, 2)), theirs, stage if is_staged else ours, count, int(is_staged)])
        theirs += count * block
        stage, ours = (stage + count * width, ours) if is_staged else (stage, ours + count * block)
    return LayerMoves(
        runs=np.array(draw(st.permutations(rows)), np.int64),
        width_bytes=width,
        block_bytes=block,
        layer=draw(st.integers(0, num_layers - 1)),
        to_peer=draw(st.booleans()),
        pool_bytes=ours + total * 16,
        peer_bytes=theirs + 64,
    )


def move_blocks_reference(
    pool: torch.Tensor,
    peers: Mapping[int, torch.Tensor],
    runs: npt.NDArray[np.int64],
    width_bytes: int,
    block_bytes: int,
    layer: int,
    to_peer: bool,
) -> None:
    """Copy as `triton_copy.move_blocks` does, run by run in plain torch: `peers[link]` is that peer's pool, uint8."""
    for link, peer_offset, local_offset, count, staged in runs.tolist():
        theirs = _strided(peers[link], peer_offset + layer * width_bytes, count, block_bytes, width_bytes)
        local_pitch = width_bytes if staged else block_bytes
        ours = _strided(pool, local_offset + (0 if staged else layer * width_bytes), count, local_pitch, width_bytes)
        if to_peer:
            theirs.copy_(ours)
        else:
            ours.copy_(theirs)


def _strided(memory: torch.Tensor, offset: int, count: int, pitch: int, width: int) -> torch.Tensor:
    return memory[offset : offset + (count - 1) * pitch + width].as_strided((count, width), (pitch, 1))
