"""The GPU benchmark's arithmetic, tested without a GPU: floors, plans, and the steps that it makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftkv.config import load_config
from swiftkv.models.batch import ModelInput
from swiftkv.planning.node import plan_node

GPU_BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"
CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GPU_BENCHMARKS))
    import serve

    yield serve
    for name in ("serve", "machine"):
        sys.modules.pop(name, None)


def test_floors_are_those_of_qwen3_8b(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(serve.SHAPE))
    (tmp_path / "node.yaml").write_text(f"models: [{{name: a, path: {tmp_path}, max_model_len: 1024}}]")
    (plan,) = plan_node(load_config(tmp_path / "node.yaml"), need_weights=False)
    config = serve.read_config(tmp_path)
    embedding = config.vocab_size * config.hidden_size
    assert 2 * serve.matrix_parameters(config) == plan.weight_bytes - 2 * 2 * embedding
    kv_bytes = 32 * 4096 * plan.bytes_per_token
    assert serve.decode_bytes(config, 32, 4096) == plan.weight_bytes - 2 * embedding + kv_bytes
    assert serve.prefill_operations(config, 1, 9) == (
        2 * serve.matrix_parameters(config) + 2 * embedding + 4 * 128 * 32 * 36 * 10
    )
    whole = serve.prefill_operations(config, 100)
    parts = serve.prefill_operations(config, 60) + serve.prefill_operations(config, 40, 60) - 2 * embedding
    assert whole == parts


def test_the_longest_context_is_the_papers(serve: Any) -> None:
    """L = 10, K_master = 100, K = 17: 25 blocks."""
    assert serve.longest_context(10, 17, 10) == 25 * serve.BLOCK_SIZE


def test_steps_with_kv_elsewhere_are_the_steps_with_all_of_it_here(serve: Any) -> None:
    """The copies are done by hand; what the tables then say is the same KV."""
    decoder = serve.make_decoder({**serve.SHAPE, **TINY}, CPU, torch.float32, 2048)
    (group,) = decoder.kv_groups
    num_cached, num_new = 10 * serve.BLOCK_SIZE, 70
    local = serve.local_step(group.num_layers, [(num_cached, num_new)])
    pool = torch.randn(12 * group.block_bytes // 4).view(torch.uint8)
    streamed = serve.streamed_step(group, num_cached, num_new, group.num_layers)  # a buffer for every layer
    assert streamed.has_copies
    own = torch.zeros(20 * group.block_bytes, dtype=torch.uint8)
    width = group.layer_block_bytes
    cached = local.stream_tables[0][0][:10].tolist()  # layer blocks of the pool
    for layer in range(group.num_layers):
        # Link 0 holds the cached blocks where the runs look for them.
        for _, peer_offset, local_offset, count, staged in streamed.loads[layer].tolist():
            assert staged
            first = (local_offset // width) - (~streamed.stream_tables[layer][0][0])
            assert peer_offset % (8 * group.block_bytes) == 0
            for i in range(count):
                source = (cached[first + i] + layer) * width
                own[local_offset + i * width :][:width] = pool[source:][:width]
    expected = decoder.forward(ModelInput.from_plan(local), [pool])
    assert torch.equal(decoder.forward(ModelInput.from_plan(streamed), [own]), expected)


def test_decoding_with_kv_elsewhere_is_decoding_with_all_of_it_here(serve: Any) -> None:
    decoder = serve.make_decoder({**serve.SHAPE, **TINY}, CPU, torch.float32, 2048)
    (group,) = decoder.kv_groups
    num_seqs, own, borrowed, num_layers = 2, 1, 3, group.num_layers
    local = serve.streamed_decode(group, num_seqs, own, borrowed, 0)
    assert not local.has_copies
    streamed = serve.streamed_decode(group, num_seqs, own, borrowed, num_layers)  # a buffer for every layer
    pool = torch.randn(num_seqs * (own + borrowed) * group.block_bytes // 4).view(torch.uint8)
    blocks = pool.view(num_seqs, own + borrowed, num_layers, -1)
    slots = torch.zeros_like(pool)
    slots[: num_seqs * own * group.block_bytes] = blocks[:, borrowed:].reshape(-1)
    peer = blocks[:, :borrowed].reshape(-1)
    width = group.layer_block_bytes
    for layer in range(num_layers):
        for _, peer_offset, local_offset, count, staged in streamed.loads[layer].tolist():
            assert staged
            for i in range(count):
                source = peer_offset + i * group.block_bytes + layer * width
                slots[local_offset + i * width :][:width] = peer[source:][:width]
    expected = decoder.forward(ModelInput.from_plan(local), [pool])
    assert torch.equal(decoder.forward(ModelInput.from_plan(streamed), [slots]), expected)


def test_transformers_takes_the_same_steps(serve: Any) -> None:
    shape = {**serve.SHAPE, **TINY}
    calls = serve.transformers_calls(shape, CPU, torch.float32, (3, 96), (5, 40))
    with torch.inference_mode():
        shapes = {name: tuple(call().shape) for name, (call, _) in calls.items()}
    assert shapes == {"decode 3 x 96": (3, 1, 64), "prefill 5": (1, 1, 64), "prefill 40": (1, 1, 64)}


def test_percentiles_are_of_what_was_measured(serve: Any) -> None:
    assert serve.percentile(list(np.arange(1, 101) / 10), 99) == 10.0
