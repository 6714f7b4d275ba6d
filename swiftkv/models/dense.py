"""Qwen3, Qwen2, Llama and Mistral: one stack of dense layers that differ in which tensors they have.

A step embeds its tokens; every layer then adds attention and a gated MLP (`models/parts.py`) to their hidden states, in
the loop of `models/decoder.py`; the head turns hidden states into logits. This file says which numbers of `config.json`
and which tensors of the checkpoint make such a model. It imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.models.config import AttentionKind, DecoderConfig, with_window
from swiftkv.models.decoder import KVPlace, Layer, LayeredDecoder, LayerStack, MlpPart, attention_spec, kv_places
from swiftkv.models.hf_config import HFConfig, read_eos_token_ids, read_json, read_rope
from swiftkv.models.parts import Attention, GatedMlp
from swiftkv.models.weights import HeadSlices, RankSlices, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.loader import Packer
    from swiftkv.models.parallel import Ranks

_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 16, 256  # of the attention kernels


@dataclass(frozen=True, slots=True)
class Biases:
    """Says which linear layers have a bias."""

    qkv: bool
    attention_out: bool
    mlp: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Lists what an architecture has and its `config.json` does not say."""

    biases: Callable[[HFConfig], Biases]
    window_layers: Callable[[HFConfig], Sequence[int]] = lambda raw: ()
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json does not say; None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    partial_rotary: bool = False  # else transformers ignores partial_rotary_factor, and it must be 1


def _window_of_later_layers(raw: HFConfig) -> Sequence[int]:
    if not raw.use_sliding_window:
        return ()
    if raw.layer_types is None:
        return range(raw.max_window_layers, raw.num_hidden_layers)
    return [layer for layer, kind in enumerate(raw.layer_types[: raw.num_hidden_layers]) if kind == "sliding_attention"]


_TRAITS = {
    "Qwen3ForCausalLM": Traits(
        biases=lambda raw: Biases(raw.attention_bias, raw.attention_bias, False),
        window_layers=_window_of_later_layers,
        qk_norm=True,
        head_dim=128,
    ),
    "Qwen2ForCausalLM": Traits(biases=lambda raw: Biases(True, False, False), window_layers=_window_of_later_layers),
    "LlamaForCausalLM": Traits(biases=lambda raw: Biases(raw.attention_bias, raw.attention_bias, raw.mlp_bias)),
    "MistralForCausalLM": Traits(
        biases=lambda raw: Biases(False, False, False), window_layers=lambda raw: range(raw.num_hidden_layers)
    ),
}


class DenseDecoder(LayeredDecoder):
    """A `Decoder` of pre-normalised layers, each rotary attention and a gated MLP."""

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        specs = tuple(map(attention_spec, groups, config.attention))
        stack = layer_stack(config, kv_places(groups, specs), packer, ranks, mlp_part)
        super().__init__(groups, specs, stack, ranks, packer.device)

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        raw = read_json(directory / "config.json", HFConfig)
        return decoder_config(architecture, directory, raw, _TRAITS[architecture])

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, mlp_weights)


def decoder_config(architecture: str, directory: Path, raw: HFConfig, traits: Traits) -> DecoderConfig:
    """Return the shape of a model whose `config.json` is `raw`. Raises `ConfigError` for what is not supported."""
    file = directory / "config.json"
    if raw.hidden_act != traits.hidden_act:
        raise ConfigError(f"{file}: hidden_act: {raw.hidden_act!r} is not supported, only {traits.hidden_act!r} is")
    if raw.quantization_config is not None:
        raise ConfigError(f"{file}: quantization_config: quantized weights are not supported, use the originals")
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or traits.head_dim or raw.hidden_size // raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"{file}: num_key_value_heads: {num_kv_heads} does not divide the {raw.num_attention_heads} heads"
        )
    if head_dim % _HEAD_DIM_MULTIPLE or head_dim > _MAX_HEAD_DIM:
        raise ConfigError(
            f"{file}: head_dim: {head_dim} is not supported, multiples of {_HEAD_DIM_MULTIPLE} up to "
            f"{_MAX_HEAD_DIM} are"
        )
    if raw.layer_types is not None and len(raw.layer_types) < raw.num_hidden_layers:
        raise ConfigError(f"{file}: layer_types: there are {raw.num_hidden_layers} layers, and these are fewer")
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
    )


def decoder_weights(
    config: DecoderConfig,
    part: RankSlices,
    mlp_weights: Callable[[DecoderConfig, RankSlices, int], dict[str, Weight]],
) -> dict[str, Weight]:
    """Return the tensors that a rank reads; `mlp_weights` returns those of the second half of a layer."""
    embedding = (config.vocab_size, config.hidden_size)
    weights = {
        "model.embed_tokens.weight": Weight(embedding),
        "model.norm.weight": Weight((config.hidden_size,)),
        "lm_head.weight": Weight(
            embedding, (part.vocab,), "model.embed_tokens.weight" if config.tie_word_embeddings else None
        ),
    }
    for kind, heads in zip(config.attention, part.heads, strict=True):
        for layer in kind.layers:
            weights |= _attention_weights(config, kind, heads, part.rank, f"model.layers.{layer}")
            weights |= mlp_weights(config, part, layer)
    return weights


def layer_stack(
    config: DecoderConfig,
    places: Sequence[KVPlace],
    packer: Packer,
    ranks: Ranks,
    mlp_part: Callable[[DecoderConfig, Packer, Ranks, int], MlpPart],
) -> LayerStack:
    """Pack the weights of a model; `mlp_part` makes the second half of a layer, by its number."""
    cos_sin = [packer.cos_sin(kind.rope, kind.head_dim) for kind in config.attention]
    return LayerStack(
        layers=tuple(
            Layer(
                attention_part(config, place, cos_sin[place.group], packer, ranks),
                mlp_part(config, packer, ranks, place.layer),
            )
            for place in places
        ),
        embedding=packer.tensor("model.embed_tokens.weight"),
        final_norm=packer.vector("model.norm.weight"),
        norm_eps=config.rms_norm_eps,
        lm_head=packer.linear("lm_head"),
    )


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
    """Return the tensors of a gated MLP and of the norm before it."""
    hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}"
    weights = {f"{prefix}.post_attention_layernorm.weight": Weight((hidden,))}
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


def attention_part(config: DecoderConfig, place: KVPlace, cos_sin: Tensor, packer: Packer, ranks: Ranks) -> Attention:
    """Pack the attention of a layer and the norm before it."""
    prefix = f"model.layers.{place.layer}"
    attention, sinks = f"{prefix}.self_attn", config.attention[place.group].sinks
    return Attention(
        place=place,
        ranks=ranks,
        cos_sin=cos_sin,
        norm=packer.vector(f"{prefix}.input_layernorm.weight"),
        norm_eps=config.rms_norm_eps,
        qkv=packer.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        q_norm=packer.vector(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=packer.vector(f"{attention}.k_norm.weight") if config.qk_norm else None,
        out=packer.linear(f"{attention}.o_proj"),
        sinks=packer.float32(f"{attention}.{sinks}") if sinks else None,
    )


def mlp_part(config: DecoderConfig, packer: Packer, ranks: Ranks, layer: int) -> GatedMlp:
    """Pack a gated MLP and the norm before it."""
    prefix = f"model.layers.{layer}"
    return GatedMlp(
        ranks=ranks,
        norm=packer.vector(f"{prefix}.post_attention_layernorm.weight"),
        norm_eps=config.rms_norm_eps,
        gate_up=packer.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", interleave=True),
        down=packer.linear(f"{prefix}.mlp.down_proj"),
    )
