"""The kernels of paged attention; `kernels/triton_attention.py` launches them.

They are in one file, because they share how a tile of keys is loaded and folded in. Scores are kept in powers of two:
`exp(x) = exp2(x log2(e))`, with the factor folded into the scale. The places of tokens that are not written may hold
anything, and blocks that no query sees are not read.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from swiftkv.kernels import triton_schedule
from swiftkv.kernels.triton_layout import key_offset, layer_block_index, layer_block_offset, value_offset

TILE_FIELDS = tl.constexpr(triton_schedule.TILE_FIELDS)
SPLIT_FIELDS = tl.constexpr(triton_schedule.SPLIT_FIELDS)
MERGE_FIELDS = tl.constexpr(triton_schedule.MERGE_FIELDS)
LOG2_E = math.log2(math.e)
_LOG2_E_JIT = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["layer"])
def prefill_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_log_sum: tl.tensor,
    qkv: tl.tensor,
    kv: tl.tensor,
    rectangles: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    block_table: tl.tensor,
    layer: tl.tensor,
    cap_scale: tl.tensor,
    scale: tl.tensor,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute one tile of (token, head) rows of one kv head, over its keys or a part of them.

    Keys that all rows see are taken without a mask.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0)
    tile = tiles + TILE_FIELDS * tl.program_id(1)
    first_row = tl.load(tile + 1)
    num_new = tl.load(tile + 2)
    num_cached = tl.load(tile + 3)
    table = block_table + tl.load(tile + 4)
    query_start = tl.load(tile + 5)
    begin_part = tl.load(tile + 6) * KEYS
    end_part = tl.load(tile + 7) * KEYS
    partial = tl.load(tile + 8)

    rows = first_row + tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    query_positions = num_cached + rows // GROUP
    first_query = num_cached + first_row // GROUP
    last_query = num_cached + tl.minimum((first_row + ROWS - 1) // GROUP, num_new - 1)

    tokens = (query_start + rows // GROUP).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    exists = (rows // GROUP < num_new)[:, None]
    q_offsets = tokens * (NUM_HEADS * HEAD_DIM + NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)) + heads * HEAD_DIM
    q = tl.load(qkv + q_offsets[:, None] + dims[None, :], mask=exists & (dims < HEAD_DIM)[None, :], other=0.0)

    first_key = tl.maximum(first_query - WINDOW + 1, 0) if WINDOW else 0
    end_key = last_query + 1
    end = tl.minimum(end_key, end_part)
    full_begin = (tl.maximum(last_query - WINDOW + 1, 0) + KEYS - 1) // KEYS * KEYS if WINDOW else 0
    full_end = tl.maximum((first_query + 1) // KEYS * KEYS, full_begin)
    full_begin, full_end = tl.maximum(full_begin, begin_part), tl.maximum(full_end, begin_part)

    weighted = tl.zeros([ROWS, PADDED_VALUE_DIM], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -1.0e30, dtype=tl.float32)  # not -inf: -inf minus -inf is NaN
    if WINDOW:
        weighted, row_sum, row_max = _attend(
            weighted, row_sum, row_max, q, query_positions, begin_part, tl.minimum(full_begin, end), first_key, end_key,
            table, kv, rectangles, kv_head, layer, cap_scale, scale,
            True, SOFT_CAP, WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, KEYS,
        )  # fmt: skip
    weighted, row_sum, row_max = _attend(
        weighted, row_sum, row_max, q, query_positions, full_begin, tl.minimum(full_end, end_part), first_key, end_key,
        table, kv, rectangles, kv_head, layer, cap_scale, scale,
        False, SOFT_CAP, WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, KEYS,
    )  # fmt: skip
    weighted, row_sum, row_max = _attend(
        weighted, row_sum, row_max, q, query_positions, full_end, end, first_key, end_key,
        table, kv, rectangles, kv_head, layer, cap_scale, scale,
        True, SOFT_CAP, WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, KEYS,
    )  # fmt: skip
    value_dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    present = exists & (value_dims < VALUE_DIM)
    if partial < 0:
        if sinks is not None:
            weighted, row_sum = _add_sinks(weighted, row_sum, row_max, tl.load(sinks + heads).to(tl.float32))
        result = weighted / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # 0 in absent rows
        out_offsets = tokens * (NUM_HEADS * VALUE_DIM) + heads * VALUE_DIM
        tl.store(out + out_offsets[:, None] + value_dims, result.to(out.dtype.element_ty), mask=present)
    else:
        result = weighted / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # 0 in rows that see no key of this part
        parts = (partial.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + tl.arange(0, ROWS)
        tl.store(partial_out + parts[:, None] * VALUE_DIM + value_dims, result, mask=present)
        tl.store(partial_log_sum + parts, row_max + tl.log2(row_sum))


@triton.jit(do_not_specialize=["layer"])
def decode_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_log_sum: tl.tensor,
    qkv: tl.tensor,
    kv: tl.tensor,
    sinks: tl.tensor,
    splits: tl.tensor,
    block_table: tl.tensor,
    layer: tl.tensor,
    cap_scale: tl.tensor,
    scale: tl.tensor,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute one split of one sequence's keys for the heads of one kv head; the only split gives the result itself."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    record = splits + SPLIT_FIELDS * split
    if tl.load(record) < 0:
        return
    begin = tl.load(record + 1) * KEYS
    end_key = tl.load(record + 3)
    end = tl.minimum(tl.load(record + 2) * KEYS, end_key)
    first_key = tl.maximum(end_key - WINDOW, 0) if WINDOW else 0
    table = block_table + tl.load(record + 4)
    token = tl.load(record + 5).to(tl.int64)
    is_only = tl.load(record + 6)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, PADDED_DIM)
    exists = (rows < GROUP)[:, None]
    q_offset = token * (NUM_HEADS * HEAD_DIM + NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM))
    q_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(qkv + q_offset + q_offsets, mask=exists & (dims < HEAD_DIM)[None, :], other=0.0)

    weighted = tl.zeros([ROWS, PADDED_VALUE_DIM], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], -1.0e30, dtype=tl.float32)
    weighted, row_sum, row_max = _attend(
        weighted, row_sum, row_max, q, None, begin, end, first_key, end_key,
        table, kv, None, kv_head, layer, cap_scale, scale,
        True, SOFT_CAP, WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, KEYS,
    )  # fmt: skip

    value_dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    present = exists & (value_dims < VALUE_DIM)
    offsets = heads[:, None] * VALUE_DIM + value_dims
    if is_only:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=rows < GROUP, other=0.0).to(tl.float32)
            weighted, row_sum = _add_sinks(weighted, row_sum, row_max, sink)
        result = weighted / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(out + token * (NUM_HEADS * VALUE_DIM) + offsets, result.to(out.dtype.element_ty), mask=present)
    else:
        partial = split.to(tl.int64) * NUM_HEADS
        tl.store(partial_out + partial * VALUE_DIM + offsets, weighted / row_sum[:, None], mask=present)
        tl.store(partial_log_sum + partial + heads, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit
def combine_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_log_sum: tl.tensor,
    sinks: tl.tensor,
    split_starts: tl.tensor,
    query_starts: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Add up one head's results over the splits of one sequence, each weighted by the sum of its keys' weights."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(split_starts + sequence)
    end = tl.load(split_starts + sequence + 1)
    if end - first <= 1:
        return
    token = tl.load(query_starts + sequence).to(tl.int64)
    _add_up(
        out, partial_out, partial_log_sum, sinks, token, head, first, end, head,
        NUM_HEADS, NUM_HEADS, VALUE_DIM, PADDED_VALUE_DIM, SPLITS,
    )  # fmt: skip


@triton.jit
def merge_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_log_sum: tl.tensor,
    sinks: tl.tensor,
    merges: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Add up one row's results over the parts of one tile's keys, each weighted by the sum of its keys' weights."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    merge = merges + MERGE_FIELDS * tl.program_id(0)
    row = tl.program_id(1) % ROWS
    tile_row = tl.load(merge) + row
    new_token = tile_row // GROUP
    if new_token >= tl.load(merge + 1):
        return
    token = (tl.load(merge + 2) + new_token).to(tl.int64)
    head = tl.program_id(1) // ROWS * GROUP + tile_row % GROUP
    first, end = tl.load(merge + 3), tl.load(merge + 4)
    _add_up(
        out, partial_out, partial_log_sum, sinks, token, head, first, end, tl.program_id(1),
        NUM_KV_HEADS * ROWS, NUM_HEADS, VALUE_DIM, PADDED_VALUE_DIM, SPLITS,
    )  # fmt: skip


@triton.jit
def _add_up(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_log_sum: tl.tensor,
    sinks: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    row: tl.tensor,
    STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Write one head's output of one token from row `row` of the partial results `first` to `end`, of STRIDE rows."""
    dims = tl.arange(0, PADDED_VALUE_DIM)
    weighted = tl.zeros([PADDED_VALUE_DIM], dtype=tl.float32)
    total = 0.0
    largest = -1.0e30
    for begin in range(first, end, SPLITS):
        splits = begin + tl.arange(0, SPLITS)
        rows = splits.to(tl.int64) * STRIDE + row
        log_sum = tl.load(partial_log_sum + rows, mask=splits < end, other=-float("inf"))
        present = (splits < end)[:, None] & (dims < VALUE_DIM)[None, :]
        values = tl.load(partial_out + rows[:, None] * VALUE_DIM + dims[None, :], mask=present, other=0.0)
        larger = tl.maximum(largest, tl.max(log_sum, 0))
        correction = tl.exp2(largest - larger)
        weights = tl.exp2(log_sum - larger)
        weighted = weighted * correction + tl.sum(values * weights[:, None], 0)
        total = total * correction + tl.sum(weights, 0)
        largest = larger
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E_JIT
        larger = tl.maximum(largest, sink)
        correction = tl.exp2(largest - larger)
        weighted = weighted * correction
        total = total * correction + tl.exp2(sink - larger)
    target = out + (token * NUM_HEADS + head) * VALUE_DIM + dims
    tl.store(target, (weighted / total).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def _attend(
    weighted: tl.tensor,
    row_sum: tl.tensor,
    row_max: tl.tensor,
    q: tl.tensor,
    query_positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    table: tl.tensor,
    kv: tl.tensor,
    rectangles: tl.tensor,
    kv_head: tl.tensor,
    layer: tl.tensor,
    cap_scale: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Continue the softmax over the tiles of keys from `begin` (whose tile it starts) to `end`.

    weighted [ROWS, value dims]: sum of weights times values; row_sum [ROWS]: of weights; row_max [ROWS]: the largest
    score, to which weights are relative. Table entries are fetched one tile ahead, so that keys never wait for them.
    Only keys of `[first_key, end_key)` have blocks. query_positions: None if all queries see all of those.
    `rectangles`: the pool as [rows, HEAD_DIM] for the tensor memory accelerator; a tile is then part of one block, and
    VALUE_DIM equals HEAD_DIM.
    """
    steps = tl.arange(0, KEYS)
    dims = tl.arange(0, q.shape[1])
    value_dims = tl.arange(0, weighted.shape[1])
    ahead = begin + steps if rectangles is None else begin
    entry = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end_key, other=0)
    for start in tl.range(begin, end, KEYS):
        positions = start + steps
        exists = (positions >= first_key) & (positions < end_key)
        index = layer_block_index(entry, layer)
        entry = tl.load(table + (ahead + KEYS) // BLOCK_SIZE, mask=ahead + KEYS < end_key, other=0)
        ahead += KEYS
        if rectangles is None:
            offset = positions % BLOCK_SIZE
            block = layer_block_offset(index, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM)
            key_offsets = block + key_offset(kv_head, offset, BLOCK_SIZE, HEAD_DIM)
            value_offsets = block + value_offset(kv_head, offset, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM)
            k = _load_rows(kv, key_offsets, exists, dims, MASKED, HEAD_DIM)
        else:
            row = index.to(tl.int32) * (2 * NUM_KV_HEADS * BLOCK_SIZE) + kv_head * BLOCK_SIZE + start % BLOCK_SIZE
            k = rectangles.load([row, 0])
        scores = tl.dot(q, k.T, input_precision="ieee")
        if SOFT_CAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = 2.0 * tl.sigmoid(2.0 * cap_scale * scores) - 1.0
        if MASKED:
            visible = exists[None, :]
            if query_positions is not None:
                distance = query_positions[:, None] - positions[None, :]
                visible = visible & (distance >= 0)
                if WINDOW:
                    visible = visible & (distance < WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        larger = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        correction = tl.exp2(row_max - larger)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        weighted = weighted * correction[:, None]
        row_max = larger
        if rectangles is None:
            v = _load_rows(kv, value_offsets, exists, value_dims, MASKED, VALUE_DIM)
        else:
            v = rectangles.load([row + NUM_KV_HEADS * BLOCK_SIZE, 0])
            if MASKED:
                v = tl.where(exists[:, None], v, 0.0)
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="ieee")
    return weighted, row_sum, row_max


@triton.jit
def _load_rows(
    kv: tl.tensor,
    offsets: tl.tensor,
    exists: tl.tensor,
    dims: tl.tensor,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Return [rows, dims] with zeros in absent rows, not garbage: zero times NaN is NaN."""
    pointers = kv + offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    if dims.shape[0] != DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _add_sinks(weighted: tl.tensor, row_sum: tl.tensor, row_max: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Count one more key in each row, with score `sink` [ROWS] and no value."""
    sink *= _LOG2_E_JIT
    larger = tl.maximum(row_max, sink)
    correction = tl.exp2(row_max - larger)
    return weighted * correction[:, None], row_sum * correction + tl.exp2(sink - larger)
