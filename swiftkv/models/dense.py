"""Qwen3, Qwen2, Llama and Mistral: stacks of dense layers that differ only in the tensors that they have.

A step embeds its tokens; every layer then adds attention and a gated MLP (`models/parts.py`) to their hidden states, in
the loop of `models/decoder.py`; the head turns hidden states into logits:

    q, k, v = norm(hidden) @ qkv                q and k are normalised, if the model has that, and rotated
    hidden += attention(q, KV cache) @ out      k and v went into the cache before
    hidden += (act(norm(hidden) @ gate) * (norm(hidden) @ up)) @ down

This file lists the keys of `config.json` and the tensors of the checkpoint that make such a model. It imports no torch,
so that `swiftkv plan` answers at once.

A *kind* of attention belongs to the layers of one KV group: all layers, those with a window, or those without. To
*pack* a tensor means to read this rank's part of it from the checkpoint and to lay it out as the kernels want it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import GELU_TANH, SILU
from swiftkv.kernels.ops import PackedMlp
from swiftkv.models import quantization
from swiftkv.models.config import AttentionKind, DecoderConfig, with_window
from swiftkv.models.decoder import Layer, LayeredDecoder, LayerSource
from swiftkv.models.hf_config import (
    TEXT_MODEL,
    HFConfig,
    read_eos_token_ids,
    read_json,
    read_quantization,
    read_rope,
    with_outer_keys,
)
from swiftkv.models.parts import Attention, GatedMlp
from swiftkv.models.weights import HeadSlices, RankSlices, Weight

MLP_NORM = "post_attention_layernorm"
_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


@dataclass(frozen=True, slots=True)
class Biases:
    """Says which linear layers have a bias."""

    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of an architecture that its `config.json` does not have."""

    biases: Callable[[HFConfig], Biases] = lambda raw: Biases(raw.attention_bias, raw.attention_bias)
    window_layers: Callable[[HFConfig], Sequence[int]] = lambda raw: ()
    qk_norm: bool = False
    head_dim: int | None = None  # the default without one in config.json; None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    norm_offset: float | None = None  # see `DecoderConfig`
    partial_rotary: bool = False  # if not, transformers ignores partial_rotary_factor, which must be 1


def all_layers(raw: HFConfig) -> Sequence[int]:
    return range(raw.num_hidden_layers)


def _later_layers(raw: HFConfig) -> Sequence[int]:
    return raw.window_layers(lambda layer: layer >= raw.max_window_layers) if raw.use_sliding_window else ()


_TRAITS = {
    "Qwen3ForCausalLM": Traits(window_layers=_later_layers, qk_norm=True, head_dim=128),
    "Qwen2ForCausalLM": Traits(biases=lambda raw: Biases(qkv=True), window_layers=_later_layers),
    "LlamaForCausalLM": Traits(biases=lambda raw: Biases(raw.attention_bias, raw.attention_bias, raw.mlp_bias)),
    "MistralForCausalLM": Traits(biases=lambda raw: Biases(), window_layers=all_layers),
    "Mistral3ForConditionalGeneration": Traits(biases=lambda raw: Biases(), window_layers=all_layers),
}


class _TextKeys(HFConfig, kw_only=True):
    model_type: str = "mistral"


class _Mistral3Keys(msgspec.Struct):
    text_config: _TextKeys


class DenseDecoder(LayeredDecoder):
    """A `Decoder` of pre-normalised layers, each rotary attention and a gated MLP."""

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file, traits = directory / "config.json", _TRAITS[architecture]
        if architecture != "Mistral3ForConditionalGeneration":
            return decoder_config(architecture, directory, read_json(file, HFConfig), traits)
        text = read_json(file, _Mistral3Keys).text_config  # no images are served
        if text.model_type != "mistral":  # Ministral 3 scales queries by their position
            raise ConfigError(
                f"{file}: text_config.model_type: {text.model_type!r} is not supported, only 'mistral' is"
            )
        shape = decoder_config(architecture, directory, with_outer_keys(file, text), traits)
        return replace(shape, prefix=TEXT_MODEL)

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, mlp_weights)

    @staticmethod
    def layer(source: LayerSource) -> Layer:
        return Layer(attention_part(source), mlp_part(source))


def decoder_config(architecture: str, directory: Path, raw: HFConfig, traits: Traits) -> DecoderConfig:
    """Return the shape of a model whose `config.json` is `raw`. Raises `ConfigError` for what is not supported."""
    file = directory / "config.json"
    if raw.hidden_act != traits.hidden_act:
        raise ConfigError(f"{file}: hidden_act: {raw.hidden_act!r} is not supported, only {traits.hidden_act!r} is")
    place, how_quantized = read_quantization(directory, raw.quantization_config)
    quantization.check_config(place, how_quantized)
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or traits.head_dim or raw.hidden_size // raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"{file}: num_key_value_heads: {num_kv_heads} does not divide the {raw.num_attention_heads} heads"
        )
    if raw.layer_types is not None and len(raw.layer_types) < raw.num_hidden_layers:
        raise ConfigError(f"{file}: layer_types: it has fewer entries than the {raw.num_hidden_layers} layers")
    rope = read_rope(file, raw)
    if rope.partial_rotary_factor != 1 and not traits.partial_rotary:
        raise ConfigError(
            f"{file}: partial_rotary_factor: {rope.partial_rotary_factor} is not supported for {architecture}"
        )
    biases = traits.biases(raw)
    one_kind = AttentionKind(
        layers=tuple(range(raw.num_hidden_layers)),
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
    )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        attention=with_window(one_kind, traits.window_layers(raw), raw.sliding_window),
        intermediate_size=raw.intermediate_size,
        rms_norm_eps=raw.rms_norm_eps,
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=biases.qkv,
        attention_out_bias=biases.attention_out,
        mlp_bias=biases.mlp,
        qk_norm=traits.qk_norm,
        eos_token_ids=read_eos_token_ids(directory, raw),
        norm_offset=traits.norm_offset,
        activation=_ACTIVATIONS[raw.hidden_act],
        qweights=quantization.qweights_of(how_quantized),
    )


def decoder_weights(
    config: DecoderConfig,
    part: RankSlices,
    mlp_weights: Callable[[DecoderConfig, RankSlices, int], dict[str, Weight]],
) -> dict[str, Weight]:
    """Return the shape of every tensor of the checkpoint, by name, and the part of it that a rank reads.

    `mlp_weights` returns the tensors of the second half of one layer.
    """
    embedding = (config.vocab_size, config.hidden_size)
    weights = {
        "model.embed_tokens.weight": Weight(embedding),
        "model.norm.weight": Weight((config.hidden_size,)),
    }
    if config.has_head:
        stored_as = "model.embed_tokens.weight" if config.tie_word_embeddings else None
        weights["lm_head.weight"] = Weight(embedding, (part.vocab,), stored_as)
    for kind, heads in zip(config.attention, part.heads, strict=True):
        for layer in kind.layers:
            weights |= _attention_weights(config, kind, heads, part.rank, f"model.layers.{layer}")
            weights |= mlp_weights(config, part, layer)
    if not config.prefix:
        return weights
    return {
        name: replace(weight, stored_as=config.prefix + (weight.stored_as or name)) for name, weight in weights.items()
    }


def _attention_weights(
    config: DecoderConfig, kind: AttentionKind, heads: HeadSlices, rank: int, prefix: str
) -> dict[str, Weight]:
    hidden, head_dim, v_head_dim = config.hidden_size, kind.head_dim, kind.value_head_dim
    attention = f"{prefix}.self_attn"
    weights = {f"{prefix}.input_layernorm.weight": Weight((hidden,))}
    if config.qk_norm:
        weights |= {f"{attention}.{name}.weight": Weight((head_dim,)) for name in ("q_norm", "k_norm")}
    for name, size, rows in (
        ("q", kind.num_heads * head_dim, heads.q),
        ("k", kind.num_kv_heads * head_dim, heads.k),
        ("v", kind.num_kv_heads * v_head_dim, heads.v),
    ):
        weights |= _by_rows(f"{attention}.{name}_proj", (size, hidden), rows, config.qkv_bias)
    if kind.sinks:
        weights[f"{attention}.{kind.sinks}"] = Weight((kind.num_heads,), (heads.heads,))
    out_shape = (hidden, kind.num_heads * v_head_dim)
    return weights | _by_columns(f"{attention}.o_proj", out_shape, heads.out, config.attention_out_bias, rank)


def mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    """Return the shapes of the tensors of a gated MLP and of the norm before it, by name, and a rank's parts."""
    hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}"
    weights = {f"{prefix}.{MLP_NORM}.weight": Weight((hidden,))}
    for name in ("gate_proj", "up_proj"):
        weights |= _by_rows(f"{prefix}.mlp.{name}", (inner, hidden), part.mlp, config.mlp_bias)
    return weights | _by_columns(f"{prefix}.mlp.down_proj", (hidden, inner), part.mlp, config.mlp_bias, part.rank)


def _by_rows(module: str, shape: tuple[int, int], rows: slice, has_bias: bool) -> dict[str, Weight]:
    weights = {f"{module}.weight": Weight(shape, (rows,))}
    return weights | ({f"{module}.bias": Weight(shape[:1], (rows,))} if has_bias else {})


def _by_columns(module: str, shape: tuple[int, int], columns: slice, has_bias: bool, rank: int) -> dict[str, Weight]:
    weights = {f"{module}.weight": Weight(shape, (slice(0, shape[0]), columns))}
    has_bias = has_bias and rank == 0  # the sum over all ranks has it once
    return weights | ({f"{module}.bias": Weight(shape[:1])} if has_bias else {})


def attention_part(source: LayerSource) -> Attention:
    """Pack the attention of a layer and the norm before it."""
    config, kind, packer = source.config, source.kind, source.packer
    attention = f"{source.prefix}.self_attn"
    return Attention(
        place=source.place,  # where the layer's KV lies: its KV group, and its number in the group
        ranks=source.ranks,
        cos_sin=source.cos_sin,
        norm=source.norm("input_layernorm"),
        norm_eps=config.rms_norm_eps,
        qkv=packer.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        q_norm=source.norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=source.norm("self_attn.k_norm") if config.qk_norm else None,
        out=packer.linear(f"{attention}.o_proj"),
        sinks=packer.float32(f"{attention}.{kind.sinks}") if kind.sinks else None,
        value_scale=kind.value_scale,
    )


def mlp_part(source: LayerSource, norm: str = MLP_NORM) -> GatedMlp:
    """Pack a gated MLP and the norm before it."""
    packer, mlp = source.packer, f"{source.prefix}.mlp"
    packed = PackedMlp(
        norm=source.norm(norm),
        norm_eps=source.config.rms_norm_eps,
        gate_up=packer.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", interleave=True),
        down=packer.linear(f"{mlp}.down_proj"),
        activation=source.config.activation,
    )
    return GatedMlp(source.ranks, packed)
