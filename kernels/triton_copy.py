"""Moves layer blocks between our own pool and peers' pools: every run of a layer in one launch.

The same blocks move in all layers of a step, so their list is made once per step, on the host (`flatten_runs`). It goes
to the device once, alone or together with other lists (`pack_lists`). A launch names its list and the layer. It reads
the length of the list on the device, because a CUDA graph replays the same launch with other steps' lists.

Addresses in peers' pools are distances from the first byte of our own pool, so that runs of several links share a
launch. A thread moves 16 bytes at a time, so every address is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_BYTES = 16
"""The bytes that one thread moves at a time; widths, pitches, offsets and distances are multiples of it."""

HEADER_FIELDS = 2
"""The fields of a list's header: the index of its first block, and its number of blocks. All headers come first."""
BLOCK_FIELDS = 3
"""The fields of a block in a list: the peer's address of layer 0, the local address of layer 0, and the local distance
from one layer to the next (0 if staged).

Addresses count from the first byte of our pool, in units of `VECTOR_BYTES`.
"""

_WORDS_PER_VECTOR = VECTOR_BYTES // 4
_MAX_TILE_BYTES = 32 << 10
_BYTES_PER_THREAD = 64  # four loads in flight
_WARPS_PER_SM = 48  # a multiprocessor takes 64, but their registers would limit the copy

Int64Array = npt.NDArray[np.int64]


def flatten_runs(runs: Int64Array, width_bytes: int, block_bytes: int, peer_distances: Mapping[int, int]) -> Int64Array:
    """Return the list of the layer blocks that `runs` name, int64 `[N, BLOCK_FIELDS]`.

    A run, `[R, 5]`, is (link, peer_offset_bytes, local_offset_bytes, count, staged): blocks of `block_bytes` on the
    peer's side; on ours too, or packed layer blocks of `width_bytes` if staged. `peer_distances[link]` is the address
    of that peer's pool minus ours, in bytes.

    Raises `KeyError` for a link without a distance, `ValueError` for a number that `VECTOR_BYTES` does not divide.
    """
    links, peer_offsets, local_offsets, counts, staged = runs.T
    starts = np.zeros(len(runs), np.int64)
    if len(runs):
        present, inverse = np.unique(links, return_inverse=True)
        starts = np.array([peer_distances[link] for link in present.tolist()], np.int64)[inverse] + peer_offsets
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # block within its run
    local_pitch = np.repeat(np.where(staged, width_bytes, block_bytes), counts)
    table = np.stack(
        (
            np.repeat(starts, counts) + within * block_bytes,
            np.repeat(local_offsets, counts) + within * local_pitch,
            np.repeat(np.where(staged, 0, width_bytes), counts),
        ),
        axis=1,
    )
    if width_bytes % VECTOR_BYTES or (table % VECTOR_BYTES).any():
        raise ValueError(f"layer blocks of {width_bytes} bytes at {runs.tolist()}: not multiples of {VECTOR_BYTES}")
    return table // VECTOR_BYTES


def pack_lists(lists: Sequence[Int64Array]) -> Int64Array:
    """Join lists of `flatten_runs`, int64 `[K * HEADER_FIELDS + N * BLOCK_FIELDS]`: headers, then blocks."""
    counts = np.array([len(blocks) for blocks in lists], np.int64)
    starts = HEADER_FIELDS * len(lists) + BLOCK_FIELDS * (np.cumsum(counts) - counts)
    return np.concatenate([np.stack((starts, counts), axis=1).ravel(), *(blocks.ravel() for blocks in lists)])


def move_blocks(
    pool: Tensor,
    packed: Tensor,
    index: int,
    most_blocks: int,
    width_bytes: int,
    layer: int,
    to_peer: bool,
    max_programs: int = 0,
) -> None:
    """Copy layer `layer` of every block in list `index`, from our pool to the peers or back, on the current stream.

    The blocks of one call must not overlap.

    Args:
        pool: uint8, flat: the whole of our own pool.
        packed: int64, lists of `pack_lists` on the pool's device.
        most_blocks: The expected maximum of blocks in the list, which sizes the grid. More blocks take longer.
        max_programs: The most programs that share the work, each with up to 16 warps and 32 KiB in flight. A
            multiprocessor that holds one computes nothing else until the list is done. 0: as many as the device holds.
    """
    if not most_blocks:
        return
    tile_bytes = _tile_bytes(width_bytes)
    num_warps = max(1, tile_bytes // (32 * _BYTES_PER_THREAD))
    programs = max_programs or _programs_at_once(pool.device, num_warps)
    _move[(min(programs, most_blocks * triton.cdiv(width_bytes, tile_bytes)),)](
        pool.view(torch.int32),
        packed,
        index,
        layer,
        width_bytes // VECTOR_BYTES,
        TILE_WORDS=tile_bytes // 4,
        IS_EVEN=width_bytes % tile_bytes == 0,
        TO_PEER=to_peer,
        WORDS_PER_VECTOR=_WORDS_PER_VECTOR,
        HEADER_FIELDS=HEADER_FIELDS,
        BLOCK_FIELDS=BLOCK_FIELDS,
        num_warps=num_warps,
    )


def _tile_bytes(width_bytes: int) -> int:
    """Return a tile's bytes: the largest power of two that divides `width_bytes`, or up to 4 KiB if that is less."""
    divisor = width_bytes & -width_bytes
    if divisor >= 4 << 10:
        return min(divisor, _MAX_TILE_BYTES)
    return min(int(triton.next_power_of_2(width_bytes)), 4 << 10)


@cache
def _programs_at_once(device: torch.device, num_warps: int) -> int:
    """Return how many programs of `num_warps` warps the device holds at once; two in the interpreter."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * (_WARPS_PER_SM // num_warps)


@triton.jit(do_not_specialize=["index", "layer"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    pool,
    packed,
    index,
    layer,
    width,  # in vectors
    TILE_WORDS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TO_PEER: tl.constexpr,
    WORDS_PER_VECTOR: tl.constexpr,
    HEADER_FIELDS: tl.constexpr,
    BLOCK_FIELDS: tl.constexpr,
):
    blocks = packed + tl.load(packed + HEADER_FIELDS * index)
    num_blocks = tl.load(packed + HEADER_FIELDS * index + 1)
    width_words = width * WORDS_PER_VECTOR
    tiles_per_block = tl.cdiv(width_words, TILE_WORDS)
    offsets = tl.arange(0, TILE_WORDS)
    tile = tl.program_id(0)
    while tile < num_blocks * tiles_per_block:
        block = tile // tiles_per_block
        words = (tile % tiles_per_block) * TILE_WORDS + offsets
        fields = blocks + BLOCK_FIELDS * block
        peer = tl.load(fields) + layer * width
        local = tl.load(fields + 1) + layer * tl.load(fields + 2)
        source = pool + (local if TO_PEER else peer) * WORDS_PER_VECTOR + words
        target = pool + (peer if TO_PEER else local) * WORDS_PER_VECTOR + words
        if IS_EVEN:
            tl.store(target, tl.load(source))
        else:
            mask = words < width_words
            tl.store(target, tl.load(source, mask=mask), mask=mask)
        tile += tl.num_programs(0)
