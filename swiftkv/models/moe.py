"""Qwen3-MoE and Mixtral: the layers of `models/dense.py`, some or all with a mixture of experts as their MLP.

Checkpoints have one tensor per expert and matrix, or one for all experts of a layer (`gate_up_proj`, `down_proj`).
This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from swiftkv.kernels.experts import Router
from swiftkv.models.config import DecoderConfig
from swiftkv.models.decoder import Layer, LayeredDecoder, LayerSource, MlpPart
from swiftkv.models.dense import (
    MLP_NORM,
    Biases,
    Traits,
    all_layers,
    attention_part,
    decoder_config,
    decoder_weights,
    mlp_part,
    mlp_weights,
)
from swiftkv.models.hf_config import HFConfig, NotNegative, Positive, mistakes_in, read_known_keys
from swiftkv.models.parts import ExpertMlp
from swiftkv.models.weights import ExpertModules, PackedPart, RankSlices, Weight

_SELECT_BIAS = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names in checkpoints: a layer's block of experts, and the matrices of one of them."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """The shape of a model some of whose layers have experts."""

    router: Router
    expert_size: int  # inner size of each expert
    expert_layers: tuple[int, ...]

    def _inner_sizes(self) -> dict[str, int]:
        return DecoderConfig._inner_sizes(self) | {"experts": self.expert_size}

    def of_rank(self, num_ranks: int) -> Self:
        return replace(DecoderConfig.of_rank(self, num_ranks), expert_size=self.expert_size // num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedExpertsConfig(MoeConfig):
    """The shape of a model whose checkpoints have a name for each expert."""

    names: ExpertNames
    has_select_bias: bool = False


class _Keys(HFConfig):
    """The keys of both families; defaults are those of transformers."""

    num_experts: int | None = None  # transformers accepts both names
    num_local_experts: int | None = None
    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("num_experts", "num_local_experts", "num_experts_per_tok"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"{key}: {value} is not a positive number")


class _MixtralKeys(_Keys):
    num_key_value_heads: int | None = 8
    rms_norm_eps: NotNegative = 1e-5
    rope_theta: Positive = 1e6
    sliding_window: int | None = None


class _Qwen3Keys(_Keys):
    qkv_bias: bool = False  # all published files have this value, and those of the next two keys
    use_qk_norm: bool = True
    shared_expert_intermediate_size: int = 0
    num_key_value_heads: int | None = 4
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a model, as its `config.json` says."""

    num_experts: int
    renormalise: bool
    inner_size: int
    layers: tuple[int, ...]


def _experts_of_mixtral(raw: HFConfig) -> _Experts:
    assert isinstance(raw, _MixtralKeys)
    num_experts = raw.num_local_experts or raw.num_experts or 8
    return _Experts(num_experts, True, raw.intermediate_size, tuple(range(raw.num_hidden_layers)))


def _experts_of_qwen3(raw: HFConfig) -> _Experts:
    assert isinstance(raw, _Qwen3Keys)
    if raw.decoder_sparse_step < 1 or raw.moe_intermediate_size < 1:
        raise ValueError("decoder_sparse_step and moe_intermediate_size must be positive numbers")
    if raw.qkv_bias or not raw.use_qk_norm or raw.shared_expert_intermediate_size:
        raise ValueError("qkv_bias, use_qk_norm, shared_expert_intermediate_size: only false, true and 0 are supported")
    without = set(raw.mlp_only_layers or ())
    layers = range(raw.decoder_sparse_step - 1, raw.num_hidden_layers, raw.decoder_sparse_step)
    return _Experts(
        num_experts=raw.num_experts or raw.num_local_experts or 128,
        renormalise=raw.norm_topk_prob,
        inner_size=raw.moe_intermediate_size,
        layers=tuple(layer for layer in layers if layer not in without),
    )


@dataclass(frozen=True, slots=True)
class _Family:
    keys: type[_Keys]
    traits: Traits
    experts: Callable[[HFConfig], _Experts]
    names: ExpertNames


_FAMILIES = {
    "MixtralForCausalLM": _Family(
        keys=_MixtralKeys,
        traits=Traits(biases=lambda raw: Biases(), window_layers=all_layers),
        experts=_experts_of_mixtral,
        names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "Qwen3MoeForCausalLM": _Family(
        keys=_Qwen3Keys,
        traits=Traits(
            window_layers=lambda raw: all_layers(raw) if raw.use_sliding_window else (),
            qk_norm=True,
        ),
        experts=_experts_of_qwen3,
        names=ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
}


class MoeDecoder(LayeredDecoder):
    """A `Decoder` of pre-normalised layers, each rotary attention and an MLP or a mixture of experts."""

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file, family = directory / "config.json", _FAMILIES[architecture]
        raw = read_known_keys(file, family.keys)
        shape = decoder_config(architecture, directory, raw, family.traits)
        with mistakes_in(file):
            experts = family.experts(raw)
            router = Router(experts.num_experts, raw.num_experts_per_tok, "softmax", experts.renormalise)
        return shape.extended(
            NamedExpertsConfig,
            router=router,
            expert_size=experts.inner_size,
            expert_layers=experts.layers,
            names=family.names,
        )

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, moe_mlp_weights)

    @staticmethod
    def layer(source: LayerSource) -> Layer:
        return Layer(attention_part(source), moe_mlp_part(source))


def moe_mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    """Return the tensors of the second half of a layer, with experts where it has some."""
    assert isinstance(config, NamedExpertsConfig)
    if layer not in config.expert_layers:
        return mlp_weights(config, part, layer)
    hidden, inner, count = config.hidden_size, config.expert_size, config.router.num_experts
    rows, prefix = part.of_size(inner), f"model.layers.{layer}"
    block = f"{prefix}.{config.names.block}"
    weights = {
        f"{prefix}.{MLP_NORM}.weight": Weight((hidden,)),
        f"{block}.gate.weight": Weight((count, hidden)),
    }
    if config.has_select_bias:
        weights[f"{block}.{_SELECT_BIAS}"] = Weight((count,))
    gate_up, down = f"{prefix}.mlp.experts.gate_up_proj", f"{prefix}.mlp.experts.down_proj"
    for index in range(count):
        expert = _expert(config, layer, index)
        gate_in = PackedPart(gate_up, (count, 2 * inner, hidden), (index, slice(0, inner)))
        up_in = PackedPart(gate_up, (count, 2 * inner, hidden), (index, slice(inner, 2 * inner)))
        down_in = PackedPart(down, (count, hidden, inner), (index,))
        weights |= {
            f"{expert.gate}.weight": Weight((inner, hidden), (rows,), packed=gate_in),
            f"{expert.up}.weight": Weight((inner, hidden), (rows,), packed=up_in),
            f"{expert.down}.weight": Weight((hidden, inner), (slice(0, hidden), rows), packed=down_in),
        }
    return weights


def moe_mlp_part(source: LayerSource) -> MlpPart:
    """Pack the second half of a layer, with experts where it has some."""
    config, packer, layer = source.config, source.packer, source.place.layer
    assert isinstance(config, NamedExpertsConfig)
    if layer not in config.expert_layers:
        return mlp_part(source)
    block = f"{source.prefix}.{config.names.block}"
    experts = [_expert(config, layer, index) for index in range(config.router.num_experts)]
    return ExpertMlp(
        ranks=source.ranks,
        norm=source.norm(MLP_NORM),
        norm_eps=config.rms_norm_eps,
        gate=packer.linear(f"{block}.gate"),
        select_bias=packer.float32(f"{block}.{_SELECT_BIAS}") if config.has_select_bias else None,
        router=config.router,
        experts=packer.experts(experts, config.activation),
    )


def _expert(config: NamedExpertsConfig, layer: int, index: int) -> ExpertModules:
    names = config.names
    module = f"model.layers.{layer}.{names.block}.experts.{index}"
    return ExpertModules(f"{module}.{names.gate}", f"{module}.{names.up}", f"{module}.{names.down}")
