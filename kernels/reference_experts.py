"""Mixture of experts in plain torch, for any dtype and device; see `kernels.reference`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.experts import Choices, ExpertLayer, ExpertWeights, GatedActivation, Router
from swiftkv.kernels.weight_codes import unpacked

_SCORES_OF_GROUP = 2


def route(logits: Tensor, router: Router, select_bias: Tensor | None = None) -> Choices:
    """Choose experts by logits float32 [T, num_experts] (`Ops.route`)."""
    scores = logits
    if router.score == "softmax":
        scores = logits.softmax(-1)
    elif router.score == "sigmoid":
        scores = logits.sigmoid()
    for_choice = scores if select_bias is None else scores + select_bias
    if router.top_groups < router.num_groups:
        for_choice = _leave_out_groups(for_choice, router)
    chosen = _best(for_choice, router.top_k)
    weights = scores.gather(-1, chosen)
    if router.score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Choices(chosen.int(), weights * router.scale)


def _leave_out_groups(for_choice: Tensor, router: Router) -> Tensor:
    group_size = router.num_experts // router.num_groups
    groups = for_choice.view(-1, router.num_groups, group_size)  # [T, num_groups, group_size]
    scores = groups.topk(min(_SCORES_OF_GROUP, groups.shape[-1])).values.sum(-1)
    takes_part = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, _best(scores, router.top_groups), True)
    return groups.masked_fill(~takes_part.unsqueeze(-1), -torch.inf).flatten(-2)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values [T, N], the largest first; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of a layer as tensors, gate rows before up rows."""

    gate_up: Tensor  # [num_experts, 2 * inner_size, hidden_size]
    down: Tensor  # [num_experts, hidden_size, inner_size]
    gate_up_bias: Tensor | None  # [num_experts, 2 * inner_size]
    down_bias: Tensor | None  # [num_experts, hidden_size]
    activation: GatedActivation
    tokens_per_expert: Tensor  # int64 [num_experts]

    @property
    def nbytes(self) -> int:
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)


def pack_experts(layer: ExpertLayer) -> PackedExperts:
    """Copy the experts of a layer into one tensor each for gate and up, and for down, one expert at a time."""
    packed: PackedExperts | None = None
    for index, expert in enumerate(layer.weights):
        gate, up, down = map(unpacked, (expert.gate, expert.up, expert.down))
        packed = packed or _allocate(layer, expert, gate)
        packed.gate_up[index].copy_(torch.cat((gate, up)))
        packed.down[index].copy_(down)
        if packed.gate_up_bias is not None and expert.gate_bias is not None and expert.up_bias is not None:
            packed.gate_up_bias[index].copy_(torch.cat((expert.gate_bias, expert.up_bias)))
        if packed.down_bias is not None and expert.down_bias is not None:
            packed.down_bias[index].copy_(expert.down_bias)
    assert packed is not None
    return packed


def _allocate(layer: ExpertLayer, like: ExpertWeights, gate: Tensor) -> PackedExperts:
    inner_size, hidden_size = gate.shape
    new = gate.new_empty
    return PackedExperts(
        gate_up=new(layer.num_experts, 2 * inner_size, hidden_size),
        down=new(layer.num_experts, hidden_size, inner_size),
        gate_up_bias=None if like.gate_bias is None else new(layer.num_experts, 2 * inner_size),
        down_bias=None if like.down_bias is None else new(layer.num_experts, hidden_size),
        activation=layer.activation,
        tokens_per_expert=gate.new_zeros(layer.num_experts, dtype=torch.int64),
    )


def add_experts(x: Tensor, choices: Choices, experts: PackedExperts, residual: Tensor) -> None:
    """Add each token's weighted experts to `residual` (`Ops.add_experts`), rounded once after the sum."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros_like(residual, dtype=wide)
    chosen, weights = choices.experts.long(), choices.weights.to(wide)
    counts = chosen.flatten().bincount(minlength=len(experts.down))
    experts.tokens_per_expert.add_(counts)
    for expert in counts.nonzero().flatten().tolist():
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _linear(x[tokens].to(wide), experts.gate_up, experts.gate_up_bias, expert).chunk(2, dim=-1)
        activated = activate(gate, up, experts.activation).to(x.dtype).to(wide)
        outputs = _linear(activated, experts.down, experts.down_bias, expert)
        total.index_add_(0, tokens, outputs * weights[tokens, place, None])
    residual.copy_(total + residual)


def activate(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    """Return the gated activation of `gate` and `up`, of one shape."""
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    exponent = activation.alpha * gate
    if activation.cubic:
        exponent = exponent + activation.cubic * gate**3
    return (up + activation.up_offset) * gate * torch.sigmoid(exponent)


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, index: int) -> Tensor:
    return F.linear(x, weights[index].to(x.dtype), None if biases is None else biases[index].to(x.dtype))
