"""MiMo-V2-Flash and gpt-oss: published config files, and checkpoints as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.kernels.experts import GatedActivation, Router
from swiftkv.kernels.ops import AnyOps
from swiftkv.models import mxfp4
from swiftkv.models.config import AttentionKind
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.moe import MoeConfig
from swiftkv.models.registry import read_config, weight_bytes
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.paged import PagedRunner

PROMPTS = {"prompt": torch.randint(320, (60,), generator=torch.Generator().manual_seed(3)).tolist()}

MIMO: dict[str, Any] = {  # the published file, its sizes made smaller
    "architectures": ["MiMoV2FlashForCausalLM"],
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 256,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "intermediate_size": 512,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 128,
    "moe_layer_freq": [0, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 1000,
}
GPT_OSS: dict[str, Any] = {  # likewise
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initial_context_length": 4096,
    "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
}


def read(directory: Path, values: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def shape_of(kind: AttentionKind) -> tuple[Any, ...]:
    return (kind.layers, kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.value_head_dim, kind.window, kind.sinks)


def test_mimo_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, MIMO)
    assert isinstance(config, MoeConfig)
    full, window = config.attention
    assert shape_of(full) == ((0, 3), 8, 1, 192, 128, 0, None)
    assert shape_of(window) == ((1, 2), 8, 2, 192, 128, 129, "attention_sink_bias")  # the query itself counts
    assert [kind.rope.rotary_dim(kind.head_dim) for kind in config.attention] == [64, 64]
    assert (full.rope.theta, window.rope.theta) == (5e6, 1e4)
    assert config.router == Router(16, 4, "sigmoid", renormalise=True)
    assert (config.expert_layers, config.rms_norm_eps) == ((1, 2, 3), 1e-5)
    assert (full.value_scale, window.value_scale) == (0.707, 0.707)
    full_group, window_group = config.kv_groups(16, "bfloat16")
    assert full_group.bytes_per_token == 2 * (192 + 128) * 2
    assert window_group.bytes_per_token == 2 * full_group.bytes_per_token


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}})
    assert isinstance(config, MoeConfig)
    full, window = config.attention
    assert (full.layers, full.window, full.sinks) == ((1, 3), 0, "sinks")
    assert (window.layers, window.window, window.sinks) == ((0, 2), 128, "sinks")
    assert (full.rope.rope_type, full.rope.factor, full.rope.truncate) == ("yarn", 32.0, False)
    assert config.router == Router(32, 4, "softmax_of_chosen")
    assert config.activation == GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
    assert config.max_context_len == 131072
    by_default = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "layer_types")}
    assert read(tmp_path, by_default) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (MIMO | {"n_shared_experts": 1}, ["shared"]),
        (MIMO | {"scoring_func": "softmax"}, ["scoring_func"]),
        (MIMO | {"num_experts_per_tok": 17}, ["17", "16"]),
        (MIMO | {"swa_num_key_value_heads": 3}, ["swa_num_key_value_heads: 3", "8"]),
        (MIMO | {"swa_head_dim": 288}, ["head_dim", "288", "256"]),
        (MIMO | {"v_head_dim": 120, "swa_v_head_dim": 128}, ["v_head_dim", "120", "16"]),
        (MIMO | {"attention_projection_layout": "packed"}, ["attention_projection_layout", "fused_qkv"]),
        (MIMO | {"attention_projection_layout": "fused_qkv"}, ['"fused_qkv_shards": 1', "published"]),
        (MIMO | {"attention_projection_layout": "fused_qkv", "fused_qkv_shards": 3}, ["fused_qkv_shards", "3"]),
        (MIMO | {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        (GPT_OSS | {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "mxfp4"]),
        (GPT_OSS | {"num_local_experts": 2}, ["4", "2"]),
        (GPT_OSS | {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, values)
    assert all(word in str(error.value) for word in words)


def fuse_qkv(directory: Path, num_shards: int) -> None:
    """Store a MiMo's projections as MiMo-V2.5 has them: each shard's queries, keys and values, shard by shard."""
    tensors = load_file(directory / "model.safetensors")
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{attention}.{name}_proj.weight").chunk(num_shards) for name in "qkv"]
        in_order = [part for shard in zip(*parts, strict=True) for part in shard]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(in_order)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    rewrite_config(
        directory,
        architectures=["MiMoV2ForCausalLM"],
        attention_projection_layout="fused_qkv",
        fused_qkv_shards=num_shards,
    )


@pytest.mark.parametrize("num_shards", [1, 2])  # the latter as published: as many as full attention has KV heads
def test_fused_projections_are_the_same_model(num_shards: int, ops: AnyOps, tmp_path: Path) -> None:
    fused, split = tmp_path / "fused", tmp_path / "split"
    for directory in (fused, split):
        make_checkpoint(directory, "mimo", num_key_value_heads=2)
    fuse_qkv(fused, num_shards)
    logits = []
    for directory in (fused, split):
        config = read_config(directory)
        assert [kind.num_kv_heads for kind in config.attention] == [2, 4]
        decoder = load_decoder(config, MappedWeights(directory), torch.float32, "cpu", 128, ops=ops)
        logits.append(PagedRunner(decoder).run(PROMPTS, (1000,))["prompt"])
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_unpacked_as_transformers_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 40, 2), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [experts, inputs, outputs]
    for index in range(len(blocks)):
        assert torch.equal(mxfp4.unpack(blocks[index], scales[index], dtype), theirs[index].t())
        assert torch.equal(mxfp4.coded(blocks[index], scales[index], dtype).unpack(), theirs[index].t())


def to_mxfp4(directory: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a checkpoint by random ones in MXFP4; return the checkpoint with these unpacked."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    unpacked = dict(tensors)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, num_inputs, num_outputs = tensors.pop(name).shape
        groups = num_inputs // mxfp4.GROUP
        blocks = torch.randint(0, 256, (count, num_outputs, groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, (count, num_outputs, groups), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, file, {"format": "pt"})
    rewrite_config(directory, quantization_config={"quant_method": "mxfp4"})
    return unpacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_in_mxfp4_is_the_one_that_it_unpacks_to(dtype: torch.dtype, ops: AnyOps, tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        make_checkpoint(directory, "gpt_oss")
    save_file(to_mxfp4(packed), plain / "model.safetensors", {"format": "pt"})
    logits = []
    for directory in (packed, plain):
        config = read_config(directory)
        decoder = load_decoder(config, MappedWeights(directory), dtype, "cpu", 128, ops=ops)
        logits.append(PagedRunner(decoder).run(PROMPTS, (1000,))["prompt"])
    assert torch.equal(*logits)


def test_blocks_without_their_scales_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    to_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.float32, "cpu", 128)


def test_mxfp4_is_counted_as_it_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    config = read_config(tmp_path)
    unpacked_bytes = weight_bytes(config, 1, "bfloat16")
    assert weight_bytes(config, 1, "bfloat16", tmp_path) == unpacked_bytes
    tensors = to_mxfp4(tmp_path)
    experts = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(("gate_up_proj", "down_proj")))
    kept_bytes = unpacked_bytes - 2 * experts + experts // 2 + experts // 32 * 4
    assert weight_bytes(config, 1, "bfloat16", tmp_path) == kept_bytes
