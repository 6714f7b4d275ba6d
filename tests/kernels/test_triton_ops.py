"""A decoder on the Triton kernels, in the interpreter, beside the same decoder in plain torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftkv.kernels import triton_ops
from swiftkv.kernels.dispatch import OPS_VARIABLE, reference_ops, select_ops
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.checkpoints import make_checkpoint
from tests.support.paged import PagedRunner

PROMPTS = {"a": list(range(5, 23)), "b": [7], "c": [9, 8, 300, 11]}
CHUNKS = (3, 1, 9)


def interpreted_ops() -> AnyOps:
    return select_ops("cuda:0")


def run(directory: Path, ops: AnyOps, shared_layers: bool = False) -> dict[str, Tensor]:
    config = read_config(directory)
    decoder = load_decoder(config, MappedWeights(directory), torch.float32, "cpu", 64, ops=ops)
    return PagedRunner(decoder, shared_layers=shared_layers).run(PROMPTS, CHUNKS)


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("qwen3", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("mimo", {"num_hidden_layers": 2, "head_dim": 48, "sliding_window": 5}),
    ],
)
def test_a_decoder_gives_the_logits_of_the_reference(arch: str, shape: dict[str, int], tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48}
    make_checkpoint(tmp_path, arch, **small | shape)
    expected = run(tmp_path, reference_ops())
    for name, logits in run(tmp_path, interpreted_ops()).items():
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected[name], rtol=2e-5, atol=2e-5)


def test_cuda_devices_run_triton_unless_the_reference_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops("cuda:1").name == "triton"
    monkeypatch.setenv(OPS_VARIABLE, "reference")
    assert select_ops("cuda:1").name == "reference"


def test_nothing_of_triton_is_imported_for_the_cpu() -> None:
    source = (
        "import sys; from swiftkv.kernels.dispatch import *; import swiftkv.models.dense;"
        "select_ops('cpu'); reference_ops(); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_bias_that_some_of_the_packed_layers_have() -> None:
    torch.manual_seed(0)
    weights, bias, x = [torch.randn(3, 8), torch.randn(5, 8)], torch.randn(5), torch.randn(2, 8)
    packed = triton_ops.pack_linear(weights, [None, bias])
    expected = torch.cat([x @ weights[0].T, x @ weights[1].T + bias], dim=1)
    assert (packed.out_features, packed.in_features, packed.nbytes) == (8, 8, 4 * (64 + 8))
    torch.testing.assert_close(triton_ops.linear(x, packed), expected)
    residual = torch.ones(2, 8)
    triton_ops.linear_residual(x, packed, residual)
    torch.testing.assert_close(residual, expected + 1)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 weights and 1 biases"):
        triton_ops.pack_linear([torch.ones(3, 4), torch.ones(3, 4)], [None])
    with pytest.raises(ValueError, match="one dtype and one in_features"):
        triton_ops.pack_linear([torch.ones(3, 4), torch.ones(3, 5)])
    with pytest.raises(ValueError, match="gate and up"):
        triton_ops.pack_linear([torch.ones(3, 4), torch.ones(2, 4)], interleave=True)
