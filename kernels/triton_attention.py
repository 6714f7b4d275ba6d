"""Paged causal attention on a GPU: FlashAttention-2 (Dao 2023) for chunks of prompts, flash-decoding for single tokens.

KV has the layout of `kernels/triton_layout.py`. The query heads that share a KV head are the rows of one matrix, so
keys and values are read once for all of them. The keys of a single token, or of a short prompt after a long history,
are split among several programs, whose results are then combined. The other sequences of a step decide how keys are
split. So unlike the CPU's results, these depend on them in their last bits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_attention_kernels import (
    LOG2_E,
    combine_kernel,
    decode_kernel,
    merge_kernel,
    prefill_kernel,
)
from swiftkv.kernels.triton_layout import layer_blocks
from swiftkv.kernels.triton_schedule import AttentionBatch, Tiling, decode_buffers, prepare_batch

__all__ = ["AttentionBatch", "attention", "decode_buffers", "prepare_batch"]

_SPLITS = 16  # splits that are added up at a time


def attention(
    qkv: Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    pool: Tensor,
    layer: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from the step's queries to the KV of their sequences, in the pool.

    Return `[num_tokens, num_heads * v_head_dim]`, of qkv's dtype. Call this after the step's keys and values of the
    layer are in the pool: those in qkv are not read.

    qkv: bfloat16 or float16 `[num_tokens, num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)]`, queries
        first; rope is applied.
    pool: uint8, flat, the part of the pool that belongs to the layer's KV group; its address is a multiple of 16.
    layer: the layer's index in its KV group.
    sinks: `[num_heads]`, for each head the score of one more key, whose value vector is zero, that every query sees
        (gpt-oss); neither the scale nor the cap of the scores is applied to it.
    """
    assert qkv.is_contiguous()
    assert spec.block_size % 16 == 0
    out = torch.empty((qkv.shape[0], spec.out_size), dtype=qkv.dtype, device=qkv.device)
    kv = layer_blocks(pool, spec, qkv.dtype)
    if len(batch.tiles):
        _prefill(out, qkv, spec, batch, kv, layer, sinks)
    if len(batch.splits):
        _decode(out, qkv, spec, batch, kv, layer, sinks)
    return out


def _prefill(
    out: Tensor, qkv: Tensor, spec: AttentionSpec, batch: AttentionBatch, kv: Tensor, layer: int, sinks: Tensor | None
) -> None:
    tiling = batch.prefill
    partial_out, partial_log_sum = _partials(qkv, spec, batch.num_parts * spec.num_kv_heads * tiling.rows)
    rectangles = None
    if tiling.by_rectangles:
        box = [tiling.keys, triton.next_power_of_2(spec.head_dim)]
        rectangles = TensorDescriptor.from_tensor(kv.view(-1, spec.head_dim), box)
    prefill_kernel[(spec.num_kv_heads, len(batch.tiles))](
        out,
        partial_out,
        partial_log_sum,
        qkv,
        kv,
        rectangles,
        sinks,
        batch.tiles,
        batch.block_table,
        layer,
        *_scales(spec),
        **_constants(spec, tiling),
    )
    if len(batch.merges):
        merge_kernel[(len(batch.merges), spec.num_kv_heads * tiling.rows)](
            out,
            partial_out,
            partial_log_sum,
            sinks,
            batch.merges,
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            VALUE_DIM=spec.value_head_dim,
            PADDED_VALUE_DIM=triton.next_power_of_2(spec.value_head_dim),
            ROWS=tiling.rows,
            SPLITS=_SPLITS,
            num_warps=4,
        )


def _decode(
    out: Tensor, qkv: Tensor, spec: AttentionSpec, batch: AttentionBatch, kv: Tensor, layer: int, sinks: Tensor | None
) -> None:
    combine = batch.max_splits > 1
    partial_out, partial_log_sum = _partials(qkv, spec, len(batch.splits) * spec.num_heads if combine else 0)
    decode_kernel[(spec.num_kv_heads, len(batch.splits))](
        out,
        partial_out,
        partial_log_sum,
        qkv,
        kv,
        sinks,
        batch.splits,
        batch.block_table,
        layer,
        *_scales(spec),
        **_constants(spec, batch.decode),
    )
    if combine:
        combine_kernel[(len(batch.split_starts) - 1, spec.num_heads)](
            out,
            partial_out,
            partial_log_sum,
            sinks,
            batch.split_starts,
            batch.query_starts,
            NUM_HEADS=spec.num_heads,
            VALUE_DIM=spec.value_head_dim,
            PADDED_VALUE_DIM=triton.next_power_of_2(spec.value_head_dim),
            SPLITS=_SPLITS,
            num_warps=4,
        )


def _partials(qkv: Tensor, spec: AttentionSpec, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return buffers for the results of parts of the keys, and for the logarithms of their sums of weights."""
    out = torch.empty((num_rows, spec.value_head_dim), dtype=torch.float32, device=qkv.device)
    return out, torch.empty(num_rows, dtype=torch.float32, device=qkv.device)


def _constants(spec: AttentionSpec, tiling: Tiling) -> dict[str, int | None]:
    """Return the constants and options that the kernels that read keys are compiled with."""
    return {
        "SOFT_CAP": spec.soft_cap > 0,
        "WINDOW": spec.window,
        "NUM_HEADS": spec.num_heads,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "BLOCK_SIZE": spec.block_size,
        "HEAD_DIM": spec.head_dim,
        "PADDED_DIM": triton.next_power_of_2(spec.head_dim),
        "VALUE_DIM": spec.value_head_dim,
        "PADDED_VALUE_DIM": triton.next_power_of_2(spec.value_head_dim),
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "maxnreg": tiling.max_registers,
        "enable_fp_fusion": True,  # Triton 3.10 no longer fuses by default
    }


def _scales(spec: AttentionSpec) -> tuple[float, float]:
    """Return the factors of query · key before the cap and after it, after which exp2 gives the weight."""
    if spec.soft_cap:
        return spec.scale / spec.soft_cap, spec.soft_cap * LOG2_E
    return 1.0, spec.scale * LOG2_E
