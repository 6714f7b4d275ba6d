"""Gemma 2 and the text model of Gemma 3: norms on both sides of each half of a layer, and windows in most layers.

The halves are those of `models/dense.py`. Norms multiply by 1 + weight and round once; embeddings are scaled. Gemma 2
also caps attention scores and logits; Gemma 3 turns the heads of its window layers by frequencies of their own.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.kernels.experts import GELU_TANH
from swiftkv.models.config import AttentionKind, DecoderConfig
from swiftkv.models.decoder import KVPlace, Layer, LayeredDecoder, LayerStack, attention_spec, kv_places
from swiftkv.models.dense import (
    Biases,
    Traits,
    attention_part,
    decoder_config,
    decoder_weights,
    mlp_part,
    mlp_weights,
)
from swiftkv.models.hf_config import HFConfig, read_json, read_known_keys, read_rope
from swiftkv.models.weights import RankSlices, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.loader import Packer
    from swiftkv.models.parallel import Ranks

_FULL, _WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class GemmaConfig(DecoderConfig):
    """The shape of a Gemma."""

    logit_soft_cap: float
    prefix: str = ""  # of tensors in checkpoints that have other models, too


class _Keys(HFConfig, kw_only=True):
    """The keys of both families; defaults are those of transformers."""

    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    hidden_activation: str | None = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    use_bidirectional_attention: bool | None = None
    sliding_window_size: int | None = None  # some published files have sliding_window twice

    def window_layers(self) -> list[int]:
        """The layers with a window, by their list or by the family's habit."""
        kinds = self.layer_types or [
            _WINDOW if self.slides(layer) else _FULL for layer in range(self.num_hidden_layers)
        ]
        return [layer for layer, kind in enumerate(kinds[: self.num_hidden_layers]) if kind == _WINDOW]

    def slides(self, layer: int) -> bool:
        raise NotImplementedError

    def local_rope(self) -> dict[str, Any] | None:
        """The rotary parameters of window layers, if they have others than the rest."""
        return None


class _Gemma2Keys(_Keys, kw_only=True):
    num_key_value_heads: int | None = 4
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0


class _Gemma3Keys(_Keys, kw_only=True):
    attn_logit_softcapping: None = None  # transformers ignores it
    final_logit_softcapping: float | None = None
    vocab_size: int = 262208
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: int = 6
    old_sliding_window_pattern: int | None = msgspec.field(default=None, name="_sliding_window_pattern")

    def slides(self, layer: int) -> bool:
        return (layer + 1) % (self.old_sliding_window_pattern or self.sliding_window_pattern) != 0

    def local_rope(self) -> dict[str, Any] | None:
        nested = (self.rope_parameters or {}).get(_WINDOW)
        return nested or {"rope_type": "default", "rope_theta": self.rope_local_base_freq}


class _Outer(msgspec.Struct):
    """The keys around `text_config` that are about the text model, too."""

    eos_token_id: int | list[int] | None = None
    quantization_config: Any = None


_KEYS: dict[str, type[_Keys]] = {
    "Gemma2ForCausalLM": _Gemma2Keys,
    "Gemma3ForCausalLM": _Gemma3Keys,
    "Gemma3ForConditionalGeneration": _Gemma3Keys,
}
_QK_NORM = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
_NESTED = frozenset({"Gemma3ForConditionalGeneration"})  # of which the text model is served, and images are not


class GemmaDecoder(LayeredDecoder):
    """A `Decoder` of layers whose halves are normalised before and after."""

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        assert isinstance(config, GemmaConfig)
        specs = tuple(map(attention_spec, groups, config.attention))
        cos_sin = [packer.cos_sin(kind.rope, kind.head_dim) for kind in config.attention]
        stack = LayerStack(
            layers=tuple(
                _layer(config, place, cos_sin[place.group], packer, ranks) for place in kv_places(groups, specs)
            ),
            embedding=packer.tensor("model.embed_tokens.weight"),
            final_norm=packer.float32("model.norm.weight", plus=1.0),
            norm_eps=config.rms_norm_eps,
            lm_head=packer.linear("lm_head"),
            embedding_scale=packer.rounded(config.hidden_size**0.5),
            logit_soft_cap=config.logit_soft_cap,
        )
        super().__init__(groups, specs, stack, ranks, packer.device)

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file, is_nested = directory / "config.json", architecture in _NESTED
        raw = read_known_keys(file, _KEYS[architecture], "text_config" if is_nested else None)
        if is_nested:
            outer = read_json(file, _Outer)
            raw = msgspec.structs.replace(
                raw, eos_token_id=outer.eos_token_id, quantization_config=outer.quantization_config
            )
        if raw.use_bidirectional_attention:
            raise ConfigError(f"{file}: use_bidirectional_attention: true is not supported, only causal attention is")
        raw = msgspec.structs.replace(raw, hidden_act=raw.hidden_activation or raw.hidden_act)
        full = _with_rope(raw, (raw.rope_parameters or {}).get(_FULL))
        traits = Traits(
            biases=lambda raw: Biases(raw.attention_bias, raw.attention_bias, False),
            qk_norm=architecture in _QK_NORM,
            hidden_act="gelu_pytorch_tanh",
        )
        shape = decoder_config(architecture, directory, full, traits)
        [kind] = shape.attention
        kind = replace(kind, scale=raw.query_pre_attn_scalar**-0.5, soft_cap=raw.attn_logit_softcapping or 0.0)
        local = raw.local_rope()
        windowed = replace(
            kind,
            rope=kind.rope if local is None else read_rope(file, _with_rope(raw, local)),
            window=raw.sliding_window or 0,
        )
        values = {field.name: getattr(shape, field.name) for field in fields(shape)}
        values["attention"] = _divided(kind, windowed, raw.window_layers())
        prefix = "language_model." if is_nested else ""
        return GemmaConfig(**values, logit_soft_cap=raw.final_logit_softcapping or 0.0, prefix=prefix)

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        assert isinstance(config, GemmaConfig)
        weights = decoder_weights(config, part, _mlp_weights)
        return {
            name: replace(weight, stored_as=config.prefix + (weight.stored_as or name))
            for name, weight in weights.items()
        }


def _with_rope(raw: _Keys, parameters: dict[str, Any] | None) -> _Keys:
    """Return the keys with these rotary parameters, if there are any, instead of those of the config."""
    return raw if parameters is None else msgspec.structs.replace(raw, rope_parameters=parameters, rope_scaling=None)


def _divided(full: AttentionKind, windowed: AttentionKind, window_layers: list[int]) -> tuple[AttentionKind, ...]:
    others = [layer for layer in full.layers if layer not in set(window_layers)]
    parts = ((full, others), (windowed, window_layers))
    return tuple(replace(kind, layers=tuple(layers)) for kind, layers in parts if layers)


def _mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    norms = (f"model.layers.{layer}.{side}_feedforward_layernorm.weight" for side in ("pre", "post"))
    return mlp_weights(config, part, layer) | {name: Weight((config.hidden_size,)) for name in norms}


def _layer(config: GemmaConfig, place: KVPlace, cos_sin: Tensor, packer: Packer, ranks: Ranks) -> Layer:
    prefix = f"model.layers.{place.layer}"

    def norm(name: str) -> Tensor:
        return packer.float32(f"{prefix}.{name}.weight", plus=1.0)

    attention = attention_part(config, place, cos_sin, packer, ranks)
    mlp = mlp_part(config, packer, ranks, place.layer)
    return Layer(
        replace(
            attention,
            norm=norm("input_layernorm"),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            post_norm=norm("post_attention_layernorm"),
        ),
        replace(
            mlp,
            norm=norm("pre_feedforward_layernorm"),
            activation=GELU_TANH,
            post_norm=norm("post_feedforward_layernorm"),
        ),
    )
