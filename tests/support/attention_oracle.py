"""Attention over the Triton kernels' layout of KV in float64: the oracle of `kernels/triton_attention.py`.

Unlike `kernels/reference.py` it reads the same pool as the kernels, in their layout, and computes a bounded number of
scores at a time, so that a context of a million tokens fits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_layout import layer_blocks

_MAX_SCORES = 1 << 26  # computed at a time, in float64: 512 MiB


def keys_and_values(layer_blocks: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the keys of layer blocks, `[N, num_kv_heads, block_size, head_dim]`, and their values, views."""
    rows = spec.num_kv_heads, spec.block_size
    keys, values = layer_blocks.tensor_split([spec.num_kv_heads * spec.block_size * spec.head_dim], dim=1)
    return keys.unflatten(1, (*rows, spec.head_dim)), values.unflatten(1, (*rows, spec.value_head_dim))


def attention(
    qkv: Tensor,
    spec: AttentionSpec,
    query_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    table_starts: Tensor,
    pool: Tensor,
    layer: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention in float64, `[num_tokens, num_heads * v_head_dim]`; takes arguments as the kernels do."""
    out = torch.empty((len(qkv), spec.num_heads, spec.value_head_dim), dtype=torch.float64, device=qkv.device)
    queries = qkv[:, : spec.qkv_sizes[0]].unflatten(1, (spec.num_heads, spec.head_dim))
    sequences = zip(
        pairwise(query_starts.tolist()), context_lens.tolist(), pairwise(table_starts.tolist()), strict=True
    )
    for (begin, end), context_len, (first_entry, end_entry) in sequences:
        entries = block_table[first_entry:end_entry].long().to(qkv.device)
        group = spec.num_heads // spec.num_kv_heads
        chunk = max(1, _MAX_SCORES // (context_len * group))
        for first in range(begin, end, chunk):
            last = min(first + chunk, end)
            positions = torch.arange(context_len - (end - first), context_len - (end - last), device=qkv.device)
            first_key = max(0, int(positions[0]) + 1 - spec.window) if spec.window else 0
            for head in range(spec.num_kv_heads):
                keys, values = _gather(pool, spec, entries, layer, head, first_key, int(positions[-1]) + 1, qkv.dtype)
                heads = slice(head * group, (head + 1) * group)
                sink = None if sinks is None else sinks[heads]
                out[first:last, heads] = _attend(
                    queries[first:last, heads], keys, values, positions, first_key, spec, sink
                )
    return out.flatten(1)


def _gather(
    pool: Tensor, spec: AttentionSpec, entries: Tensor, layer: int, head: int, begin: int, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of kv head `head` for positions `[begin, end)`, `[end - begin, dim]` each."""
    positions = torch.arange(begin, end, device=pool.device)
    entry = entries[positions // spec.block_size]
    index = torch.where(entry < 0, ~entry, entry + layer)
    keys, values = keys_and_values(layer_blocks(pool, spec, dtype), spec)
    return keys[index, head, positions % spec.block_size], values[index, head, positions % spec.block_size]


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    first_key: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from queries [tokens, heads, dim] at positions [tokens] to keys and values [keys, dim].

    Returns [tokens, heads, dim of a value].
    """
    scores = torch.einsum("qhd,kd->qhk", queries.double(), keys.double()) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = positions[:, None] - torch.arange(first_key, first_key + len(keys), device=positions.device)
    visible = distance >= 0
    if spec.window:
        visible &= distance < spec.window
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None].expand(len(queries), -1, 1)
        scores = torch.cat([scores, column], dim=2)
    weights = scores.softmax(2)[:, :, : len(keys)]
    return torch.einsum("qhk,kd->qhd", weights, values.double())
