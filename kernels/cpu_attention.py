"""Paged causal attention on the CPU, and the step before it.

The KV of a sequence lies in layer blocks of the pool, `block_size` tokens each, keys first, then values:

    bfloat16           K [num_kv_heads, head_dim / 2, block_size, 2]    V [num_kv_heads, block_size / 2, v_head_dim, 2]
    float32, float16   K [num_kv_heads, head_dim, block_size]           V [num_kv_heads, block_size, v_head_dim]

so that one vector load yields one dimension of 16 keys or 16 dimensions of one value. With bfloat16 it yields pairs of
these, for the dot-product instructions. The places of tokens that are not written yet may hold anything.

A sequence's result is the same, bit for bit, in every batch, for every chunking of its prompt and number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from swiftkv import _cpu
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.cpu_deferral import empty, held
from swiftkv.kernels.cpu_tensors import DTYPES, norm_weight_kind


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
    *,
    device: torch.device | str | None = None,
) -> AttentionBatch:
    """Prepare a step's attention as `Ops.prepare_batch` says: views of the arguments, nothing is copied."""
    assert device is None or torch.device(device).type == "cpu"
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
    """Normalise and rotate q and k in place, and write k and v to the sequences' layer blocks (`Ops.rope_write_kv`).

    The first `rotary_dim` dimensions of a head are rotated, one half with the other. Rounds to the dtype where
    transformers does.
    """
    assert qkv.is_contiguous()
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] <= spec.head_dim
    kinds = {norm_weight_kind(norm, qkv.dtype, spec.head_dim) for norm in (q_norm, k_norm) if norm is not None}
    assert len(kinds) < 2
    _cpu.rope_write_kv(
        _native_spec(spec, qkv.dtype),
        batch.native,
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        kinds.pop() if kinds else _cpu.NormWeight.SAME_DTYPE,
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
    """Return causal attention of the step's queries over their sequences' KV (`Ops.attention`)."""
    assert qkv.is_contiguous()
    wide_sinks = None if sinks is None else held(sinks.float().contiguous())
    out = empty((qkv.shape[0], spec.out_size), qkv.dtype)
    _cpu.attention(
        _native_spec(spec, qkv.dtype),
        batch.native,
        qkv.data_ptr(),
        pool.data_ptr(),
        layer,
        0 if wide_sinks is None else wide_sinks.data_ptr(),
        out.data_ptr(),
    )
    return out


@cache
def _native_spec(spec: AttentionSpec, dtype: torch.dtype) -> _cpu.AttentionSpec:
    return _cpu.AttentionSpec(
        DTYPES[dtype],
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.value_head_dim,
        spec.block_size,
        spec.window,
        spec.scale,
        spec.soft_cap,
    )
