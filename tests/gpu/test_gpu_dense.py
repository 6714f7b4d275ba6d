"""A whole decoder on the device beside the same decoder in plain torch on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("msgspec")  # needed to read config.json
pytest.importorskip("transformers")
pytest.importorskip("swiftkv._core")

from swiftkv.kernels.dispatch import reference_ops
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.checkpoints import make_checkpoint
from tests.support.paged import PagedRunner

pytestmark = pytest.mark.gpu

PROMPTS = {
    name: [(7 * i + shift) % 320 for i in range(n)]
    for shift, (name, n) in enumerate({"a": 100, "b": 1, "c": 37}.items())
}
CHUNKS = [(1000,), (7, 1, 40, 16, 3)]


def run(directory: Path, dtype: str, device: str, chunks: tuple[int, ...], shared_layers: bool = False) -> Tensor:
    ops = reference_ops() if device == "cpu" else None
    config = read_config(directory)
    decoder = load_decoder(config, MappedWeights(directory), getattr(torch, dtype), device, 128, ops=ops)
    assert decoder.ops.name == ("reference" if device == "cpu" else "triton")
    runner = PagedRunner(decoder, shared_layers=shared_layers, device=device)
    return torch.cat(list(runner.run(PROMPTS, chunks).values())).cpu()


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("qwen3", {"head_dim": 128}),
        ("qwen3", {"head_dim": 64, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", {"hidden_size": 320, "intermediate_size": 640}),  # heads of 80
        ("llama", {"head_dim": 96, "attention_bias": True, "mlp_bias": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_are_as_close_to_the_exact_ones_as_plain_torch_in_the_dtype(
    dtype: str, arch: str, shape: dict[str, Any], chunks: tuple[int, ...], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, arch, dtype=getattr(torch, dtype), **shape)
    exact = run(tmp_path, "float32", "cpu", chunks)
    torch_error = (run(tmp_path, dtype, "cpu", chunks) - exact).square().mean().sqrt()
    error = (run(tmp_path, dtype, "cuda", chunks) - exact).square().mean().sqrt()
    assert error < 2 * torch_error, (error, torch_error)
