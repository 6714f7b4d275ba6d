"""The kinds of quantization that `config.json` may name, and the tensors that a quantized weight needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.models.files import check_tensors
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import DECODERS, read_config
from swiftkv.models.weights import RankSlices
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.quantized import WEIGHTS, as_awq, as_gptq, as_packed, quantize

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}


W8A8 = COMPRESSED | {  # as RedHatAI publishes it
    "format": "int-quantized",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
            "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "int"},
            "output_activations": None,
        }
    },
}
W4A16 = COMPRESSED | {  # as RedHatAI publishes it
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "actorder": "group",
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            },
            "input_activations": None,
        }
    },
}
AWQ = {  # as Qwen3-8B-AWQ has it
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 128,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {  # as Qwen2.5-7B-Instruct-GPTQ-Int4 has it
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "modules_in_block_to_quantize": None,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
    "use_exllama": True,
}
GPTQMODEL = {  # as GPTQModel writes it
    "bits": 8,
    "checkpoint_format": "gptq_v2",
    "desc_act": True,
    "dynamic": {"-:.*lm_head": {}, "+:.*down_proj": {"bits": 4, "group_size": 32}},
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "uri": "https://github.com/modelcloud/gptqmodel"},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": False,
}
AUTO_ROUND = {  # as Intel publishes it
    "autoround_version": "0.5.1",
    "batch_size": 8,
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}, "lm_head": {"bits": 16}},
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}


def compressed(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"} | weights}}}


@pytest.mark.parametrize(
    "quantization",
    [
        BLOCKS,
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        COMPRESSED,
        compressed(strategy="block", block_structure=[128, 128]),
        W8A8,
        W4A16,
        compressed(type="int", num_bits=4) | {"format": "pack-quantized"},
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
                "group_1": {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"}},
                "group_2": {"format": "dense", "weights": None},
            },
        },
        AWQ,
        AWQ | {"version": "GEMM"},
        GPTQ,
        GPTQMODEL,
        AUTO_ROUND,
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        AUTO_ROUND
        | {"packing_format": None, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
    ],
)
def test_kinds_that_are_read(quantization: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite_config(tmp_path, quantization_config=quantization)
    read_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        (AUTO_ROUND | {"packing_format": "auto_round"}, "packing_format auto_round of auto-round"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format auto_round:llm_compressor"),
        (AUTO_ROUND | {"bits": 3}, "bits 3 of auto_round:auto_gptq"),
        (AUTO_ROUND | {"bits": 2, "packing_format": "auto_round:awq"}, "bits 2 of auto_round:awq"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type"),
        (AUTO_ROUND | {"act_bits": 8}, "quantized activations"),
        ({"quant_method": "exl3", "bits": 4.06}, "quant_method exl3"),
        (AWQ | {"version": "gemv"}, "version gemv of awq"),
        (AWQ | {"backend": "llm-awq"}, "backend llm-awq of awq"),
        (AWQ | {"bits": 8}, "bits 8 of awq"),
        (GPTQ | {"bits": 3}, "bits 3 of gptq"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format marlin of gptq"),
        (GPTQMODEL | {"checkpoint_format": "bitblas"}, "checkpoint_format bitblas of gptq"),
        (GPTQMODEL | {"pack_dtype": "int16"}, "pack_dtype int16"),
        (GPTQMODEL | {"adapter": {"name": "lora", "rank": 32}}, "adapter"),
        ({"bits": 4}, "quant_method None"),
        (["fp8"], "Expected `object`"),
        (COMPRESSED | {"config_groups": ["Linear"]}, "config_groups"),
        (BLOCKS | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        (BLOCKS | {"fmt": "e5m2"}, "e5m2"),
        (BLOCKS | {"store_dtype": "mxfp4"}, "numbers in mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo NVFP4"),
        (W4A16 | {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        (compressed(num_bits=4) | {"format": "pack-quantized"}, "pack-quantized weights of 4 bits and type float"),
        (compressed(type="int", num_bits=3) | {"format": "pack-quantized"}, "3 bits and type int"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed(num_bits=4), "4 bits and type float"),
        (compressed(type="int"), "8 bits and type int"),
        (compressed(block_structure=[1, 16]), r"block_structure \[1, 16\]"),
    ],
)
def test_kinds_of_quantization_that_are_not(quantization: Any, words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ConfigError, match=f"quantization_config: .*{words}.*; supported are FP8 weights"):
        read_config(tmp_path)


OWN_GPTQ = {  # as AutoGPTQ writes it
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": True,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
}


@pytest.mark.parametrize(
    ("name", "own", "qweights"),
    [
        ("quantize_config.json", OWN_GPTQ, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("quantize_config.json", {"bits": 4, "quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
    ],
)
def test_older_programs_say_it_in_files_of_their_own(
    name: str, own: dict[str, Any], qweights: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    assert read_config(tmp_path).qweights is None
    (tmp_path / name).write_text(json.dumps(own))
    assert read_config(tmp_path).qweights == qweights
    rewrite_config(tmp_path, quantization_config=BLOCKS)
    assert read_config(tmp_path).qweights is None


def test_what_such_a_file_has_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "quantize_config.json").write_text(json.dumps(OWN_GPTQ | {"is_marlin_format": True}))
    with pytest.raises(ConfigError, match=r"quantize_config\.json: checkpoint_format marlin of gptq"):
        read_config(tmp_path)


NAME = "model.layers.1.mlp.down_proj.weight"
MODULE = NAME.removesuffix(".weight")


def errors_of(directory: Path, changes: dict[str, Tensor | None]) -> set[str]:
    """Return what reading headers, and loading, say of a checkpoint after some changes to its tensors."""
    tensors = load_file(directory / WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, {"format": "pt"})
    config = read_config(directory)
    weights = DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, 1))
    with pytest.raises(CheckpointError) as by_header:
        check_tensors(directory, weights, config.qweights)
    with pytest.raises(CheckpointError) as loading:
        load_decoder(config, MappedWeights(directory), torch.float32, "cpu", 128)
    return {str(by_header.value), str(loading.value)}


@pytest.mark.parametrize(
    ("quantization", "changes", "words"),
    [
        (GPTQ, {"qzeros": None}, ["down_proj.qweight is quantized", "down_proj.qzeros"]),
        (GPTQ, {"scales": torch.ones(3, 63)}, ["down_proj.scales has shape (3, 63)", "64 x 96", "(3, 64)"]),
        (GPTQ, {"qweight": torch.ones(13, 64, dtype=torch.int32)}, ["qweight has shape (13, 64)", "(12, 64)"]),
        (GPTQ, {"qweight": torch.ones(12, 64)}, ["down_proj.qweight is F32", "I32"]),
        (GPTQ, {"g_idx": torch.zeros(95, dtype=torch.int32)}, ["down_proj.g_idx has shape (95,)", "(96,)"]),
        (AWQ, {"scales": torch.ones(5, 64)}, ["down_proj.scales has shape (5, 64)", "64 x 96", "(1, 64)"]),
        (AWQ, {"qweight": torch.ones(12, 64, dtype=torch.int32)}, ["qweight has shape (12, 64)", "(96, 8)"]),
        (W4A16, {"weight_scale": None}, ["down_proj.weight_packed is quantized", "down_proj.weight_scale"]),
        (W4A16, {"weight_zero_point": torch.ones(64, 3)}, ["weight_zero_point has shape (64, 3)", "(8, 3)"]),
        (None, {}, ["down_proj.qweight is of GPTQ or AWQ", "quantize_config.json"]),
    ],
)
def test_tensors_that_are_missing_or_do_not_fit(
    quantization: dict[str, Any] | None, changes: dict[str, Tensor | None], words: list[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    store = {"awq": as_awq, "compressed-tensors": as_packed}.get((quantization or GPTQ)["quant_method"], as_gptq)
    matrix = quantize(load_file(tmp_path / WEIGHTS)[NAME], 4, 32, symmetric=True)
    rewrite_config(tmp_path, quantization_config=quantization)
    of_module = {f"{MODULE}.{suffix}": tensor for suffix, tensor in changes.items()}
    for error in errors_of(tmp_path, {NAME: None} | store(NAME, matrix) | of_module):
        assert all(word in error for word in words), error


def test_a_group_that_has_no_factor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    tensors = load_file(tmp_path / WEIGHTS)
    stored = as_gptq(NAME, quantize(tensors.pop(NAME), 4, 32, symmetric=True))
    stored[f"{MODULE}.g_idx"][7] = 3
    save_file(tensors | stored, tmp_path / WEIGHTS, {"format": "pt"})
    rewrite_config(tmp_path, quantization_config=GPTQ)
    with pytest.raises(CheckpointError, match=f"{MODULE}.g_idx has groups .* the 3 of {MODULE}.scales"):
        load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.float32, "cpu", 128)
