"""The plan against the paper's table and against hand-made numbers, from nothing but `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv.config import load_config
from swiftkv.errors import ConfigError
from swiftkv.planning.lending import plan_lending
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.planning.report import model_as_dict
from swiftkv.units import DeviceShare
from tests.support.hf_configs import LLAMA

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
PUBLISHED = {
    "LWM": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
    },
    "Qwen3-8B": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "Qwen3-14B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "Qwen3-32B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}
TINY_BLOCK_BYTES = 3 * (2 * 16 * 2 * 16 * 2)  # layers x layer block of 16 tokens, 2 heads of 16, 2 bytes


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def make(directory: Path, hf_config: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config))


def plan(tmp_path: Path, model_yaml: str, need_weights: bool = False) -> SizedPlan:
    file = tmp_path / "node.yaml"
    file.write_text(f"models: [{{name: m, {model_yaml}}}]")
    (planned,) = plan_node(load_config(file), need_weights)
    assert isinstance(planned, SizedPlan)
    return planned


def mistake(tmp_path: Path, model_yaml: str, need_weights: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, model_yaml, need_weights)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "megabytes_per_token", "billion_parameters"),
    [("LWM", 0.50, 6.7), ("Qwen3-8B", 0.141, 8.2), ("Qwen3-14B", 0.156, 14.8), ("Qwen3-32B", 0.25, 32.8)],
)
def test_table_2(name: str, megabytes_per_token: float, billion_parameters: float, tmp_path: Path) -> None:
    make(tmp_path / name, PUBLISHED[name])
    planned = plan(tmp_path, f"path: {name}, dtype: float16, kv_cache: {{memory: 16GiB}}")
    assert round(planned.bytes_per_token / (1 << 20), 3) == megabytes_per_token
    assert planned.weight_bytes / 2e9 == pytest.approx(billion_parameters, rel=0.01)
    assert planned.num_blocks == (16 << 30) // (planned.bytes_per_token * 16)


def test_sizes_by_hand(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    planned = plan(tmp_path, f"path: tiny, kv_cache: {{memory: {10 * TINY_BLOCK_BYTES + 1}}}")
    assert (planned.num_blocks, planned.block_bytes) == (10, TINY_BLOCK_BYTES)
    assert (planned.pool_bytes, planned.pool_tokens) == (10 * TINY_BLOCK_BYTES, 160)
    assert planned.weight_bytes == 2 * (2 * 1000 * 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128))
    assert planned.max_model_len == planned.longest_context == 160  # limited by the pool
    assert plan(tmp_path, "path: tiny, kv_cache: {memory: 64MiB}").max_model_len == 512  # limited by the model
    assert plan(tmp_path, "path: tiny, max_model_len: 100").max_model_len == 100


def test_sizes_of_a_rank_by_hand(tmp_path: Path) -> None:
    """Heads, MLP and head of the model are divided, the embedding is not; a token takes half a block's bytes."""
    make(tmp_path / "tiny", LLAMA)
    memory = f"path: tiny, kv_cache: {{memory: {10 * TINY_BLOCK_BYTES}}}"
    planned = plan(tmp_path, f"{memory}, tensor_parallel_size: 2")
    assert (planned.num_blocks, planned.block_bytes) == (20, TINY_BLOCK_BYTES // 2)
    assert planned.weight_bytes == 2 * (1000 * 64 + 500 * 64 + 3 * (64 * 32 * 2 + 64 * 16 * 2 + 3 * 64 * 64))
    planned = plan(tmp_path, f"{memory}, tensor_parallel_size: 4")  # two ranks have the same KV head
    assert (planned.num_blocks, planned.block_bytes) == (20, TINY_BLOCK_BYTES // 2)
    assert model_as_dict(planned)["tensor_parallel_size"] == 4


def test_tiers_hold_the_parts_of_all_ranks(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    tiers = f"tiers: {{host: {{ratio: 2.0}}, storage: {{path: kv, size: {1 << 20}}}}}"
    memory = f"path: tiny, {tiers}, kv_cache: {{memory: {10 * TINY_BLOCK_BYTES}}}"
    one = plan(tmp_path, memory)
    two = plan(tmp_path, f"{memory}, tensor_parallel_size: 2")
    four = plan(tmp_path, f"{memory}, tensor_parallel_size: 4")  # two ranks each have the same KV, and store it
    assert [each.host_bytes for each in (one, two, four)] == [count * 20 * TINY_BLOCK_BYTES for count in (1, 2, 4)]
    assert one.storage_tokens == two.storage_tokens == 2 * four.storage_tokens == (1 << 20) // one.bytes_per_token
    assert one.host_tokens is not None
    assert two.host_tokens == four.host_tokens
    assert two.host_tokens == pytest.approx(2 * one.host_tokens, rel=0.2)  # smaller blocks, with a header each


def test_a_head_that_is_the_embedding_is_divided_in_a_copy(tmp_path: Path) -> None:
    make(tmp_path / "tiny", {**LLAMA, "tie_word_embeddings": True})
    layers = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert plan(tmp_path, "path: tiny").weight_bytes == 2 * (1000 * 64 + layers)
    assert plan(tmp_path, "path: tiny, tensor_parallel_size: 2").weight_bytes == 2 * (1500 * 64 + layers // 2)


def test_ranks_that_cannot_divide_the_model_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    assert mistake(tmp_path, "path: tiny, tensor_parallel_size: 8") == (
        "models[0].tensor_parallel_size: 8 ranks cannot divide 4 heads, 2 KV heads and an intermediate_size of 128 "
        "evenly; possible are 1, 2, 4"
    )


def test_a_hybrid_shares_its_pool_whether_it_lends_or_borrows(tmp_path: Path) -> None:
    """Windows of 64 tokens take a tail of 4 blocks, and 2 more to run; a block has a layer, or two in the window's."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    hybrid = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "layer_types": layer_types}
    make(tmp_path / "tiny", {**hybrid, "use_sliding_window": True, "sliding_window": 64})
    extent_bytes = 2 * TINY_BLOCK_BYTES // 3
    text = f"path: tiny, max_num_seqs: 2, kv_cache: {{memory: {20 * extent_bytes + 1}}}"
    shared = plan(tmp_path, text)
    assert shared.division.blocks_per_extent(0) == 2
    assert (shared.group_blocks, shared.pool_bytes) == ((40, 20), 20 * extent_bytes)
    assert shared.max_model_len == (20 - 6 - 1) * 2 * 16  # an extent of full blocks may be filled in part
    assert model_as_dict(shared)["shared_extent_bytes"] == extent_bytes
    assert plan(tmp_path, f"{text}, lending: {{budget: 0}}").group_blocks == shared.group_blocks
    assert plan(tmp_path, f"{text}, role: master").group_blocks == shared.group_blocks


def test_the_machine_readable_plan_is_json(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    as_json = json.loads(json.dumps(model_as_dict(plan(tmp_path, "path: tiny, kv_cache: {memory: 1MiB}"))))
    assert as_json["num_blocks"] == (1 << 20) // TINY_BLOCK_BYTES
    assert as_json["kv_groups"][0]["layers"] == [0, 1, 2]
    assert as_json["kv_groups"][0]["layer_block_bytes"] == TINY_BLOCK_BYTES // 3


def test_a_path_starts_where_the_file_lies_and_else_where_you_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_dir, working_dir = tmp_path / "configs", tmp_path / "work"
    file_dir.mkdir()
    working_dir.mkdir()
    monkeypatch.chdir(working_dir)
    make(working_dir / "tiny", LLAMA)
    assert plan(file_dir, "path: tiny").checkpoint.directory == working_dir / "tiny"
    make(file_dir / "tiny", LLAMA)
    assert plan(file_dir, "path: tiny").checkpoint.directory == file_dir / "tiny"
    assert plan(file_dir, f"path: {working_dir / 'tiny'}").checkpoint.directory == working_dir / "tiny"


def test_a_pool_too_small_says_how_much_is_needed(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    needed = 7 * TINY_BLOCK_BYTES
    text = "path: tiny, max_model_len: 100, kv_cache: {memory: %d}"
    assert mistake(tmp_path, text % (needed - 1)) == (
        "models[0].kv_cache.memory: 42KiB holds 96 tokens, one sequence of 100 needs 43008 bytes (42KiB); "
        "raise it or lower max_model_len"
    )
    assert plan(tmp_path, text % needed).num_blocks == 7
    assert "one sequence of 16 needs 6144 bytes (6KiB)" in mistake(tmp_path, "path: tiny, kv_cache: {memory: 6143}")


def test_a_length_beyond_the_model(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    message = mistake(tmp_path, "path: tiny, max_model_len: 513")
    assert message == "models[0].max_model_len: 513 is more than the 512 positions that the model has"


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = mistake(tmp_path, "path: empty")
    assert message == (
        f"models[0].path: {tmp_path / 'empty'} has no config.json; name a directory in Hugging Face format"
    )
    message = mistake(tmp_path, "path: emtpy")
    assert message == f"models[0].path: 'emtpy' is neither a directory in {tmp_path} or {Path.cwd()} nor a hub id"
    assert mistake(tmp_path, f"path: {tmp_path / 'emtpy'}") == (
        f"models[0].path: there is no directory {tmp_path / 'emtpy'}"
    )


def test_a_slip_in_a_local_path_does_not_ask_the_hub(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert "nor a hub id" in mistake(tmp_path, "path: checkpoints/caht")


def test_a_hub_id_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    message = mistake(tmp_path, "path: nobody/nothing")
    assert message.startswith(
        "models[0].path: 'nobody/nothing' is not a directory here, and cannot be fetched from the hub: "
    )
    assert "\n" not in message


def test_serving_needs_weights_and_tokenizer(tmp_path: Path) -> None:
    make(tmp_path / "tiny", LLAMA)
    assert "has no *.safetensors" in mistake(tmp_path, "path: tiny", need_weights=True)
    (tmp_path / "tiny" / "model.safetensors").touch()
    assert "has no tokenizer.json" in mistake(tmp_path, "path: tiny", need_weights=True)
    (tmp_path / "tiny" / "tokenizer.json").touch()
    plan(tmp_path, "path: tiny", need_weights=True)


def test_an_architecture_that_is_not_supported_names_those_that_are(tmp_path: Path) -> None:
    make(tmp_path / "tiny", {**LLAMA, "architectures": ["BertModel"]})
    message = mistake(tmp_path, "path: tiny")
    assert message.startswith("models[0].path: ")
    assert "BertModel: not supported; supported are Qwen3ForCausalLM, " in message
    assert "\n" not in message


def test_each_model_with_a_mistake_gets_a_line(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("models: [{name: a, path: missing-a}, {name: b, path: missing-b}]")
    with pytest.raises(ConfigError) as caught:
        plan_node(load_config(file), need_weights=False)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["models[0].path", "models[1].path"]


def test_a_part_of_a_gpu_is_planned_without_a_pool_and_without_lending(tmp_path: Path) -> None:
    """The engine finds the bytes; what is written in bytes beside it is planned as ever."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "node.yaml").write_text(
        "models:\n"
        "  - {name: part, path: tiny, device: 'cuda:0', kv_cache: {memory: 37.5%}}\n"
        "  - {name: master, path: tiny, role: master, device: 'cuda:0', kv_cache: {memory: 1MiB}}\n"
    )
    part, master = plan_node(load_config(tmp_path / "node.yaml"), need_weights=False)
    assert (type(part), part.max_model_len, part.memory) == (ModelPlan, 512, DeviceShare(3, 8))
    assert model_as_dict(part)["device_part"] == 0.375
    assert isinstance(master, SizedPlan)
    assert master.num_blocks == (1 << 20) // (4 * TINY_BLOCK_BYTES)  # of 64 tokens, as ever on a GPU
    assert plan_lending((part, master)) == ()


def test_pools_in_different_memory_do_not_lend_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    lends = "path: tiny, kv_cache: {memory: 1MiB}, lending: {budget: 50%}"
    (tmp_path / "node.yaml").write_text(
        "models:\n"
        "  - {name: master, path: tiny, role: master, device: 'cuda:1', kv_cache: {memory: 1MiB}}\n"
        f"  - {{name: host, {lends}}}\n"
        f"  - {{name: gpu, device: 'cuda:0', {lends}}}\n"
    )
    (room,) = plan_lending(plan_node(load_config(tmp_path / "node.yaml"), need_weights=False))
    assert [pair.lender.name for pair in room.pairs] == ["gpu"]
    assert room.pairs[0].share == 1


def test_regular_boundaries_are_no_closer_than_a_window(tmp_path: Path) -> None:
    windowed = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}
    text = "path: tiny, kv_cache: {memory: 1MiB, retention_interval: %d}"
    make(tmp_path / "tiny", windowed)
    assert plan(tmp_path, text % 256).num_blocks > 0
    with pytest.raises(ConfigError, match=r"retention_interval: 255 is less than the model's window of 256 tokens"):
        plan(tmp_path, text % 255)
