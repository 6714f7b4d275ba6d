"""Who computes what in one step's attention on a GPU, decided on the host from the scheduler's arrays.

Two kinds of work. A sequence with several new tokens is cut into tiles of queries; a sequence with one new token is cut
into splits of its keys (flash-decoding), so that a few long sequences fill the GPU as well as many short ones do. Both
lists are made by the host, once per step and KV group, and reach the device together with the block table in a single
copy, so nothing here waits for the device, and the grids of the kernels follow from shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_layout import NO_BLOCK

_Int32Array = npt.NDArray[np.int32]

_ALIGNMENT = 4  # of the arrays within their one buffer, in int32: 16 bytes, as Triton's fastest loads want
_DECODE_PROGRAMS_PER_SM = 3  # with 64 KiB of keys and values in flight each; shared memory holds no more
_ROUNDS = 4  # of decoding where not all programs run at once: short ones leave no long tail
_MIN_SPLIT_TILES = 2  # of keys: below this a split's result costs more to combine than it saves


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one kernel is cut and compiled."""

    rows: int  # of queries times heads that share a kv head
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, for the sake of more programs on an SM


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of a step and the schedule of their attention; int32 tensors, all views of `buffer`.

    Has room for at least T tokens, S sequences, P tiles and N splits. What is not needed is marked by sequence -1.
    """

    buffer: Tensor
    positions: Tensor  # [T]
    token_entries: Tensor  # [T], the table entry of the block that the token's KV goes to; NO_BLOCK: nowhere
    query_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    block_table: Tensor  # [number of entries]
    table_starts: Tensor  # [S + 1]
    tiles: Tensor  # [P, 2]: sequence, first row (token * heads per kv head + head) of several new tokens
    splits: Tensor  # [N, 3]: sequence, first and end tile of keys of one new token
    split_starts: Tensor  # [S + 1]: the splits of a sequence
    prefill: Tiling
    decode: Tiling
    max_splits: int  # of one sequence: more than 1 means that results have to be combined


def prefill_tiling(spec: AttentionSpec) -> Tiling:
    """Two warpgroups of 64 rows each, the tile of one `wgmma`, so that one's softmax hides behind the other's product.

    Keys per tile: what registers hold beside the accumulators. The tensor memory accelerator, which fetches parts of
    one block, needs fewer of them for addresses, so with it a tile of 128-wide heads can be twice as long.
    """
    width = _padded(spec.head_dim)
    keys = 128 if width <= 64 or (width == 128 and spec.block_size % 128 == 0) else 64
    if spec.block_size % keys and spec.block_size % 64 == 0:
        keys = 64
    if width > 128 and spec.block_size % 64:
        keys = 32
    return Tiling(128, keys, num_warps=8, num_stages=3 if width <= 64 else 2)


def decode_tiling(spec: AttentionSpec) -> Tiling:
    """Bound by memory: what counts is bytes in flight, two tiles of 32 KiB per program and three programs on an SM."""
    rows = max(16, _padded(spec.num_heads // spec.num_kv_heads))
    width = max(64, _padded(spec.head_dim))
    return Tiling(rows, 8192 // width, num_warps=4 if rows <= 64 else 8, num_stages=3)


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
    """Made once per step and KV group, from the plan's arrays: int32, contiguous, on the host.

    positions `[num_tokens]`, query_starts `[num_seqs + 1]`, context_lens `[num_seqs]` with the new tokens counted,
    block_table: the sequences' entries one after the other, table_starts `[num_seqs + 1]`. An entry is the layer block
    of layer 0, or negative: `~entry` is the layer block of every layer. Entries that no query sees are not followed.

    Everything goes to `device` (the current CUDA device by default) in one asynchronous copy on the current stream, or
    `into` the tensors of `decode_buffers`, which a CUDA graph has captured. `tilings` (prefill, decode) is for tuning.
    """
    if into is not None:
        prefill, decode = into.prefill, into.decode
    else:
        prefill, decode = tilings or (prefill_tiling(spec), decode_tiling(spec))
    starts, lengths = query_starts.numpy(), context_lens.numpy()
    token_entries = _token_entries(spec, positions.numpy(), starts, block_table.numpy(), table_starts.numpy())
    if into is not None:  # the graph's other sequences: one token each, of no context
        missing = len(into.context_lens) - len(lengths)
        starts = np.append(starts, starts[-1] + np.arange(1, missing + 1, dtype=np.int32))
        lengths = np.append(lengths, np.zeros(missing, np.int32))
        token_entries = np.append(token_entries, np.full(missing, NO_BLOCK, np.int32))
    num_new = np.diff(starts)
    splits, split_starts = _splits(spec, decode, num_new, lengths, _num_sms(into.buffer.device if into else device))
    arrays = {
        "positions": positions.numpy(),
        "token_entries": token_entries,
        "query_starts": starts,
        "context_lens": lengths,
        "block_table": block_table.numpy(),
        "table_starts": table_starts.numpy(),
        "tiles": _tiles(spec, prefill, num_new, lengths),
        "splits": splits,
        "split_starts": split_starts,
    }
    if into is not None:
        return _fill(into, arrays)
    batch = _allocate({name: array.shape for name, array in arrays.items()}, prefill, decode, _device(device))
    return replace(_fill(batch, arrays), max_splits=int(np.diff(split_starts).max(initial=0)))


def decode_buffers(
    spec: AttentionSpec, num_seqs: int, num_entries: int, device: torch.device | str | None = None
) -> AttentionBatch:
    """Tensors for any step of at most `num_seqs` sequences, one new token each, with `num_entries` blocks in all.

    For CUDA graphs: `attention` over it runs the same grid whatever `prepare_batch(..., into=)` wrote there last. Rows
    of sequences that a step does not have come out as zeros.
    """
    max_splits = _target_splits(spec, num_seqs, _num_sms(device))
    shapes: dict[str, tuple[int, ...]] = {
        "positions": (num_seqs,),
        "token_entries": (num_seqs,),
        "query_starts": (num_seqs + 1,),
        "context_lens": (num_seqs,),
        "block_table": (num_entries,),
        "table_starts": (num_seqs + 1,),
        "tiles": (0, 2),
        "splits": (max_splits, 3),
        "split_starts": (num_seqs + 1,),
    }
    batch = _allocate(shapes, prefill_tiling(spec), decode_tiling(spec), _device(device))
    none, zero = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return prepare_batch(spec, none, zero, none, none, zero, into=replace(batch, max_splits=max_splits))


def _tiles(spec: AttentionSpec, tiling: Tiling, num_new: _Int32Array, context_lens: _Int32Array) -> _Int32Array:
    """[P, 2]; tiles that look back on most keys come first, so that the last ones to run are short."""
    rows = np.where(num_new > 1, num_new * (spec.num_heads // spec.num_kv_heads), 0)
    counts = -(-rows // tiling.rows)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first_row = _ranges(counts) * tiling.rows
    last_token = np.minimum(first_row + tiling.rows, rows[sequence]) // (spec.num_heads // spec.num_kv_heads)
    keys = context_lens[sequence] - num_new[sequence] + last_token
    if spec.window:
        keys = np.minimum(keys, spec.window)
    order = np.argsort(-keys, kind="stable")
    return np.stack([sequence, first_row], axis=1)[order].astype(np.int32)


def _splits(
    spec: AttentionSpec, tiling: Tiling, num_new: _Int32Array, context_lens: _Int32Array, num_sms: int
) -> tuple[_Int32Array, _Int32Array]:
    """Splits [N, 3] of about one length, N no more than `_target_splits`, and starts [S + 1]."""
    is_decode = num_new == 1
    first = np.maximum(context_lens - spec.window, 0) // tiling.keys if spec.window else np.zeros_like(context_lens)
    tiles = np.where(is_decode, -(-context_lens // tiling.keys) - first, 0)
    target = _target_splits(spec, int(is_decode.sum()), num_sms)
    length = max(-(-int(tiles.sum()) // target), _MIN_SPLIT_TILES)
    while (counts := np.where(is_decode, np.maximum(-(-tiles // length), 1), 0)).sum() > target:
        length += max(1, length // 16)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rank, of, span = _ranges(counts), counts[sequence], tiles[sequence].astype(np.int64)
    begin, end = first[sequence] + rank * span // of, first[sequence] + (rank + 1) * span // of
    return np.stack([sequence, begin, end], axis=1).astype(np.int32), np.append(0, counts.cumsum()).astype(np.int32)


def _token_entries(
    spec: AttentionSpec,
    positions: _Int32Array,
    query_starts: _Int32Array,
    block_table: _Int32Array,
    table_starts: _Int32Array,
) -> _Int32Array:
    entries: _Int32Array = block_table[
        np.repeat(table_starts[:-1], np.diff(query_starts)) + positions // spec.block_size
    ]
    return entries


def _ranges(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    starts = counts.cumsum(dtype=np.int64) - counts
    ranges: npt.NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)
    return ranges


def _allocate(
    shapes: dict[str, tuple[int, ...]], prefill: Tiling, decode: Tiling, device: torch.device
) -> AttentionBatch:
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    offsets = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    buffer = torch.empty(offsets[-1], dtype=torch.int32, device=device)
    views = {
        name: buffer[offset : offset + size].view(shape)
        for (name, shape), offset, size in zip(shapes.items(), offsets, sizes, strict=False)
    }
    return AttentionBatch(buffer=buffer, **views, prefill=prefill, decode=decode, max_splits=0)


def _fill(batch: AttentionBatch, arrays: dict[str, _Int32Array]) -> AttentionBatch:
    """Through one host buffer, pinned so that the copy does not wait. What the arrays leave free says 'none': -1.

    Except for positions, which are looked up whether they mean anything or not.
    """
    on_gpu = batch.buffer.device.type == "cuda"
    staging = torch.full(batch.buffer.shape, -1, dtype=torch.int32, pin_memory=on_gpu)
    host = staging.numpy()
    host[: batch.positions.numel()] = 0
    for name, array in arrays.items():
        view: Tensor = getattr(batch, name)
        assert array.size <= view.numel(), f"{name}: room for {view.numel()}, {array.size} to hold"
        offset = view.storage_offset()
        host[offset : offset + array.size] = array.reshape(-1)
    batch.buffer.copy_(staging, non_blocking=True)
    return batch


def _target_splits(spec: AttentionSpec, num_seqs: int, num_sms: int) -> int:
    """At most: as many as run at once, or several rounds of them where the sequences alone are more than that."""
    at_once = max(1, _DECODE_PROGRAMS_PER_SM * num_sms // spec.num_kv_heads)
    return at_once if num_seqs <= at_once else max(_ROUNDS * at_once, num_seqs)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _num_sms(device: torch.device | str | None) -> int:
    return _num_sms_of(_device(device))


@cache
def _num_sms_of(device: torch.device) -> int:
    """132, an H100's, where there is no GPU: what the interpreter then checks is what runs there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length()
