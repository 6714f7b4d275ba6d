"""Checkpoints are checked by the headers of their files: what loads passes, what does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftkv.errors import CheckpointError
from swiftkv.models.files import check_tensors
from swiftkv.models.registry import DECODERS, read_config
from swiftkv.models.weights import RankSlices
from swiftkv.policies import Task
from tests.support.checkpoints import make_checkpoint
from tests.support.pooling import make_embedding_checkpoint

FILE = "model.safetensors"


def check(directory: Path, task: Task = "generate") -> None:
    config = read_config(directory, task)
    check_tensors(directory, DECODERS[config.architecture].weights(config, RankSlices.of(config, 0, 1)))


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt_oss", "qwen3_moe", "mimo"])
def test_a_checkpoint_that_loads_passes(arch: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch, max_shard_size="200KB")
    check(tmp_path)


def test_one_without_a_head_passes_where_it_needs_none(tmp_path: Path) -> None:
    make_embedding_checkpoint(tmp_path)
    check(tmp_path, "embed")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        check(tmp_path)


def test_a_tensor_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {other: tensor.clone() for other, tensor in load_file(tmp_path / FILE).items()}
    save_file({**tensors, name: torch.zeros(64, 95)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(64, 95\)"):
        check(tmp_path)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"{name} is in no"):
        check(tmp_path)


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


NESTED, ONE_OFFSET = b"[" * 100_000, b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0]}}'


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 64, with_header(b"[]"), with_header(NESTED), with_header(ONE_OFFSET)],
    ids=["empty", "short", "endless", "list", "nested", "one offset"],
)
def test_what_is_no_safetensors_file(content: bytes, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{FILE}: not safetensors"):
        check(tmp_path)


def test_a_file_cut_short(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"has {len(whole) - 1} bytes, but its header says {len(whole)}"):
        check(tmp_path)


def test_weights_in_another_format_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    (tmp_path / FILE).rename(tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither .* \(consolidated\.safetensors, pytorch_model\.bin\) are not"):
        check(tmp_path)
