"""Mixture of experts on the CPU: each expert's rows through the kernels of linear layers. See `kernels.cpu`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels.cpu_deferral import empty
from swiftkv.kernels.cpu_packing import pack_linear
from swiftkv.kernels.cpu_tensors import DTYPES, check, native_activation
from swiftkv.kernels.experts import Choices, ExpertLayer, ExpertWeights, Router

_SCORES = {
    "softmax": _cpu.Score.SOFTMAX,
    "softmax_of_chosen": _cpu.Score.SOFTMAX_OF_CHOSEN,
    "sigmoid": _cpu.Score.SIGMOID,
}


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of a layer in the layout that this CPU's kernels read."""

    native: _cpu.PackedExperts
    hidden_size: int
    inner_size: int
    dtype: torch.dtype
    tokens_per_expert: Tensor  # int64 [num_experts]

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


def route(logits: Tensor, router: Router, select_bias: Tensor | None = None) -> Choices:
    """Choose experts by logits float32 [T, num_experts] (`Ops.route`); a token's choice depends on its row only."""
    rows = logits.shape[0]
    check(logits, torch.float32, (rows, router.num_experts), "logits")
    if select_bias is not None:
        check(select_bias, torch.float32, (router.num_experts,), "select_bias")
    experts = empty((rows, router.top_k), torch.int32)
    weights = empty((rows, router.top_k), torch.float32)
    native = _cpu.Router(
        router.num_experts,
        router.top_k,
        _SCORES[router.score],
        router.num_groups,
        router.top_groups,
        router.renormalise,
        router.scale,
    )
    bias = 0 if select_bias is None else select_bias.data_ptr()
    _cpu.route(native, logits.data_ptr(), rows, bias, experts.data_ptr(), weights.data_ptr())
    return Choices(experts, weights)


def pack_experts(layer: ExpertLayer) -> PackedExperts:
    """Copy a layer's experts into the layout that this CPU's kernels read, one after the other.

    Raises `ValueError` if they differ in shape or dtype, or the dtype has no kernel.
    """
    packed: PackedExperts | None = None
    for expert in layer.weights:
        packed = packed or _start(layer, expert)
        _append(packed, expert)
    assert packed is not None
    assert len(packed.native) == layer.num_experts
    return packed


def _start(layer: ExpertLayer, like: ExpertWeights) -> PackedExperts:
    inner_size, hidden_size = like.gate.shape
    dtype = like.gate.dtype
    if dtype not in DTYPES:
        raise ValueError(f"no CPU kernel for {dtype}: use float32, bfloat16 or float16")
    native = _cpu.PackedExperts(hidden_size, inner_size, DTYPES[dtype], native_activation(layer.activation))
    return PackedExperts(native, hidden_size, inner_size, dtype, torch.zeros(layer.num_experts, dtype=torch.int64))


def _append(packed: PackedExperts, expert: ExpertWeights) -> None:
    gate_up = pack_linear([expert.gate, expert.up], [expert.gate_bias, expert.up_bias], interleave=True)
    packed.native.append(gate_up, pack_linear([expert.down], [expert.down_bias]))


def add_experts(x: Tensor, choices: Choices, experts: PackedExperts, residual: Tensor) -> None:
    """Add each token's weighted experts to `residual` (`Ops.add_experts`).

    An expert's output is rounded to the dtype; their weighted sum is kept in float32 and rounded once. Raises
    `IndexError` for an expert that does not exist.
    """
    rows, top_k = choices.experts.shape
    check(x, experts.dtype, (rows, experts.hidden_size), "x")
    check(residual, experts.dtype, (rows, experts.hidden_size), "residual")
    check(choices.experts, torch.int32, (rows, top_k), "experts")
    check(choices.weights, torch.float32, (rows, top_k), "weights")
    _cpu.add_experts(
        experts.native,
        x.data_ptr(),
        choices.experts.data_ptr(),
        choices.weights.data_ptr(),
        rows,
        top_k,
        experts.tokens_per_expert.data_ptr(),
        residual.data_ptr(),
    )
