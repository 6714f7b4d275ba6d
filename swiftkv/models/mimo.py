"""MiMo-V2: window layers with sinks and KV heads of their own, values smaller than keys, and many experts.

The halves of layers are those of `models/dense.py` and `models/moe.py`. A config file is that of a published
MiMo-V2-Flash or MiMo-V2.5, or one that transformers wrote.

MiMo-V2.5 has one matrix instead of the projections of queries, keys and values. The published matrix, which is FP8 in
blocks, consists of shards, as many as full attention has KV heads. Each shard has its queries, then its keys, then its
values. Programs that convert it write all queries, then all keys, then all values, under the same name and in the same
shape. So for a converted checkpoint, `config.json` must have a key of ours that says which it is, `fused_qkv_shards`.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import Router
from swiftkv.models import quantization
from swiftkv.models.config import AttentionKind, DecoderConfig, divided
from swiftkv.models.dense import Biases, Traits, decoder_config
from swiftkv.models.hf_config import (
    FULL,
    WINDOW,
    HFConfig,
    NotNegative,
    Positive,
    mistakes_in,
    read_known_keys,
    read_rope,
)
from swiftkv.models.moe import ExpertNames, MoeDecoder, NamedExpertsConfig
from swiftkv.models.weights import RankSlices, ShardedRows, Weight

_LAYOUTS = ("split", "fused_qkv")


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoConfig(NamedExpertsConfig):
    """The shape of a MiMo-V2."""

    fused_qkv_shards: int | None  # None: queries, keys and values have a matrix each


class _Keys(HFConfig, kw_only=True):
    """The keys of both spellings; defaults are those of transformers."""

    head_dim: int | None = 192
    v_head_dim: int = 128
    layernorm_epsilon: NotNegative | None = None  # the published spelling of rms_norm_eps
    rms_norm_eps: NotNegative = 1e-5
    num_key_value_heads: int | None = 4
    sliding_window: int | None = 129
    sliding_window_size: int | None = None  # does not count the query itself
    attention_value_scale: float | None = 0.707
    hybrid_layer_pattern: list[int] | None = None  # 1: a window
    moe_layer_freq: list[int] | None = None  # 1: experts
    mlp_layer_types: list[str] | None = None
    rope_theta: Positive = 5e6
    swa_rope_theta: Positive = 1e4
    partial_rotary_factor: float = 0.334
    swa_num_attention_heads: int | None = None
    swa_num_key_value_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int | None = None
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    attention_chunk_size: int | None = None  # the published file has it, and no code reads it
    num_nextn_predict_layers: int | None = None  # their weights are ignored
    attention_projection_layout: str = "split"
    fused_qkv_shards: int | None = None  # ours

    def layers_with_window(self) -> list[int]:
        if self.hybrid_layer_pattern is not None:
            return [layer for layer, flag in enumerate(self.hybrid_layer_pattern) if flag]
        return self.window_layers(lambda layer: layer > 0 and (layer + 1) % 6 > 0)

    def layers_with_experts(self) -> tuple[int, ...]:
        if self.moe_layer_freq is not None:
            return tuple(layer for layer, flag in enumerate(self.moe_layer_freq) if flag)
        if self.mlp_layer_types is not None:
            return tuple(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "sparse")
        return tuple(range(1, self.num_hidden_layers))

    def window(self) -> int:
        """Return how many tokens a query sees, itself included."""
        return self.sliding_window or 0 if self.sliding_window_size is None else self.sliding_window_size + 1


class MimoDecoder(MoeDecoder):
    """A `Decoder` of layers whose attention is of two kinds, with sinks in one of them."""

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file = directory / "config.json"
        raw = read_known_keys(file, _Keys)
        if raw.n_shared_experts or raw.scoring_func != "sigmoid" or raw.topk_method != "noaux_tc":
            raise ConfigError(
                f"{file}: only scoring_func sigmoid, topk_method noaux_tc and no shared experts are supported"
            )
        if raw.attention_projection_layout not in _LAYOUTS:
            raise ConfigError(f"{file}: attention_projection_layout: only {' and '.join(_LAYOUTS)} are supported")
        raw = msgspec.structs.replace(raw, rms_norm_eps=raw.layernorm_epsilon or raw.rms_norm_eps)
        traits = Traits(biases=lambda raw: Biases(qkv=raw.attention_bias), partial_rotary=True)
        shape = decoder_config(architecture, directory, raw.with_rope_of(FULL), traits)
        with mistakes_in(file):
            router = Router(
                raw.n_routed_experts,
                raw.num_experts_per_tok,
                "sigmoid",
                raw.norm_topk_prob,
                raw.routed_scaling_factor or 1.0,
                raw.n_group,
                raw.topk_group,
            )
        kinds = _attention_kinds(file, raw, shape.attention[0])
        return shape.extended(
            MimoConfig,
            attention=kinds,
            router=router,
            expert_size=raw.moe_intermediate_size,
            expert_layers=raw.layers_with_experts(),
            names=ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            has_select_bias=True,
            fused_qkv_shards=_fused_qkv_shards(file, raw, kinds),
        )

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        assert isinstance(config, MimoConfig)
        weights = MoeDecoder.weights(config, part)
        if config.fused_qkv_shards is not None:
            for kind in config.attention:
                weights |= _fused_qkv(weights, kind, config.hidden_size, config.fused_qkv_shards)
        return weights


def _fused_qkv_shards(file: Path, raw: _Keys, kinds: tuple[AttentionKind, ...]) -> int | None:
    """Return the number of shards in the matrix of queries, keys and values; `None` without such a matrix."""
    if raw.attention_projection_layout == "split":
        return None
    num_shards = raw.fused_qkv_shards
    if num_shards is None and quantization.is_block_wise(raw.quantization_config):
        num_shards = kinds[0].num_kv_heads  # as published
    if num_shards is None:
        raise ConfigError(
            f"{file}: attention_projection_layout: fused_qkv has two orders, which have one shape; add "
            f'"fused_qkv_shards": {kinds[0].num_kv_heads} to the file if the weights are in the published order, and '
            "1 if they are all queries, all keys, all values, as programs that quantize write them"
        )
    heads = sorted({count for kind in kinds for count in (kind.num_heads, kind.num_kv_heads)})
    if num_shards < 1 or any(count % num_shards for count in heads):
        raise ConfigError(f"{file}: fused_qkv_shards: {num_shards} does not divide {heads} heads")
    return num_shards


def _fused_qkv(weights: dict[str, Weight], kind: AttentionKind, hidden: int, num_shards: int) -> dict[str, Weight]:
    """Return the projections of the layers of a kind, as rows of the matrix that has all three."""
    sizes = {
        "q": kind.num_heads * kind.head_dim,
        "k": kind.num_kv_heads * kind.head_dim,
        "v": kind.num_kv_heads * kind.value_head_dim,
    }
    fused, begin = {}, 0
    for name, size in sizes.items():
        rows = slice(begin, begin + size // num_shards)
        begin = rows.stop
        for layer in kind.layers:
            attention = f"model.layers.{layer}.self_attn"
            whole = ShardedRows(f"{attention}.qkv_proj.weight", (sum(sizes.values()), hidden), num_shards, rows)
            weight = f"{attention}.{name}_proj.weight"
            fused[weight] = replace(weights[weight], packed=whole)
    return fused


def _attention_kinds(file: Path, raw: _Keys, of_all: AttentionKind) -> tuple[AttentionKind, ...]:
    sink = "attention_sink_bias"
    full = replace(
        of_all,
        v_head_dim=raw.v_head_dim,
        sinks=sink if raw.add_full_attention_sink_bias else None,
        value_scale=raw.attention_value_scale or 1.0,
    )
    windowed = replace(
        full,
        num_heads=raw.swa_num_attention_heads or of_all.num_heads,
        num_kv_heads=raw.swa_num_key_value_heads or 2 * of_all.num_kv_heads,
        head_dim=raw.swa_head_dim or of_all.head_dim,
        v_head_dim=raw.swa_v_head_dim or raw.v_head_dim,
        rope=read_rope(file, msgspec.structs.replace(raw, rope_theta=raw.swa_rope_theta).with_rope_of(WINDOW)),
        window=raw.window(),
        sinks=sink if raw.add_swa_attention_sink_bias else None,
    )
    if windowed.num_heads % windowed.num_kv_heads:
        raise ConfigError(
            f"{file}: swa_num_key_value_heads: {windowed.num_kv_heads} does not divide the {windowed.num_heads} heads "
            "of layers with a window"
        )
    return divided(full, windowed, raw.layers_with_window())
