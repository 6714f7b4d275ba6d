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
from swiftkv.models.decoder import KVPlace, Layer, LayeredDecoder, LayerStack, attention_spec, kv_places
from swiftkv.models.hf_config import HFConfig, read_eos_token_ids, read_json, read_rope
from swiftkv.models.parts import Attention, GatedMlp
from swiftkv.models.weights import HeadSlices, RankSlices, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.loader import Packer
    from swiftkv.models.parallel import Ranks

_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 16, 256  # of the attention kernels


@dataclass(frozen=True, slots=True)
class _Biases:
    qkv: bool
    attention_out: bool
    mlp: bool


@dataclass(frozen=True, slots=True)
class _Traits:
    """Lists what an architecture has and its `config.json` does not say."""

    biases: Callable[[HFConfig], _Biases]
    window_layers: Callable[[HFConfig], Sequence[int]] = lambda raw: ()
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json does not say; None: hidden_size / num_attention_heads


def _window_of_later_layers(raw: HFConfig) -> Sequence[int]:
    if not raw.use_sliding_window:
        return ()
    if raw.layer_types is None:
        return range(raw.max_window_layers, raw.num_hidden_layers)
    return [layer for layer, kind in enumerate(raw.layer_types) if kind == "sliding_attention"]


_TRAITS = {
    "Qwen3ForCausalLM": _Traits(
        biases=lambda raw: _Biases(raw.attention_bias, raw.attention_bias, False),
        window_layers=_window_of_later_layers,
        qk_norm=True,
        head_dim=128,
    ),
    "Qwen2ForCausalLM": _Traits(biases=lambda raw: _Biases(True, False, False), window_layers=_window_of_later_layers),
    "LlamaForCausalLM": _Traits(biases=lambda raw: _Biases(raw.attention_bias, raw.attention_bias, raw.mlp_bias)),
    "MistralForCausalLM": _Traits(
        biases=lambda raw: _Biases(False, False, False), window_layers=lambda raw: range(raw.num_hidden_layers)
    ),
}


class DenseDecoder(LayeredDecoder):
    """A `Decoder` of pre-normalised layers, each rotary attention and a gated MLP."""

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        specs = tuple(map(attention_spec, groups, config.attention))
        cos_sin = [packer.cos_sin(kind.rope, kind.head_dim) for kind in config.attention]
        stack = LayerStack(
            layers=tuple(
                _layer(config, place, cos_sin[place.group], packer, ranks) for place in kv_places(groups, specs)
            ),
            embedding=packer.tensor("model.embed_tokens.weight"),
            final_norm=packer.vector("model.norm.weight"),
            norm_eps=config.rms_norm_eps,
            lm_head=packer.linear("lm_head"),
        )
        super().__init__(groups, specs, stack, ranks, packer.device)

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file = directory / "config.json"
        raw, traits = read_json(file, HFConfig), _TRAITS[architecture]
        if raw.hidden_act != "silu":
            raise ConfigError(f"{file}: hidden_act: {raw.hidden_act!r} is not supported, only 'silu' is")
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
        rope = read_rope(file, raw)
        if rope.partial_rotary_factor != 1:  # transformers ignores it in these
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

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
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
                weights |= _layer_weights(config, kind, heads, part, f"model.layers.{layer}")
        return weights


def _layer_weights(
    config: DecoderConfig, kind: AttentionKind, heads: HeadSlices, part: RankSlices, prefix: str
) -> dict[str, Weight]:
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, kind.head_dim
    q_size, kv_size = kind.num_heads * head_dim, kind.num_kv_heads * head_dim
    attention = f"{prefix}.self_attn"
    weights = {
        f"{prefix}.input_layernorm.weight": Weight((hidden,)),
        f"{prefix}.post_attention_layernorm.weight": Weight((hidden,)),
    }
    if config.qk_norm:
        weights |= {f"{attention}.{name}.weight": Weight((head_dim,)) for name in ("q_norm", "k_norm")}
    by_rows = {
        f"{attention}.q_proj": (q_size, heads.q, config.qkv_bias),
        f"{attention}.k_proj": (kv_size, heads.kv, config.qkv_bias),
        f"{attention}.v_proj": (kv_size, heads.kv, config.qkv_bias),
        f"{prefix}.mlp.gate_proj": (mlp, part.mlp, config.mlp_bias),
        f"{prefix}.mlp.up_proj": (mlp, part.mlp, config.mlp_bias),
    }
    for module, (size, rows, has_bias) in by_rows.items():
        weights[f"{module}.weight"] = Weight((size, hidden), (rows,))
        if has_bias:
            weights[f"{module}.bias"] = Weight((size,), (rows,))
    by_columns = {
        f"{attention}.o_proj": (q_size, heads.q, config.attention_out_bias),
        f"{prefix}.mlp.down_proj": (mlp, part.mlp, config.mlp_bias),
    }
    for module, (size, columns, has_bias) in by_columns.items():
        weights[f"{module}.weight"] = Weight((hidden, size), (slice(0, hidden), columns))
        if has_bias and part.rank == 0:  # the sum over all ranks has it once
            weights[f"{module}.bias"] = Weight((hidden,))
    return weights


def _layer(config: DecoderConfig, place: KVPlace, cos_sin: Tensor, packer: Packer, ranks: Ranks) -> Layer:
    prefix = f"model.layers.{place.layer}"
    attention = f"{prefix}.self_attn"
    return Layer(
        Attention(
            place=place,
            ranks=ranks,
            cos_sin=cos_sin,
            norm=packer.vector(f"{prefix}.input_layernorm.weight"),
            norm_eps=config.rms_norm_eps,
            qkv=packer.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=packer.vector(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=packer.vector(f"{attention}.k_norm.weight") if config.qk_norm else None,
            out=packer.linear(f"{attention}.o_proj"),
        ),
        GatedMlp(
            ranks=ranks,
            norm=packer.vector(f"{prefix}.post_attention_layernorm.weight"),
            norm_eps=config.rms_norm_eps,
            gate_up=packer.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", interleave=True),
            down=packer.linear(f"{prefix}.mlp.down_proj"),
        ),
    )
