"""The `Ops` in plain torch, for any dtype and device: the results that fast kernels are compared with.

Written to be read. Sums are kept in float32, or in float64 for float64 tensors; results are rounded to the tensors'
dtype where a model in that dtype would store them. Unlike the CPU's kernels, these are not batch-invariant: torch
orders a sum by the shape of its operands.

KV lies in the pool as the fast kernels' does, one layer block after the other, but inside a layer block in an order of
its own: keys `[block_size, num_kv_heads, head_dim]`, then values `[block_size, num_kv_heads, v_head_dim]`. A pool is
written and read by one kind of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.block_table import layer_block_index
from swiftkv.kernels.ops import PackedMlp
from swiftkv.kernels.reference_experts import PackedExperts, activate, add_experts, pack_experts, route
from swiftkv.kernels.weight_codes import CodedMatrix, unpacked

__all__ = [
    "PackedExperts",
    "PackedLinear",
    "add_experts",
    "add_gated_mlp",
    "attention",
    "deferred",
    "embed",
    "gated_mlp",
    "keeps_codes",
    "linear",
    "linear_residual",
    "logits",
    "name",
    "norm_linear",
    "pack_experts",
    "pack_linear",
    "prepare_batch",
    "rms_norm",
    "rms_norm_residual",
    "rope_write_kv",
    "rounding",
    "route",
    "set_num_threads",
]

name = rounding = "reference"


def set_num_threads(n: int) -> None:
    """Share the work of every function between `n` threads."""
    torch.set_num_threads(n)


def deferred() -> AbstractContextManager[None]:
    """Return a context that changes nothing: every call runs at once."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer `[out_features, in_features]`; in a gated MLP, gate rows precede up rows."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    interleaved: bool

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def keeps_codes(dtype: torch.dtype) -> bool:
    """Return `False`: torch multiplies unpacked weights."""
    return False


def pack_linear(
    weights: Sequence[Tensor | CodedMatrix],
    biases: Sequence[Tensor | None] | None = None,
    interleave: bool = False,
) -> PackedLinear:
    """Pack weights [N_i, K] and biases [N_i] or None as one layer of sum(N_i) outputs, on the weights' device.

    Raises `ValueError` if the weights differ in K or dtype, or gate and up in size.
    """
    biases = biases_of(weights, biases)
    if interleave and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        raise ValueError("interleave takes gate and up, of one shape")
    rows = [unpacked(w) for w in weights]
    bias = None
    if any(b is not None for b in biases):
        parts = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(rows, biases, strict=True)]
        bias = torch.cat(parts)
    weight = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
    return PackedLinear(weight, bias, interleave)


def biases_of(
    weights: Sequence[Tensor | CodedMatrix], biases: Sequence[Tensor | None] | None
) -> Sequence[Tensor | None]:
    """Return a bias or None for each of the weights to pack together. Raises `ValueError` if they cannot be packed."""
    biases = [None] * len(weights) if biases is None else biases
    if not weights or len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases: give one bias or None for each weight")
    if any(w.shape[1] != weights[0].shape[1] or w.dtype != weights[0].dtype for w in weights):
        raise ValueError("weights that are packed together must have one dtype and one in_features")
    return biases


def linear(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias, [M, N]."""
    assert not w.interleaved
    return _multiply(x, w).to(x.dtype)


def linear_residual(x: Tensor, w: PackedLinear, residual: Tensor) -> None:
    """Add x [M, K] @ w.T + bias to `residual` [M, N] in place, rounded once after the sum."""
    assert not w.interleaved
    residual.copy_(_multiply(x, w) + residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., K] / sqrt(mean(x^2) + eps) times weight [K].

    Rounds before and after the product; only after it if weight is float32 and x is not (`Ops.rms_norm`).
    """
    wide = x.to(_accumulator(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def rms_norm_residual(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    """Add rms_norm(x [M, K], weight [K], eps) to `residual` [M, K] in place; both norm and sum are rounded."""
    residual += rms_norm(x, weight, eps)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, w: PackedLinear) -> Tensor:
    """Return linear(rms_norm(x [M, K], norm_weight [K], eps), w), [M, N]."""
    return linear(rms_norm(x, norm_weight, eps), w)


def gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
    """Return linear(a, down), [M, N], of the activation a of gate and up, which is rounded once."""
    return linear(_gated(x, mlp), mlp.down)


def add_gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> None:
    """Add the gated MLP of x [M, K] to x in place, rounded once after the sum."""
    linear_residual(_gated(x, mlp), mlp.down, x)


def logits(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias in float32 (float64 for float64), [M, N]."""
    assert not w.interleaved
    return _multiply(x, w)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of table [V, K] for token_ids int32 [T], [T, K]. Raises `IndexError` for an id outside [0, V)."""
    return F.embedding(token_ids, table)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The places of a step's tokens and of their KV; all int64."""

    positions: Tensor  # [T]
    token_entries: Tensor  # [T], the block table entry of the block that a token's KV goes to
    query_starts: tuple[int, ...]  # [S + 1]
    context_lens: tuple[int, ...]  # [S]
    entries: tuple[Tensor, ...]  # [S][number of blocks]


def prepare_batch(
    spec: AttentionSpec,
    positions: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    table_starts: Tensor,
    *,
    device: torch.device | str | None = None,
) -> AttentionBatch:
    """Prepare a step's attention as `Ops.prepare_batch` says, on `device` or, without it, where the arguments are."""
    positions, block_table, table_starts = positions.long(), block_table.long(), table_starts.long()
    sequence = torch.repeat_interleave(query_starts.long().diff())  # [T]
    starts = table_starts.tolist()
    return AttentionBatch(
        positions=positions.to(device),
        token_entries=block_table[table_starts[sequence] + positions // spec.block_size].to(device),
        query_starts=tuple(query_starts.tolist()),
        context_lens=tuple(context_lens.tolist()),
        entries=tuple(block_table[start:end].to(device) for start, end in pairwise(starts)),
    )


def rope_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    spec: AttentionSpec,
    batch: AttentionBatch,
    pool: Tensor,
    layer: int,
) -> None:
    """Normalise and rotate q and k, and write k and v to the sequences' layer blocks (`Ops.rope_write_kv`)."""
    q, k, v = _split_heads(qkv, spec)
    cos, sin = cos_sin[batch.positions].to(_accumulator(qkv.dtype)).chunk(2, dim=-1)  # [T, head_dim / 2] each
    q.copy_(_rotate(q if q_norm is None else rms_norm(q, q_norm, eps), cos, sin))
    keys = _rotate(k if k_norm is None else rms_norm(k, k_norm, eps), cos, sin)
    key_blocks, value_blocks = _layer_blocks(pool, spec, qkv.dtype)
    index, offset = layer_block_index(batch.token_entries, layer), batch.positions % spec.block_size
    key_blocks[index, offset] = keys.to(qkv.dtype)
    value_blocks[index, offset] = v


def attention(
    qkv: Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    pool: Tensor,
    layer: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of the step's queries over their sequences' KV (`Ops.attention`)."""
    q, _, _ = _split_heads(qkv, spec)
    kv_blocks = _layer_blocks(pool, spec, qkv.dtype)
    out = q.new_empty((len(q), spec.num_heads, spec.value_head_dim))
    for s, (context_len, entries) in enumerate(zip(batch.context_lens, batch.entries, strict=True)):
        rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
        query_positions = batch.positions[rows]
        # Blocks that no query sees may be gone.
        first_block = int((query_positions[0] + 1 - spec.window).clamp(min=0)) // spec.block_size if spec.window else 0
        index = layer_block_index(entries[first_block:], layer)
        key_positions = torch.arange(first_block * spec.block_size, context_len, device=qkv.device)
        keys, values = (blocks[index].flatten(0, 1)[: len(key_positions)] for blocks in kv_blocks)
        distance = query_positions[:, None] - key_positions  # [queries, keys]
        visible = distance >= 0
        if spec.window:
            visible &= distance < spec.window
        out[rows] = _attend(q[rows], keys, values, visible, spec, sinks)
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend from q [queries, num_heads, head_dim] to k, v [keys, num_kv_heads, dim] where visible [queries, keys]."""
    wide = _accumulator(q.dtype)
    grouped = q.to(wide).view(len(q), k.shape[1], -1, q.shape[2])  # heads that share one kv head are neighbours
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.to(wide)) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(k.shape[1], -1, 1, 1).expand(-1, -1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hgqk,khd->qhgd", weights, v.to(wide)).flatten(1, 2).to(q.dtype)


def _gated(x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
    assert mlp.gate_up.interleaved
    gate, up = _multiply(rms_norm(x, mlp.norm, mlp.norm_eps), mlp.gate_up).chunk(2, dim=-1)
    return activate(gate, up, mlp.activation).to(x.dtype)


def _multiply(x: Tensor, w: PackedLinear) -> Tensor:
    wide = _accumulator(x.dtype)
    return F.linear(x.to(wide), w.weight.to(wide), None if w.bias is None else w.bias.to(wide))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by cos and sin [T, half]: dimension i < half together with dimension i + half."""
    half = cos.shape[-1]
    first, second, rest = x.to(cos.dtype).tensor_split([half, 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [T, heads, dim] of q, k and v."""
    q, k, v = torch.split(qkv, list(spec.qkv_sizes), dim=1)
    dims = spec.head_dim, spec.head_dim, spec.value_head_dim
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip((q, k, v), dims, strict=True))
    return q, k, v


def _layer_blocks(pool: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values of the pool's layer blocks, [N, block_size, num_kv_heads, dim] each."""
    layer_blocks = pool.view(dtype).view(-1, spec.layer_block_elements)
    rows = spec.block_size, spec.num_kv_heads
    keys, values = layer_blocks.tensor_split([spec.block_size * spec.num_kv_heads * spec.head_dim], dim=1)
    return keys.unflatten(1, (*rows, spec.head_dim)), values.unflatten(1, (*rows, spec.value_head_dim))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
