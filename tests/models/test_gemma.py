"""Gemma: published config files, and the text model inside a multimodal checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from swiftkv.errors import ConfigError
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.config import DecoderConfig
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.paged import PagedRunner

GEMMA2: dict[str, Any] = {  # as published, its sizes made smaller
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 224,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 1000,
}
GEMMA3: dict[str, Any] = {  # likewise: what is not said is the default of the family
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def read(directory: Path, values: dict[str, Any]) -> DecoderConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def test_gemma_2_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2)
    full, window = config.attention
    assert (full.layers, window.layers, window.window) == ((1,), (0, 2), 4096)
    assert (full.scale, full.soft_cap, config.logit_soft_cap) == (224**-0.5, 50.0, 30.0)
    assert (config.tie_word_embeddings, config.qk_norm, config.eos_token_ids) == (True, False, (1, 107))


def test_gemma_3_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3)
    full, window = config.attention
    assert (full.layers, window.layers, window.window) == ((5,), (0, 1, 2, 3, 4, 6, 7), 1024)
    assert (full.num_heads, full.num_kv_heads, full.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (full.rope.rope_type, full.rope.theta, full.rope.factor) == ("linear", 1e6, 8.0)
    assert (window.rope.rope_type, window.rope.theta) == ("default", 1e4)
    assert (config.max_context_len, config.qk_norm, config.eos_token_ids) == (131072, True, (1, 106))
    weights = {weight.stored_as for weight in _weights(config)}
    assert "language_model.model.layers.7.pre_feedforward_layernorm.weight" in weights
    inside = {key: value for key, value in GEMMA3.items() if key != "eos_token_id"}  # transformers 5 writes it there
    config = read(tmp_path, inside | {"text_config": {**GEMMA3["text_config"], "eos_token_id": 1}})
    assert config.eos_token_ids == (1,)


def _weights(config: DecoderConfig) -> Any:
    from swiftkv.models.gemma import GemmaDecoder
    from swiftkv.models.weights import RankSlices

    return GemmaDecoder.weights(config, RankSlices.of(config, 0, 1)).values()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, ["gelu"]),
        (GEMMA2 | {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA2 | {"altup_num_inputs": 4}, ["altup_num_inputs"]),
        (GEMMA3 | {"text_config": GEMMA3["text_config"] | {"num_kv_shared_layers": 2}}, ["num_kv_shared_layers"]),
        (
            GEMMA3 | {"text_config": GEMMA3["text_config"] | {"attn_logit_softcapping": 50.0}},
            ["attn_logit_softcapping"],
        ),
        (GEMMA3 | {"text_config": None}, ["hidden_size"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, values)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("save_original_format", [True, False], ids=["as published", "as modules"])
def test_the_text_model_of_a_multimodal_checkpoint(ops: AnyOps, tmp_path: Path, save_original_format: bool) -> None:
    text = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=20,
        sliding_window_pattern=2,
    )
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        ).eval()
    model.save_pretrained(tmp_path, save_original_format=save_original_format)
    prompt = torch.randint(320, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(prompt[None]).logits[0]
    config = read_config(tmp_path)
    decoder = load_decoder(config, MappedWeights(tmp_path), torch.float32, "cpu", 128, ops=ops)
    logits = PagedRunner(decoder).run({"prompt": prompt.tolist()}, (7, 1, 40))["prompt"]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
