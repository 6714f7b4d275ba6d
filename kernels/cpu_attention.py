"""Paged causal attention on the CPU, and the step before it.

The KV of a sequence lies in layer blocks of the pool, `block_size` tokens each, keys first, then values:

    bfloat16           K [num_kv_heads, head_dim / 2, block_size, 2]    V [num_kv_heads, block_size / 2, head_dim, 2]
    float32, float16   K [num_kv_heads, head_dim, block_size]           V [num_kv_heads, block_size, head_dim]

so that one vector load is 16 tokens of a key dimension (bfloat16: of a pair, for the dot-product instructions), or 16
dimensions of a value (of a pair of tokens). Slots that are not written may hold anything.

A sequence's result is the same bit for bit in every batch, for every chunking of its prompt and number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from swiftkv import _cpu
from swiftkv.kernels.attention_spec import AttentionSpec

_DTYPES = {torch.float32: _cpu.DType.F32, torch.bfloat16: _cpu.DType.BF16, torch.float16: _cpu.DType.F16}


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step and where their KV of one group lies. Keeps alive what the kernels read."""

    tensors: tuple[torch.Tensor, ...]
    native: _cpu.AttentionBatch


def prepare_batch(
    spec: AttentionSpec,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    table_starts: torch.Tensor,
) -> AttentionBatch:
    """Made once per step and KV group, from the plan's arrays, all int32 and contiguous.

    positions `[num_tokens]`, query_starts `[num_seqs + 1]`, context_lens `[num_seqs]` with the new tokens counted,
    block_table: the sequences' entries one after the other, table_starts `[num_seqs + 1]`. An entry is the layer block
    of layer 0, or negative: `~entry` is the layer block of every layer. Entries that no query sees are not read.
    """
    tensors = (positions, query_starts, context_lens, block_table, table_starts)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
    native = _cpu.AttentionBatch(
        positions.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
        block_table.data_ptr(),
        table_starts.data_ptr(),
        len(context_lens),
    )
    return AttentionBatch(tensors, native)


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    spec: AttentionSpec,
    batch: AttentionBatch,
    pool: torch.Tensor,
    layer: int,
) -> None:
    """Normalise and rotate q and k in place, and write k and v to the sequences' layer blocks.

    qkv `[num_tokens, (num_heads + 2 num_kv_heads) * head_dim]`; cos_sin float32 `[max_len, rotary_dim]`: cosines, then
    sines; the first `rotary_dim` dimensions of a head are turned, one half against the other; q_norm and k_norm
    `[head_dim]` in qkv's dtype, for an RMSNorm of each head, or None; pool uint8, flat, from the group's first byte on.
    Rounds to the dtype where transformers does.
    """
    assert qkv.is_contiguous()
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] <= spec.head_dim
    _cpu.rope_write_kv(
        _native_spec(spec, qkv.dtype),
        batch.native,
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        eps,
        qkv.data_ptr(),
        pool.data_ptr(),
        layer,
    )


def attention(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    pool: torch.Tensor,
    layer: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the step's queries over their sequences' KV, `[num_tokens, num_heads * head_dim]`.

    Call after `rope_write_kv` of the same layer. Prompts' chunks and single decoded tokens may be mixed.
    Raises `ValueError` for sinks and for a cap, which these kernels do not have.
    """
    if sinks is not None:
        raise ValueError("the CPU's attention kernels have no sinks: run the model with SWIFTKV_OPS=reference")
    assert qkv.is_contiguous()
    out = torch.empty((qkv.shape[0], spec.num_heads * spec.head_dim), dtype=qkv.dtype)
    _cpu.attention(_native_spec(spec, qkv.dtype), batch.native, qkv.data_ptr(), pool.data_ptr(), layer, out.data_ptr())
    return out


@cache
def _native_spec(spec: AttentionSpec, dtype: torch.dtype) -> _cpu.AttentionSpec:
    if spec.soft_cap:
        raise ValueError("the CPU's attention kernels do not cap scores: run the model with SWIFTKV_OPS=reference")
    return _cpu.AttentionSpec(
        _DTYPES[dtype],
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.block_size,
        spec.window,
        spec.scale,
    )
