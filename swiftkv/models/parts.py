"""The parts that layers are made of. Sizes are those of a rank's part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftkv.kernels.experts import PackedExperts, Router
from swiftkv.kernels.ops import PackedLinear, PackedMlp
from swiftkv.models.decoder import KVPlace, StepKV

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.parallel import Ranks


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary attention with grouped heads; keys and queries may be normalised."""

    place: KVPlace
    ranks: Ranks
    cos_sin: Tensor  # float32 [max_model_len, head_dim]
    norm: Tensor  # [hidden_size]
    norm_eps: float
    qkv: PackedLinear  # hidden_size -> num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: PackedLinear  # num_heads * v_head_dim -> hidden_size
    post_norm: Tensor | None = None  # [hidden_size], normalises the sum before it is added
    sinks: Tensor | None = None  # float32 [num_heads]
    value_scale: float = 1.0  # scales the attended values; the cache has unscaled ones

    def add_to(self, hidden: Tensor, kv: StepKV) -> None:
        ops, place, stream = self.ranks.ops, self.place, kv.stream
        batch, region = kv.batch(place), kv.regions[place.group]
        qkv = ops.norm_linear(hidden, self.norm, self.norm_eps, self.qkv)
        stream.before_write(place.layer)
        ops.rope_write_kv(
            qkv, self.cos_sin, self.q_norm, self.k_norm, self.norm_eps, place.spec, batch, region, place.index
        )
        stream.after_write(place.layer)
        attended = ops.attention(qkv, place.spec, batch, region, place.index, self.sinks)  # [T, num_heads * v_head_dim]
        stream.after_attention(place.layer)
        if self.value_scale != 1:
            attended *= self.value_scale
        if self.post_norm is None:
            self.ranks.linear_residual(attended, self.out, hidden)
        else:
            ops.rms_norm_residual(self.ranks.linear(attended, self.out), self.post_norm, self.norm_eps, hidden)

    @property
    def is_deferrable(self) -> bool:
        return self.ranks.is_alone and self.value_scale == 1


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The MLP of Llama: an activation of gate and up, then down."""

    ranks: Ranks
    mlp: PackedMlp[PackedLinear]
    post_norm: Tensor | None = None  # [hidden_size], normalises the sum before it is added

    def add_to(self, hidden: Tensor) -> None:
        if self.post_norm is None:
            self.ranks.add_gated_mlp(hidden, self.mlp)
        else:
            added = self.ranks.gated_mlp(hidden, self.mlp)
            self.ranks.ops.rms_norm_residual(added, self.post_norm, self.mlp.norm_eps, hidden)

    @property
    def is_deferrable(self) -> bool:
        return self.ranks.is_alone

    @property
    def tokens_per_expert(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Some experts out of many for each token; the gate, which every rank has whole, chooses them."""

    ranks: Ranks
    norm: Tensor  # [hidden_size]
    norm_eps: float
    gate: PackedLinear  # hidden_size -> num_experts
    select_bias: Tensor | None  # float32 [num_experts]
    router: Router
    experts: PackedExperts

    def add_to(self, hidden: Tensor) -> None:
        ops = self.ranks.ops
        normed = ops.rms_norm(hidden, self.norm, self.norm_eps)
        choices = ops.route(ops.logits(normed, self.gate), self.router, self.select_bias)
        self.ranks.add_experts(normed, choices, self.experts, hidden)

    @property
    def is_deferrable(self) -> bool:
        return self.ranks.is_alone

    @property
    def tokens_per_expert(self) -> Tensor:
        return self.experts.tokens_per_expert
