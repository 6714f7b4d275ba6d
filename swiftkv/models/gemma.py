"""Gemma 2 and the text model of Gemma 3: norms before and after each half of a layer, and windows in most layers.

The halves are those of `models/dense.py`. Norms multiply by 1 + weight and round once; embeddings are scaled. Gemma 2
also caps attention scores and logits; Gemma 3 has rotary frequencies of their own for its window layers.

This file imports no torch, so that `swiftkv plan` answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from swiftkv.errors import ConfigError
from swiftkv.models.config import DecoderConfig, divided
from swiftkv.models.decoder import Layer, LayeredDecoder, LayerSource
from swiftkv.models.dense import Traits, attention_part, decoder_config, decoder_weights, mlp_part, mlp_weights
from swiftkv.models.hf_config import (
    FULL,
    TEXT_MODEL,
    WINDOW,
    HFConfig,
    Positive,
    read_known_keys,
    read_rope,
    with_outer_keys,
)
from swiftkv.models.weights import RankSlices, Weight


class _Keys(HFConfig, kw_only=True):
    """The keys of both families; defaults are those of transformers."""

    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    hidden_activation: str | None = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None
    final_logit_softcapping: Positive | None
    use_bidirectional_attention: bool | None = None
    sliding_window_size: int | None = None  # some published files have sliding_window twice

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window by the family's default."""
        raise NotImplementedError

    def with_window_rope(self) -> Self:
        """Return the keys with the rotary parameters of window layers."""
        return self.with_rope_of(FULL)


class _Gemma2Keys(_Keys, kw_only=True):
    num_key_value_heads: int | None = 4
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0


class _Gemma3Keys(_Keys, kw_only=True):
    attn_logit_softcapping: None = None  # transformers ignores it
    final_logit_softcapping: Positive | None = None
    vocab_size: int = 262208
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rope_theta: Positive = 1e6
    rope_local_base_freq: Positive = 1e4
    sliding_window_pattern: int = 6
    old_sliding_window_pattern: int | None = msgspec.field(default=None, name="_sliding_window_pattern")

    def slides(self, layer: int) -> bool:
        return (layer + 1) % (self.old_sliding_window_pattern or self.sliding_window_pattern) != 0

    def with_window_rope(self) -> Self:
        return self.with_rope_of(WINDOW, {"rope_type": "default", "rope_theta": self.rope_local_base_freq})


_KEYS: dict[str, type[_Keys]] = {
    "Gemma2ForCausalLM": _Gemma2Keys,
    "Gemma3ForCausalLM": _Gemma3Keys,
    "Gemma3ForConditionalGeneration": _Gemma3Keys,
}
_MLP_NORM, _MLP_POST_NORM = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_QK_NORM = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
_NESTED = frozenset({"Gemma3ForConditionalGeneration"})  # only their text model is served: no images


class GemmaDecoder(LayeredDecoder):
    """A `Decoder` of layers whose halves are normalised before and after."""

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        file, is_nested = directory / "config.json", architecture in _NESTED
        raw = read_known_keys(file, _KEYS[architecture], "text_config" if is_nested else None)
        if is_nested:
            raw = with_outer_keys(file, raw)
        if raw.use_bidirectional_attention:
            raise ConfigError(f"{file}: use_bidirectional_attention: true is not supported, only causal attention is")
        raw = msgspec.structs.replace(raw, hidden_act=raw.hidden_activation or raw.hidden_act)
        traits = Traits(
            qk_norm=architecture in _QK_NORM,
            hidden_act="gelu_pytorch_tanh",
            norm_offset=1.0,
        )
        shape = decoder_config(architecture, directory, raw.with_rope_of(FULL), traits)
        [kind] = shape.attention
        kind = replace(kind, scale=raw.query_pre_attn_scalar**-0.5, soft_cap=raw.attn_logit_softcapping or 0.0)
        windowed = replace(kind, rope=read_rope(file, raw.with_window_rope()), window=raw.sliding_window or 0)
        return replace(
            shape,
            attention=divided(kind, windowed, raw.window_layers(raw.slides)),
            embedding_scale=shape.hidden_size**0.5,
            logit_soft_cap=raw.final_logit_softcapping or 0.0,
            prefix=TEXT_MODEL if is_nested else "",
        )

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        return decoder_weights(config, part, _mlp_weights)

    @staticmethod
    def layer(source: LayerSource) -> Layer:
        return Layer(
            replace(attention_part(source), post_norm=source.norm("post_attention_layernorm")),
            replace(mlp_part(source, _MLP_NORM), post_norm=source.norm(_MLP_POST_NORM)),
        )


def _mlp_weights(config: DecoderConfig, part: RankSlices, layer: int) -> dict[str, Weight]:
    norms = (f"model.layers.{layer}.{name}.weight" for name in (_MLP_NORM, _MLP_POST_NORM))
    return mlp_weights(config, part, layer) | {name: Weight((config.hidden_size,)) for name in norms}
