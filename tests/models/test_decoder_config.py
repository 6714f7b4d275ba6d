"""`config.json` in all its spellings, and the message about one that cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.models.config import DecoderConfig
from swiftkv.models.registry import read_config
from tests.support.hf_configs import LLAMA

QWEN2_5 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 2,
    "rope_theta": 1e6,
    "sliding_window": 128,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def read(tmp_path: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_config(tmp_path)


def test_shape(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    [kind] = config.attention
    assert (kind.layers, kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.window) == ((0, 1, 2), 4, 2, 16, 0)
    assert kind.rope.theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.kv_groups(32, "bfloat16") == (KVGroup((0, 1, 2), 2, 16, "bfloat16", 32),)


def test_what_an_architecture_implies(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, QWEN2_5)
    assert (qwen2.qkv_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen2.attention[0].window, qwen2.attention[0].rope.theta, qwen2.tie_word_embeddings) == (0, 1e6, True)
    qwen3 = read(tmp_path, LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.attention[0].head_dim) == (False, True, 128)
    no_gqa = read(tmp_path, {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert no_gqa.attention[0].num_kv_heads == 4


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": [8, 9]}, (7, 8, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": -1}, {"eos_token_id": [7, LLAMA["vocab_size"]]}, (7,)),
    ],
)
def test_end_tokens(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, LLAMA | config, generation).eos_token_ids == expected


TURN_END = {"id": 8, "content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"8": TURN_END}}}, (7, 8)),
        ({"tokenizer_config": {"eos_token": TURN_END}, "tokenizer": {"added_tokens": [TURN_END]}}, (7, 8)),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer": {"added_tokens": [TURN_END]}}, (7, 8)),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": {"added_tokens": [TURN_END]}}, (7,)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"added_tokens": [TURN_END]}}, (7,)),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Models that were tuned on another chat format often have the end token of their base in config.json."""
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read(tmp_path, LLAMA | {"eos_token_id": 7}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "default"}, 512),
    ],
)
def test_scaling_stretches_the_context(tmp_path: Path, scaling: dict[str, Any], expected: int) -> None:
    assert read(tmp_path, LLAMA | {"rope_scaling": scaling}).max_context_len == expected


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}, {(0, 1, 2): 0}),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}, {(0, 1, 2): 256}),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 512}, {(0, 1, 2): 0}),  # all there is
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, {(0, 1, 2): 0}),  # 4096, as transformers reads it
        (QWEN2_5 | {"use_sliding_window": True}, {(0, 1): 0, (2,): 128}),
        (QWEN2_5 | {"use_sliding_window": True, "max_window_layers": 0}, {(0, 1, 2): 128}),
        (QWEN2_5 | {"use_sliding_window": True, "max_window_layers": 3}, {(0, 1, 2): 0}),
        (QWEN2_5 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, {(0, 1, 2): 0}),
        (
            QWEN2_5 | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            {(1,): 0, (0, 2): 128},
        ),
        (LLAMA | {"sliding_window": 128}, {(0, 1, 2): 0}),
    ],
)
def test_layers_of_one_window_are_one_group(
    tmp_path: Path, values: dict[str, Any], windows: dict[tuple[int, ...], int]
) -> None:
    config = read(tmp_path, values)
    assert {kind.layers: kind.window for kind in config.attention} == windows
    groups = config.kv_groups(16, "float32")
    assert {group.layers: group.window for group in groups} == windows
    assert config.max_context_len == 512
    config.check_max_model_len(512)
    with pytest.raises(ConfigError, match=r"max_model_len: 513 is more than the 512 positions"):
        config.check_max_model_len(513)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["architectures", "none", "LlamaForCausalLM"]),
        ({"hidden_size": "wide"}, ["hidden_size", "int"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000", "1024"]),
        ({"vocab_size": 10**30}, ["vocab_size", str(10**30), "2147483647"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 72}, ["head_dim", "72", "16"]),
        ({"head_dim": 512}, ["head_dim", "512", "256"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ["rope_scaling", "longrope", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters", "low_freq_factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "big"}}, ["rope_scaling", "factor", "float"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, ["rope_scaling", "factor", "1e+308"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling", "factor", "-1"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "LlamaForCausalLM"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, LLAMA | change)
    assert all(word in str(error.value) for word in [str(tmp_path / "config.json"), *words])


def test_an_architecture_with_other_keys_is_named_and_not_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architectures: GPT2LMHeadModel: not supported; supported are"):
        read(tmp_path, {"architectures": ["GPT2LMHeadModel"], "n_embd": 768})


def test_no_readable_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_reading_a_config_imports_no_torch() -> None:
    program = (
        "import sys, swiftkv.models.registry; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
