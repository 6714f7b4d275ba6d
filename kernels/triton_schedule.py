"""The work list of one step's attention on a GPU, made on the host from the scheduler's arrays.

There are two kinds of work:

- A sequence with many new tokens is cut into tiles of queries. If these are too few to fill the GPU, because a short
  prompt follows a long history, each tile is cut into parts of its keys.
- A sequence with one new token is cut into splits of its keys (flash-decoding), so that a few long sequences fill the
  GPU as well as many short ones do.

A sequence with a few new tokens, such as a token and its draft, becomes that many sequences of one new token, which
share their entries of the table. So a CUDA graph of a decode step can hold it, and keys that the first of them reads
stay in the caches for the others.

The host makes all lists once per step and KV group, and copies them to the device together with the block table. So
nothing here waits for the device, and the grids of the kernels follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.kernels.attention_spec import MAX_HEAD_DIM, AttentionSpec
from swiftkv.kernels.device_limits import H100, DeviceLimits, limits_of
from swiftkv.kernels.triton_layout import NO_BLOCK

_Int32Array = npt.NDArray[np.int32]

_ALIGNMENT = 4  # of the arrays within their one buffer, in int32: 16 bytes, for Triton's fastest loads
_DECODE_PROGRAMS_PER_SM = 3  # with 64 KiB of keys and values in flight each; more would be slower
_ROUNDS = 4  # rounds of decoding if not all programs run at once: short ones leave no long tail
_MIN_SPLIT_TILES = 2  # tiles of keys: a shorter split costs more to combine than it saves
_MIN_PART_TILES = 4  # tiles of keys: a part's result is as many bytes as one tile of keys and values
_PART_ROUNDS = 2  # rounds of parts: prompts of different lengths then end at about the same time

MAX_DECODE_TOKENS = 8
"""The most new tokens of a sequence that are each computed as a sequence of their own. Not measured on a GPU yet."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile sizes of one kernel, and the options that it is compiled with."""

    rows: int  # queries times the heads that share a kv head
    keys: int
    num_warps: int
    num_stages: int
    by_rectangles: bool = False  # whether the tensor memory accelerator fetches tiles of keys, each part of one block
    max_registers: int | None = None  # per thread; a limit allows more programs on an SM


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The schedule of a step's attention; int32 tensors, all views of `buffer`.

    A program of a kernel finds everything in one row of `tiles` or `splits`, so that it waits for memory only once
    before it can read the table. Rows that a step does not need hold sequence -1.
    """

    buffer: Tensor
    positions: Tensor  # [T]
    token_entries: Tensor  # [T], the table entry of the block that the token's KV goes to; NO_BLOCK: nowhere
    query_starts: Tensor  # [S + 1]
    tiles: Tensor  # [P, TILE_FIELDS], parts of sequences with many new tokens
    merges: Tensor  # [M, MERGE_FIELDS], tiles whose keys are in parts
    splits: Tensor  # [N, SPLIT_FIELDS], parts of the keys of sequences with one new token
    split_starts: Tensor  # [S + 1]: the splits of a sequence
    block_table: Tensor  # [number of entries]
    prefill: Tiling
    decode: Tiling
    num_parts: int  # all parts of tiles whose keys are divided
    max_splits: int  # the most splits of one sequence: with more than 1, results have to be combined


TILE_FIELDS = 9
"""The fields of a tile: sequence, first row (new token * heads per kv head + head), new tokens, tokens in the cache,
first entry of the table, first token in the batch, first and end tile of keys, number of the part (-1: all keys)."""
MERGE_FIELDS = 5
"""The fields of a merge: first row, new tokens, first token in the batch, first and end of the parts."""
SPLIT_FIELDS = 8
"""The fields of a split: sequence, first and end tile of keys, context length, first entry of the table, token in the
batch, whether it is the sequence's only one."""


def prefill_tiling(spec: AttentionSpec, limits: DeviceLimits = H100) -> Tiling:
    """Choose two warpgroups of 64 rows each, the tile of one `wgmma`: one's softmax hides behind the other's product.

    Raises `ValueError` for heads that no tile fits.

    Keys per tile: as many as registers hold beside the accumulators, which are as wide as values. The tensor memory
    accelerator, which fetches parts of one block, needs fewer registers for addresses. Stages: as many tiles of keys in
    flight as shared memory holds; with two, each is requested only half a tile before it is needed, and waited for.
    """
    width, value_width = _padded(spec.head_dim), _padded(spec.value_head_dim)
    if max(width, value_width) > MAX_HEAD_DIM:
        raise ValueError(
            f"no Triton kernel for heads of {spec.head_dim} and values of {spec.value_head_dim}: up to {MAX_HEAD_DIM}"
        )
    is_uniform = spec.value_head_dim == spec.head_dim  # rows of a rectangle lie at one distance, throughout the pool
    by_rectangles = limits.has_tensor_memory_accelerator and spec.block_size % 32 == 0 and is_uniform
    half_blocks = spec.block_size % 128 == 64 and by_rectangles
    whole_blocks = spec.block_size % 128 == 0 and by_rectangles
    held = max(width // 2, value_width, 64)
    largest = {64: 64 if half_blocks else 128, 128: 128 if whole_blocks else 64, 256: 32}[held]
    is_wide = max(width, value_width) > 128
    rows = 64 if is_wide and not limits.multiplies_from_shared_memory else 128  # registers hold no more
    for keys, stages in ((largest, 3), (largest, 2), (largest // 2, 3), (largest // 2, 2)):
        tiling = Tiling(rows, keys, num_warps=8, num_stages=stages)
        tiling = replace(tiling, by_rectangles=by_rectangles and spec.block_size % keys == 0)
        if shared_bytes(spec, tiling, limits) <= limits.shared_bytes:
            break
    return tiling


def decode_tiling(spec: AttentionSpec, limits: DeviceLimits = H100) -> Tiling:
    """Keep many bytes in flight, because memory is the limit: two tiles of 32 KiB a program, three programs an SM."""
    rows = max(16, _padded(spec.num_heads // spec.num_kv_heads))
    widths = max(64, _padded(spec.head_dim)) + max(64, _padded(spec.value_head_dim))
    most = 1 << (16_384 // widths).bit_length() - 1
    for keys, stages in ((most, 3), (most, 2), (most // 2, 2)):
        tiling = Tiling(rows, keys, num_warps=4 if rows <= 64 else 8, num_stages=stages)
        if shared_bytes(spec, tiling, limits) <= limits.shared_bytes:
            break
    return tiling


def shared_bytes(spec: AttentionSpec, tiling: Tiling, limits: DeviceLimits) -> int:
    """Return roughly the bytes of shared memory that a program takes: for queries, and for keys and values in flight.

    If products are computed from registers, the tile in use is in registers and does not count.
    """
    width, value_width = (max(16, _padded(dim)) for dim in (spec.head_dim, spec.value_head_dim))
    from_registers = tiling.rows < 64 or not (tiling.by_rectangles or limits.multiplies_from_shared_memory)
    num_tiles = tiling.num_stages - 1 if from_registers else tiling.num_stages
    weights = tiling.rows * tiling.keys if width > 128 else 0  # otherwise they fit into the room of the queries
    return (tiling.rows * width + tiling.keys * num_tiles * (width + value_width) + weights) * 2 + 1024


def prepare_batch(
    spec: AttentionSpec,
    positions: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    table_starts: Tensor,
    *,
    device: torch.device | str | None = None,
    into: AttentionBatch | None = None,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> AttentionBatch:
    """Make the schedule of one step and KV group from the plan's arrays: int32, contiguous, on the host.

    positions `[num_tokens]`, query_starts `[num_seqs + 1]`, context_lens `[num_seqs]` with the new tokens counted,
    block_table: the sequences' entries one after the other, table_starts `[num_seqs + 1]`. An entry is the layer block
    of layer 0, or negative: `~entry` is the layer block of every layer. Entries that no query sees are not followed.

    Everything goes to `device` (the current CUDA device by default) in one asynchronous copy on the current stream, or
    `into` the tensors of `decode_buffers`, which a CUDA graph has captured. `tilings` (prefill, decode) is for tuning.
    """
    if into is not None:
        prefill, decode = into.prefill, into.decode
    else:
        limits = limits_of(_device(device))
        prefill, decode = tilings or (prefill_tiling(spec, limits), decode_tiling(spec, limits))
    starts, lengths, entry_starts = query_starts.numpy(), context_lens.numpy(), table_starts.numpy()[:-1]
    token_blocks = np.repeat(entry_starts, np.diff(starts)) + positions.numpy() // spec.block_size
    token_entries = block_table.numpy()[token_blocks]
    sequences = _by_token(_Sequences(starts, np.diff(starts), lengths, entry_starts))
    if into is not None:
        missing = len(into.query_starts) - len(sequences.query_starts)
        sequences = _with_absent(sequences, missing)
        token_entries = np.append(token_entries, np.full(missing, NO_BLOCK, np.int32))
    limits = limits_of(into.buffer.device if into is not None else _device(device))
    splits, split_starts = _splits(spec, decode, sequences, limits)
    tiles, merges = _tiles(spec, prefill, sequences, limits)
    arrays = {
        "positions": positions.numpy(),
        "token_entries": token_entries,
        "query_starts": sequences.query_starts,
        "tiles": tiles,
        "merges": merges,
        "splits": splits,
        "split_starts": split_starts,
        "block_table": block_table.numpy(),
    }
    if into is not None:
        return _fill(into, arrays)
    batch = _allocate({name: array.shape for name, array in arrays.items()}, prefill, decode, _device(device))
    num_parts, max_splits = int(tiles[:, 8].max(initial=-1)) + 1, int(np.diff(split_starts).max(initial=0))
    return replace(_fill(batch, arrays), num_parts=num_parts, max_splits=max_splits)


def decode_buffers(
    spec: AttentionSpec, num_seqs: int, num_entries: int, device: torch.device | str | None = None
) -> AttentionBatch:
    """Allocate for any step of at most `num_seqs` sequences, one new token each, with `num_entries` blocks in all.

    A sequence of up to `MAX_DECODE_TOKENS` new tokens counts as one for each. For CUDA graphs: `attention` over it runs
    the same grid whatever `prepare_batch(..., into=)` wrote last. Rows of absent sequences become zeros.
    """
    limits = limits_of(_device(device))
    prefill, decode = prefill_tiling(spec, limits), decode_tiling(spec, limits)
    max_splits = _target_splits(spec, decode, num_seqs, limits)
    shapes: dict[str, tuple[int, ...]] = {
        "positions": (num_seqs,),
        "token_entries": (num_seqs,),
        "query_starts": (num_seqs + 1,),
        "tiles": (0, TILE_FIELDS),
        "merges": (0, MERGE_FIELDS),
        "splits": (max_splits, SPLIT_FIELDS),
        "split_starts": (num_seqs + 1,),
        "block_table": (num_entries,),
    }
    batch = _allocate(shapes, prefill, decode, _device(device))
    none, zero = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return prepare_batch(spec, none, zero, none, none, zero, into=replace(batch, max_splits=max_splits))


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The sequences of a step: int32 [S] each, but for `query_starts` [S + 1]."""

    query_starts: _Int32Array
    num_new: _Int32Array
    context_lens: _Int32Array
    table_starts: _Int32Array


def _by_token(sequences: _Sequences) -> _Sequences:
    """Divide sequences with few new tokens: each token sees the context up to itself, through the same entries."""
    is_apart = sequences.num_new <= MAX_DECODE_TOKENS
    if not (is_apart & (sequences.num_new > 1)).any():
        return sequences
    counts = np.where(is_apart, sequences.num_new, 1)
    of = np.repeat(np.arange(len(counts)), counts)
    num_new = np.where(is_apart, 1, sequences.num_new)[of].astype(np.int32)
    not_seen = np.where(is_apart[of], sequences.num_new[of] - 1 - _ranges(counts), 0)
    return _Sequences(
        np.append(0, num_new.cumsum()).astype(np.int32),
        num_new,
        (sequences.context_lens[of] - not_seen).astype(np.int32),
        sequences.table_starts[of],
    )


def _with_absent(sequences: _Sequences, count: int) -> _Sequences:
    """Add `count` sequences of one new token and no context, for the rows of a graph that a step does not fill."""
    starts = sequences.query_starts
    none = np.zeros(count, np.int32)
    return _Sequences(
        np.append(starts, starts[-1] + np.arange(1, count + 1, dtype=np.int32)),
        np.append(sequences.num_new, none + np.int32(1)),
        np.append(sequences.context_lens, none),
        np.append(sequences.table_starts, none),
    )


def _tiles(
    spec: AttentionSpec, tiling: Tiling, sequences: _Sequences, limits: DeviceLimits
) -> tuple[_Int32Array, _Int32Array]:
    """Return tiles [P, TILE_FIELDS] and their merges. Tiles with most keys come first, so that the last ones are short.

    If the tiles of all kv heads are fewer than run in two rounds, their keys are cut into parts of about one length, so
    that there are about enough for two rounds.
    """
    group = spec.num_heads // spec.num_kv_heads
    rows = np.where(sequences.num_new > 1, sequences.num_new * group, 0)
    if not rows.any():
        return np.zeros((0, TILE_FIELDS), np.int32), np.zeros((0, MERGE_FIELDS), np.int32)
    counts = ceil_div(rows, tiling.rows)
    of = np.repeat(np.arange(len(counts)), counts)
    first_row = _ranges(counts) * tiling.rows
    num_new, num_cached = sequences.num_new[of], (sequences.context_lens - sequences.num_new)[of]
    last_row = np.minimum(first_row + tiling.rows, rows[of]) - 1
    end = ceil_div(num_cached + last_row // group + 1, tiling.keys)
    first_key = np.maximum(num_cached + first_row // group - spec.window + 1, 0) if spec.window else np.zeros_like(end)
    begin = first_key // tiling.keys
    span = end - begin
    target = _PART_ROUNDS * limits.num_sms // spec.num_kv_heads
    length = max(ceil_div(int(span.sum()), max(target, 1)), _MIN_PART_TILES)
    while (parts := np.maximum(span // length, 1)).sum() > max(target, len(span)):
        length += max(1, length // 16)
    tile, rank = np.repeat(np.arange(len(span)), parts), _ranges(parts)
    is_part = parts > 1
    numbers = np.where(is_part, parts, 0).cumsum() - np.where(is_part, parts, 0)  # the number of each tile's first part
    fields = (
        of[tile],
        first_row[tile],
        num_new[tile],
        num_cached[tile],
        sequences.table_starts[of][tile],
        sequences.query_starts[of][tile],
        begin[tile] + rank * span[tile] // parts[tile],
        begin[tile] + (rank + 1) * span[tile] // parts[tile],
        np.where(is_part[tile], numbers[tile] + rank, -1),
    )
    tiles = _records(fields, TILE_FIELDS)
    merges = (first_row, num_new, sequences.query_starts[of], numbers, numbers + parts)
    order = np.argsort(tiles[:, 6] - tiles[:, 7], kind="stable")
    return tiles[order], _records([field[is_part] for field in merges], MERGE_FIELDS)


def _splits(
    spec: AttentionSpec, tiling: Tiling, sequences: _Sequences, limits: DeviceLimits
) -> tuple[_Int32Array, _Int32Array]:
    """Return splits [N, SPLIT_FIELDS] of about one length, N no more than `_target_splits`, and starts [S + 1]."""
    is_decode, context_lens = sequences.num_new == 1, sequences.context_lens
    first = np.maximum(context_lens - spec.window, 0) // tiling.keys if spec.window else np.zeros_like(context_lens)
    tiles = np.where(is_decode, ceil_div(context_lens, tiling.keys) - first, 0)
    target = _target_splits(spec, tiling, int(is_decode.sum()), limits)
    length = max(ceil_div(int(tiles.sum()), target), _MIN_SPLIT_TILES)
    while (counts := np.where(is_decode, np.maximum(ceil_div(tiles, length), 1), 0)).sum() > target:
        length += max(1, length // 16)
    of = np.repeat(np.arange(len(counts)), counts)
    rank, parts, span = _ranges(counts), counts[of], tiles[of].astype(np.int64)
    begin, end = first[of] + rank * span // parts, first[of] + (rank + 1) * span // parts
    fields = (of, begin, end, context_lens[of], sequences.table_starts[of], sequences.query_starts[of], parts == 1)
    return _records(fields, SPLIT_FIELDS), np.append(0, counts.cumsum()).astype(np.int32)


def _records(fields: Sequence[npt.NDArray[Any]], size: int) -> _Int32Array:
    records = np.zeros((len(fields[0]), size), np.int32)
    for i, field in enumerate(fields):
        records[:, i] = field
    return records


def _ranges(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Join the ranges of `counts`: [2, 3] -> [0, 1, 0, 1, 2]."""
    starts = counts.cumsum(dtype=np.int64) - counts
    ranges: npt.NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)
    return ranges


def _allocate(
    shapes: dict[str, tuple[int, ...]], prefill: Tiling, decode: Tiling, device: torch.device
) -> AttentionBatch:
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    offsets = np.cumsum([0, *(ceil_div(size, _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    buffer = torch.empty(offsets[-1], dtype=torch.int32, device=device)
    views = {
        name: buffer[offset : offset + size].view(shape)
        for (name, shape), offset, size in zip(shapes.items(), offsets, sizes, strict=False)
    }
    return AttentionBatch(buffer=buffer, **views, prefill=prefill, decode=decode, num_parts=0, max_splits=0)


def _fill(batch: AttentionBatch, arrays: dict[str, _Int32Array]) -> AttentionBatch:
    """Copy the arrays to the device through one pinned host buffer that ends with the table, without waiting.

    Room that an array leaves free is filled with -1, "none", except in positions, which the kernels always look up.
    """
    used = batch.block_table.storage_offset() + arrays["block_table"].size
    staging = torch.empty(used, dtype=torch.int32, pin_memory=batch.buffer.device.type == "cuda")
    host = staging.numpy()
    for name, array in arrays.items():
        view: Tensor = getattr(batch, name)
        assert array.size <= view.numel(), f"{name}: room for {view.numel()}, {array.size} to hold"
        offset = view.storage_offset()
        host[offset : offset + array.size] = array.reshape(-1)
        host[offset + array.size : offset + view.numel()] = 0 if name == "positions" else -1
    batch.buffer[:used].copy_(staging, non_blocking=True)
    return batch


def _target_splits(spec: AttentionSpec, tiling: Tiling, num_seqs: int, limits: DeviceLimits) -> int:
    """Return the most splits: as many as run at once, or several rounds of them if there are more sequences."""
    per_sm = limits.programs_per_sm(shared_bytes(spec, tiling, limits), _DECODE_PROGRAMS_PER_SM)
    at_once = max(1, per_sm * limits.num_sms // spec.num_kv_heads)
    return at_once if num_seqs <= at_once else max(_ROUNDS * at_once, num_seqs)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length()
