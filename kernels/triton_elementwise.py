"""The work of a decoder between its matrix products, on a GPU: norms, gated activations, rotary embedding, new KV.

Each is bound by memory: one launch reads every operand once and writes every result once. Sums and products are float32
and are rounded to the tensors' dtype where a model in that dtype would store them; a row of a result depends on its own
row alone, bit for bit. Tensors are bfloat16, float16 or float32, contiguous, on one device.

`kernels/reference.py` has the same functions in plain torch.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.experts import SILU, GatedActivation
from swiftkv.kernels.triton_layout import NO_BLOCK_JIT, key_offset, layer_block_index, layer_block_offset, layer_blocks

_HEADS_TILE = 2048  # elements of q, k and v that one program rotates and writes
_GATED_TILE = 1024
_ELEMENTS_PER_THREAD = 8  # 16 bytes of a 2-byte dtype


class TokenBlocks(Protocol):
    """The position and the block table entry of each of a step's tokens, int32 `[T]`."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def token_entries(self) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x `[..., K]` / sqrt(mean(x^2) + eps) times weight `[K]`, rounded as `Ops.rms_norm` says."""
    width = x.shape[-1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape == (width,)
    out = torch.empty_like(x)
    if x.numel():
        tile = triton.next_power_of_2(width)
        _rms_norm[(x.numel() // width,)](x, weight, out, width, eps, TILE=tile, num_warps=_num_warps(tile))
    return out


def gated(gate_up: Tensor, activation: GatedActivation = SILU) -> Tensor:
    """Return the activation of gate and up, rounded once: gate_up `[T, 2 * N]`, gates first -> `[T, N]`."""
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width))
    if out.numel():
        tile = min(_GATED_TILE, triton.next_power_of_2(width))
        _gated[(num_rows, triton.cdiv(width, tile))](
            gate_up,
            out,
            width,
            ALPHA=activation.alpha,
            CUBIC=activation.cubic,
            LIMIT=activation.limit,
            UP_OFFSET=activation.up_offset,
            TILE=tile,
            num_warps=_num_warps(tile),
        )
    return out


def rope_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    spec: AttentionSpec,
    batch: TokenBlocks,
    pool: Tensor,
    layer: int,
) -> None:
    """Normalise and rotate q (in place) and k, and write k and v to the sequences' layer blocks.

    qkv `[T, num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)]`, in which k and v stay unchanged;
    cos_sin float32 `[max_len, rotary_dim]`: cosines, then sines; the first `rotary_dim` dimensions of q and k are
    rotated, one half with the other; q_norm and k_norm `[head_dim]` for a norm of each head, or None for both;
    pool uint8, flat, from the group's first byte on. Rounds to the dtype where transformers does: cosines and sines,
    each product, their sum. Nothing is written for a token whose entry is `NO_BLOCK`.
    """
    head_dim, rotary_dim = spec.head_dim, cos_sin.shape[1]
    largest = max(head_dim, spec.value_head_dim)
    assert qkv.is_contiguous()
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert rotary_dim <= head_dim
    assert rotary_dim % 2 == 0
    assert (q_norm is None) == (k_norm is None), "a norm for both or for neither"
    num_tokens, all_heads = qkv.shape[0], spec.num_heads + 2 * spec.num_kv_heads
    if not num_tokens:
        return
    heads = min(triton.next_power_of_2(all_heads), max(1, _HEADS_TILE // triton.next_power_of_2(largest)))
    rest = largest - rotary_dim
    _rope_write_kv[(num_tokens, triton.cdiv(all_heads, heads))](
        qkv,
        cos_sin,
        q_norm,
        k_norm,
        batch.positions,
        batch.token_entries,
        layer_blocks(pool, spec, qkv.dtype),
        layer,
        eps,
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=spec.value_head_dim,
        HALF=rotary_dim // 2,
        BLOCK_SIZE=spec.block_size,
        HEADS=heads,
        HALF_TILE=triton.next_power_of_2(rotary_dim // 2),
        REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )


def _num_warps(tile: int) -> int:
    return min(16, max(1, tile // (32 * _ELEMENTS_PER_THREAD)))


@triton.jit
def _rms_norm(
    x: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # [width]
    out: tl.tensor,  # [rows, width]
    width: tl.tensor,
    eps: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, TILE)
    mask = offsets < width
    dtype = out.dtype.element_ty
    wide = tl.load(x + start + offsets, mask=mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    if weight.dtype.element_ty == x.dtype.element_ty:
        normed = normed.to(dtype).to(tl.float32)
    scale = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + offsets, (normed * scale).to(dtype), mask=mask)


@triton.jit
def gated_activation(
    gate: tl.tensor,
    up: tl.tensor,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Return the activation of `kernels.experts.GatedActivation`, float32."""
    if float("inf") > LIMIT:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    exponent = -ALPHA * gate
    if CUBIC != 0.0:
        exponent -= CUBIC * gate * gate * gate
    return gate / (1.0 + tl.exp(exponent)) * (up + UP_OFFSET)


@triton.jit
def _gated(
    gate_up: tl.tensor,  # [rows, 2 * width]
    out: tl.tensor,  # [rows, width]
    width: tl.tensor,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offsets < width
    gate = tl.load(gate_up + row * 2 * width + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + offsets, mask=mask, other=0.0).to(tl.float32)
    activated = gated_activation(gate, up, ALPHA, CUBIC, LIMIT, UP_OFFSET)
    tl.store(out + row * width + offsets, activated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_heads(x: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_heads(
    x: tl.tensor,
    scale: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    is_query: tl.tensor,
    dtype: tl.tensor,
) -> tl.tensor:
    """Multiply x [heads, dims] by scale [heads, 1] and by the norm's weights; round as `Ops.rms_norm` says."""
    weight = tl.where(
        is_query, tl.load(q_norm + dims, mask=mask, other=0.0), tl.load(k_norm + dims, mask=mask, other=0.0)
    )
    normed = x * scale
    if q_norm.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["layer"])
def _rope_write_kv(
    x: tl.tensor,  # [T, NUM_HEADS * HEAD_DIM + NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)]
    cos_sin: tl.tensor,  # [max_len, 2 * HALF]
    q_norm: tl.tensor,  # [HEAD_DIM] or None, as k_norm
    k_norm: tl.tensor,
    positions: tl.tensor,  # [T]
    entries: tl.tensor,  # [T]
    kv: tl.tensor,  # [layer blocks, NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + VALUE_DIM)]
    layer: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # heads of one program
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,  # 0: all dimensions are rotated
) -> None:
    dtype = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_query = head < NUM_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    # Values follow keys as if they were further heads, each of them longer by EXTRA.
    EXTRA: tl.constexpr = VALUE_DIM - HEAD_DIM
    value = tl.where(is_turned, 0, head - NUM_HEADS - NUM_KV_HEADS)
    row = token * (NUM_HEADS * HEAD_DIM + NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM))
    source = row + head * HEAD_DIM + value * EXTRA
    size = tl.where(is_turned, HEAD_DIM, VALUE_DIM)
    half = tl.arange(0, HALF_TILE)[None, :]
    half_mask = half < HALF
    has_first, has_second = half_mask, half_mask
    if VALUE_DIM < 2 * HALF:
        has_first, has_second = half_mask & (half < size), half_mask & (HALF + half < size)
    first = _load_heads(x, source + half, exists & has_first)
    second = _load_heads(x, source + HALF + half, exists & has_second)
    rest_dims = 2 * HALF + tl.arange(0, REST_TILE if REST_TILE else 1)[None, :]
    has_rest = rest_dims < size
    rest = _load_heads(x, source + rest_dims, exists & has_rest)  # masked out where all is rotated

    turned_first, turned_second, turned_rest = first, second, rest
    if q_norm is not None:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        turned_first = _norm_heads(first, scale, q_norm, k_norm, half, half_mask, is_query, dtype)
        turned_second = _norm_heads(second, scale, q_norm, k_norm, HALF + half, half_mask, is_query, dtype)
        turned_rest = _norm_heads(rest, scale, q_norm, k_norm, rest_dims, rest_dims < HEAD_DIM, is_query, dtype)
    position = tl.load(positions + token)
    angles = cos_sin + position.to(tl.int64) * 2 * HALF + half
    cos = tl.load(angles, mask=half_mask, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=half_mask, other=0.0).to(dtype).to(tl.float32)
    first_cos, second_sin = (turned_first * cos).to(dtype), (turned_second * sin).to(dtype)
    second_cos, first_sin = (turned_second * cos).to(dtype), (turned_first * sin).to(dtype)
    first = tl.where(is_turned, first_cos.to(tl.float32) - second_sin.to(tl.float32), first).to(dtype)
    second = tl.where(is_turned, second_cos.to(tl.float32) + first_sin.to(tl.float32), second).to(dtype)
    rest = tl.where(is_turned, turned_rest, rest).to(dtype)

    tl.store(x + source + half, first, mask=is_query & half_mask)
    tl.store(x + source + HALF + half, second, mask=is_query & half_mask)
    if REST_TILE:
        tl.store(x + source + rest_dims, rest, mask=is_query & has_rest)
    entry = tl.load(entries + token)
    if entry != NO_BLOCK_JIT:
        block = layer_block_offset(layer_block_index(entry, layer), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM)
        offset = position % BLOCK_SIZE
        extra = tl.where(is_turned, 0, value * BLOCK_SIZE + offset) * EXTRA
        target = kv + block + key_offset(head - NUM_HEADS, offset, BLOCK_SIZE, HEAD_DIM) + extra
        is_new = exists & (head >= NUM_HEADS)
        tl.store(target + half, first, mask=is_new & has_first)
        tl.store(target + HALF + half, second, mask=is_new & has_second)
        if REST_TILE:
            tl.store(target + rest_dims, rest, mask=is_new & has_rest)
