"""Incomplete checkpoints, and the memory that a loaded one takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftkv.errors import CheckpointError, FilesChangedError
from swiftkv.kernels import reference
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder, read_description
from swiftkv.models.registry import read_config
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.mappings import mapping_of, resident_bytes_of

INDEX = "model.safetensors.index.json"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(read_config(directory), MappedWeights(directory), dtype, "cpu", 64)


def change_weights(directory: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return file


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    change_weights(tmp_path, {name: None})
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*{name}"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_its_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    file = change_weights(tmp_path, {name: torch.zeros(64, 95)})
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert all(words in str(error.value) for words in (str(file), name, "(64, 95)", "(64, 96)"))


@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.int16, "is torch.int16"), (torch.int8, "is quantized, but .*weight_scale is in no")]
)
def test_a_tensor_of_integers_is_named(dtype: torch.dtype, words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(tmp_path, {name: torch.zeros(96, 64, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"{name} {words}"):
        load(tmp_path)


def test_a_config_that_says_untied_wants_a_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    rewrite_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)


def test_a_tied_head_shares_the_memory_of_the_embedding(tmp_path: Path) -> None:
    """Loading copies, since the file has another dtype, and kernels read its layout: both as on a GPU."""
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    files = MappedWeights(tmp_path)
    decoder = load_decoder(read_config(tmp_path), files, torch.bfloat16, "cpu", 64, ops=reference)
    assert decoder._lm_head.weight.data_ptr() == decoder._embedding.data_ptr()


def test_files_that_are_overwritten_are_noticed_and_those_that_are_replaced_are_still_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    files = MappedWeights(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    (tmp_path / "arriving").write_bytes(content)
    os.replace(tmp_path / "arriving", shard)
    files.check_unchanged()
    files = MappedWeights(tmp_path)
    with shard.open("r+b") as file:  # as cp and rsync --inplace do
        file.write(content)
    os.utime(shard, ns=(0, 0))
    with pytest.raises(FilesChangedError, match=rf"{shard} was overwritten while the model used it"):
        files.check_unchanged()


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        MappedWeights(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        MappedWeights(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=str(file)):
        MappedWeights(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", json.dumps({"metadata": {}}), json.dumps({"weight_map": {"x": 1}})])
def test_an_index_that_is_none_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX):
        MappedWeights(tmp_path)


def is_mapped_from(tensor: torch.Tensor, directory: Path) -> bool:
    """Whether the tensor's bytes lie in a mapping of a file in `directory`."""
    return str(directory) in mapping_of(tensor.data_ptr()).file


def test_what_is_packed_does_not_stay_in_memory_twice(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", hidden_size=512, intermediate_size=2048)
    decoder = load(tmp_path)
    assert is_mapped_from(decoder._embedding, tmp_path)
    assert resident_bytes_of(str(tmp_path)) < (tmp_path / "model.safetensors").stat().st_size // 4


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_stays_in_the_file_and_small_tensors_do_not(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tie_word_embeddings=tied)
    decoder = load(tmp_path, torch.bfloat16)
    assert is_mapped_from(decoder._embedding, tmp_path)
    assert not is_mapped_from(decoder._final_norm, tmp_path)
    assert not is_mapped_from(load(tmp_path, torch.float32)._embedding, tmp_path)


def test_a_fingerprint_depends_on_every_byte_and_on_no_path(tmp_path: Path) -> None:
    def fingerprint(name: str, config: str = "{}", value: float = 1.0) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(config)
        (directory / "README.md").write_text(name)
        save_file({"weight": torch.full((3, 5), value)}, directory / "model.safetensors")
        return MappedWeights(directory).fingerprint()

    same = fingerprint("a")
    assert fingerprint("b") == same
    assert fingerprint("c", config="{ }") != same
    assert fingerprint("d", value=1.5) != same
    (tmp_path / "b" / "quantize_config.json").write_text("{}")  # of older programs, which say there what weights mean
    assert MappedWeights(tmp_path / "b").fingerprint() != same


def test_files_that_are_replaced_while_a_model_loads_are_a_mistake(tmp_path: Path) -> None:
    """It would compute by one configuration, and keep its blocks under the name of another."""
    make_checkpoint(tmp_path, "qwen3")
    before = read_description(tmp_path)
    MappedWeights(tmp_path, before)
    rewrite_config(tmp_path, rope_theta=9e4)
    with pytest.raises(CheckpointError, match="files were replaced while they were read; start the model again"):
        MappedWeights(tmp_path, before)


def test_a_fingerprint_is_of_the_files_that_were_loaded(tmp_path: Path) -> None:
    """KV of one model must not be kept under the name of the next one, whose files have taken the place."""
    make_checkpoint(tmp_path / "old", "qwen3", seed=1)
    make_checkpoint(tmp_path / "new", "qwen3", seed=2)
    files = MappedWeights(tmp_path / "old")
    before, others = files.fingerprint(), MappedWeights(tmp_path / "new").fingerprint()
    assert before != others
    rewrite_config(tmp_path / "new", rope_theta=9e4)
    for name in ("config.json", "model.safetensors"):
        os.replace(tmp_path / "new" / name, tmp_path / "old" / name)
    assert files.fingerprint() == before
    assert MappedWeights(tmp_path / "old").fingerprint() not in (before, others)


def test_files_that_were_written_to_have_no_fingerprint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    files = MappedWeights(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(FilesChangedError, match="was overwritten while the model used it"):
        files.fingerprint()
