"""Mixture of experts as data: how a layer chooses experts for a token, and what an expert computes.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.kernels.weight_codes import CodedMatrix

Score = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Router:
    """The rule by which a layer chooses experts for a token and weighs them.

    - Logits become scores: `softmax` over all experts, `sigmoid` of each, or with `softmax_of_chosen` the logits
      themselves.
    - The `top_k` experts with the largest scores are chosen; of equal ones the lower expert. For choosing only, a
      selection bias is added to the scores.
    - With groups of consecutive experts, only the `top_groups` groups take part whose two largest scores have the
      largest sums.
    - An expert's weight is its score, or with `softmax_of_chosen` the softmax over the chosen experts. It is divided by
      the sum of the chosen ones if `renormalise`, and then multiplied by `scale`.
    """

    num_experts: int
    top_k: int
    score: Score
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be chosen from {self.top_groups} of {self.num_groups} equal groups"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(f"{self.top_groups} groups have fewer than {self.top_k} of {self.num_experts} experts")


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The activation (up' + up_offset) * gate' * sigmoid(alpha * gate' + cubic * gate'^3), with limited gate' and up'.

    gate' is min(gate, limit), up' is up within `limit` on both sides. The default is silu(gate) * up; gpt-oss has an
    alpha of 1.702, a limit of 7 and an offset of 1.
    """

    alpha: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    up_offset: float = 0.0


SILU = GatedActivation()
_GELU_ALPHA = 2 * math.sqrt(2 / math.pi)
GELU_TANH = GatedActivation(alpha=_GELU_ALPHA, cubic=0.044715 * _GELU_ALPHA)
"""gelu(gate) * up in its usual approximation, gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights `gate` and `up` [inner_size, hidden_size] and `down` [hidden_size, inner_size] of one expert."""

    gate: Tensor | CodedMatrix
    up: Tensor | CodedMatrix
    down: Tensor | CodedMatrix
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer, to be packed one after the other: `weights` yields `num_experts` times."""

    num_experts: int
    activation: GatedActivation
    weights: Iterable[ExpertWeights]


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts of each of a step's tokens, and their weights; both [T, top_k]."""

    experts: Tensor  # int32
    weights: Tensor  # float32


class PackedExperts(Protocol):
    """The experts of one layer, in the form that one kind of kernels reads."""

    @property
    def nbytes(self) -> int: ...
    @property
    def tokens_per_expert(self) -> Tensor:
        """The number of times that each expert was chosen: int64 [num_experts], on the device of the kernels."""
