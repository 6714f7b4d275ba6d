"""Models with experts: what `config.json` and checkpoints may say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.kernels.experts import Router
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.moe import MoeConfig
from swiftkv.models.registry import read_config, weight_bytes
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.hf_configs import LLAMA
from tests.support.paged import PagedRunner

QWEN3 = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


def read(tmp_path: Path, values: dict[str, Any]) -> MoeConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    assert isinstance(config, MoeConfig)
    return config


def test_keys_of_published_files_that_say_nothing_new(tmp_path: Path) -> None:
    coder = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert read(tmp_path, QWEN3 | coder) == read(tmp_path, QWEN3)


def test_mixtral_has_experts_in_every_layer(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL)
    assert config.router == Router(8, 2, "softmax", renormalise=True)
    assert (config.expert_size, config.expert_layers) == (128, (0, 1, 2))
    assert (config.rms_norm_eps, config.attention[0].rope.theta) == (1e-5, 1e6)  # as transformers has it
    assert [kind.window for kind in config.attention] == [0]
    windowed = read(tmp_path, MIXTRAL | {"sliding_window": 64})
    assert [kind.window for kind in windowed.attention] == [64]


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"decoder_sparse_step": 7}, ()),
    ],
)
def test_qwen3_says_which_layers_have_experts(values: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3 | values)
    assert config.expert_layers == layers
    assert config.router == Router(16, 4, "softmax")
    assert read(tmp_path, QWEN3 | {"norm_topk_prob": True}).router.renormalise


def test_both_names_for_the_number_of_experts(tmp_path: Path) -> None:
    renamed = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert read(tmp_path, renamed) == read(tmp_path, QWEN3)


def test_keys_without_effect_pass(tmp_path: Path) -> None:
    harmless = {"router_aux_loss_coef": 0.1, "output_router_logits": True, "use_cache": False, "new_thing": None}
    assert read(tmp_path, QWEN3 | harmless) == read(tmp_path, QWEN3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (QWEN3 | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size: only"),
        (QWEN3 | {"qkv_bias": True}, "qkv_bias"),
        (QWEN3 | {"use_qk_norm": False}, "use_qk_norm"),
        (MIXTRAL | {"n_group": 2, "moe_layer_freq": [1]}, "moe_layer_freq: this key is not known"),
        (QWEN3 | {"num_experts_per_tok": 17}, "17 of 16 experts cannot be chosen"),
        (QWEN3 | {"num_experts": 0}, "num_experts: 0 is not a positive number"),
        (QWEN3 | {"rope_theta": -1e6}, r"Expected `float` > 0.0 - at `\$.rope_theta`"),
        (QWEN3 | {"rms_norm_eps": -1e-6}, r"Expected `float` >= 0.0 - at `\$.rms_norm_eps`"),
        (QWEN3 | {"num_experts": 10**9}, "num_experts: 1000000000 is more than 1024"),
        (QWEN3 | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3 | {"moe_intermediate_size": "8"}, "moe_intermediate_size"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3 | {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_key_that_changes_numerics_and_is_not_known_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, values)


def test_ranks_divide_the_experts(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3 | {"moe_intermediate_size": 34})
    assert config.of_rank(2).expert_size == 17
    with pytest.raises(ConfigError, match=r"an intermediate_size of 128 and experts of 34 evenly; possible are 1, 2$"):
        config.of_rank(4)


def test_weights_are_counted(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3 | {"mlp_only_layers": [0]})
    attention = 64 * 16 * (4 + 2 + 2 + 4)
    experts = 16 * 3 * 64 * 32 + 16 * 64
    whole = 2 * 1000 * 64 + 6 * attention + 3 * 64 * 128 + 5 * experts
    assert weight_bytes(config, 1, "bfloat16") == 2 * whole
    half = 1000 * 64 + 500 * 64 + 6 * attention // 2 + 3 * 64 * 64 + 5 * (experts - 16 * 64) // 2 + 5 * 16 * 64
    assert weight_bytes(config, 2, "bfloat16") == 2 * half


def pack_experts(directory: Path) -> None:
    """Store a checkpoint's experts as one tensor of gate and up, and one of down, for each layer."""
    tensors = load_file(directory / "model.safetensors")
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in layers:
        names = ("w1", "w3", "w2") if "block_sparse_moe" in block else ("gate_proj", "up_proj", "down_proj")
        count = sum(name.startswith(f"{block}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.experts.{i}.{name}.weight") for i in range(count)]) for name in names
        )
        experts = f"{block.rpartition('.')[0]}.mlp.experts"
        tensors |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down.contiguous()}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_packed_experts_are_the_same_model(arch: str, ops: AnyOps, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch)
    prompts = {"a": [5, 6, 7, 200, 9], "b": [8]}

    def logits() -> dict[str, torch.Tensor]:
        decoder = load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.float32, "cpu", 64, ops=ops)
        return PagedRunner(decoder).run(prompts, (3,))

    expected = logits()
    pack_experts(tmp_path)
    assert not any(".experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    for name, rows in logits().items():
        assert torch.equal(rows, expected[name])


def test_an_expert_that_is_missing_is_named(ops: AnyOps, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    rewrite_config(tmp_path, remove=("num_local_experts",), num_experts=7)
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate\.weight has shape \(6, 64\), but config.json makes it \(7, 64\)"
    ):
        load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.float32, "cpu", 64, ops=ops)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.experts\.6\.gate_proj\.weight is in no"):
        load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.float32, "cpu", 64, ops=ops)
