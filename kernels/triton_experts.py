"""Mixture of experts on GPUs: rows sorted by expert on the device, then one kernel for all experts' products.

The host waits for nothing and sizes depend on the number of tokens alone, so a CUDA graph can hold a step. A row's sum
over K is always in the same order and in tiles of one size, so a token's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkv.kernels.experts import Choices, GatedActivation
from swiftkv.kernels.reference_experts import PackedExperts
from swiftkv.kernels.triton_elementwise import gated_activation

_ROWS = 64  # rows of a tile: the fewest that an H100's matrix units take at full speed, also used for decoding
_COLUMNS = 64
_INNER = 64
_COMBINED_TILE = 1024


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows, one for each choice of a token, sorted by expert; each expert's rows begin a new tile."""

    expert: Tensor  # int32 [num_tiles], or -1 where no tile is needed
    choice: Tensor  # int32 [num_tiles * _ROWS], token * top_k + place, or -1
    row_of_choice: Tensor  # int32 [T * top_k]


def add_experts(x: Tensor, choices: Choices, experts: PackedExperts, residual: Tensor) -> None:
    """Add each token's weighted experts to `residual` (`Ops.add_experts`).

    The activation and an expert's output are rounded to the dtype; their weighted sum is float32 and rounded once.
    """
    if not len(x):
        return
    tiles = _sort(choices.experts, experts.tokens_per_expert)
    top_k = choices.experts.shape[1]
    activated = _gate_up(x, experts, tiles, top_k)
    outputs = _down(activated, experts, tiles)
    tokens, width = residual.shape
    tile = min(_COMBINED_TILE, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, tile))](
        outputs, tiles.row_of_choice, choices.weights, residual, width, TOP_K=top_k, TILE=tile, num_warps=4
    )


def _sort(chosen: Tensor, tokens_per_expert: Tensor) -> _Tiles:
    flat, num_experts = chosen.flatten().long(), len(tokens_per_expert)
    counts = torch.zeros_like(tokens_per_expert).scatter_add_(0, flat, torch.ones_like(flat))
    tokens_per_expert.add_(counts)
    tiles_of_expert = (counts + _ROWS - 1) // _ROWS
    tile_ends = tiles_of_expert.cumsum(0)
    num_tiles = min(len(flat), len(flat) // _ROWS + num_experts)  # the most that there can be
    tile = torch.arange(num_tiles, device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    expert = torch.where(expert < num_experts, expert, -1)
    order = flat.sort(stable=True).indices
    first_of_expert = (counts.cumsum(0) - counts)[flat[order]]
    place = torch.arange(len(flat), device=flat.device) - first_of_expert
    row = (tile_ends - tiles_of_expert)[flat[order]] * _ROWS + place
    choice = torch.full((num_tiles * _ROWS,), -1, dtype=torch.int32, device=flat.device)
    choice.scatter_(0, row, order.int())
    row_of_choice = torch.empty(len(flat), dtype=torch.int32, device=flat.device).scatter_(0, order, row.int())
    return _Tiles(expert.int(), choice, row_of_choice)


def _gate_up(x: Tensor, experts: PackedExperts, tiles: _Tiles, top_k: int) -> Tensor:
    hidden_size, inner_size = x.shape[1], experts.down.shape[2]
    out = x.new_empty(len(tiles.choice), inner_size)
    gated: GatedActivation = experts.activation
    _expert_gate_up[(len(tiles.expert), triton.cdiv(inner_size, _COLUMNS))](
        x,
        experts.gate_up,
        experts.gate_up_bias,
        tiles.expert,
        tiles.choice,
        out,
        hidden_size,
        inner_size,
        ALPHA=gated.alpha,
        CUBIC=gated.cubic,
        LIMIT=gated.limit,
        UP_OFFSET=gated.up_offset,
        TOP_K=top_k,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        num_warps=4,
        num_stages=3,
    )
    return out


def _down(activated: Tensor, experts: PackedExperts, tiles: _Tiles) -> Tensor:
    hidden_size, inner_size = experts.down.shape[1:]
    out = activated.new_empty(len(activated), hidden_size)
    _expert_down[(len(tiles.expert), triton.cdiv(hidden_size, _COLUMNS))](
        activated,
        experts.down,
        experts.down_bias,
        tiles.expert,
        tiles.choice,
        out,
        inner_size,
        hidden_size,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit
def _expert_gate_up(
    x: tl.tensor,  # [T, K]
    weights: tl.tensor,  # [num_experts, 2 * N, K], gate rows first
    biases: tl.tensor,  # [num_experts, 2 * N] or None
    experts: tl.tensor,  # [tiles]
    choices: tl.tensor,  # [tiles * ROWS]
    out: tl.tensor,  # [tiles * ROWS, N]
    k_size: tl.tensor,
    n_size: tl.tensor,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        choice = tl.load(choices + row)
        exists = choice >= 0
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_exists = column < n_size
        inner = tl.arange(0, INNER)
        source = x + (tl.where(exists, choice, 0) // TOP_K).to(tl.int64)[:, None] * k_size
        gate_rows = weights + (expert * 2 * n_size + column)[None, :] * k_size
        up_rows = gate_rows + n_size * k_size
        gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, k_size, INNER):
            k = start + inner
            a = tl.load(source + k[None, :], mask=exists[:, None] & (k < k_size)[None, :], other=0.0)
            mask = (k < k_size)[:, None] & column_exists[None, :]
            gate = tl.dot(a, tl.load(gate_rows + k[:, None], mask=mask, other=0.0), gate, input_precision="ieee")
            up = tl.dot(a, tl.load(up_rows + k[:, None], mask=mask, other=0.0), up, input_precision="ieee")
        if biases is not None:
            bias = biases + expert * 2 * n_size + column
            gate += tl.load(bias, mask=column_exists, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + n_size, mask=column_exists, other=0.0).to(tl.float32)[None, :]
        activated = gated_activation(gate, up, ALPHA, CUBIC, LIMIT, UP_OFFSET).to(out.dtype.element_ty)
        target = out + row[:, None] * n_size + column[None, :]
        tl.store(target, activated, mask=exists[:, None] & column_exists[None, :])


@triton.jit
def _expert_down(
    x: tl.tensor,  # [tiles * ROWS, K]
    weights: tl.tensor,  # [num_experts, N, K]
    biases: tl.tensor,  # [num_experts, N] or None
    experts: tl.tensor,  # [tiles]
    choices: tl.tensor,  # [tiles * ROWS]
    out: tl.tensor,  # [tiles * ROWS, N]
    k_size: tl.tensor,
    n_size: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        exists = tl.load(choices + row) >= 0
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_exists = column < n_size
        inner = tl.arange(0, INNER)
        weight_rows = weights + (expert * n_size + column)[None, :] * k_size
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, k_size, INNER):
            k = start + inner
            a = tl.load(x + row[:, None] * k_size + k[None, :], mask=exists[:, None] & (k < k_size)[None, :], other=0.0)
            mask = (k < k_size)[:, None] & column_exists[None, :]
            total = tl.dot(a, tl.load(weight_rows + k[:, None], mask=mask, other=0.0), total, input_precision="ieee")
        if biases is not None:
            bias = tl.load(biases + expert * n_size + column, mask=column_exists, other=0.0)
            total += bias.to(tl.float32)[None, :]
        target = out + row[:, None] * n_size + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=exists[:, None] & column_exists[None, :])


@triton.jit
def _combine(
    outputs: tl.tensor,  # [rows, width]
    row_of_choice: tl.tensor,  # [T, TOP_K]
    weights: tl.tensor,  # [T, TOP_K]
    residual: tl.tensor,  # [T, width]
    width: tl.tensor,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    total = tl.zeros((TILE,), dtype=tl.float32)
    for place in range(TOP_K):
        row = tl.load(row_of_choice + token * TOP_K + place).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + place)
        total += weight * tl.load(outputs + row * width + column, mask=mask, other=0.0).to(tl.float32)
    target = residual + token * width + column
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(residual.dtype.element_ty), mask=mask)
