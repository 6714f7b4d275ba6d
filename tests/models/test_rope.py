"""Tables of cosines and sines against transformers' own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from swiftkv.models.config import DecoderConfig
from swiftkv.models.registry import read_config
from swiftkv.models.rope import cos_sin_table, table_digest

HEAD_DIM = 64
LENGTH = 600

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 256},
    "llama3-wide-ramp": LLAMA3 | {"original_max_position_embeddings": 128, "high_freq_factor": 32.0},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 1.3, "mscale_all_dim": 0.5},
    "yarn-one-mscale-is-none": YARN | {"mscale": 1.3},
    "yarn-betas": YARN | {"beta_fast": 20.0, "beta_slow": 3.0},
    "yarn-untruncated": YARN | {"truncate": False},
    "yarn-step": YARN | {"original_max_position_embeddings": 6},
    "yarn-implied-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn-implied-original": {"rope_type": "yarn", "factor": 2.0},
}


def make_config(directory: Path, parameters: dict[str, Any]) -> tuple[LlamaConfig, DecoderConfig]:
    theirs = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0} | parameters,
    )
    theirs.save_pretrained(directory)
    return theirs, read_config(directory)


def table_of(inv_freq: Tensor, scale: float, positions: Tensor) -> Tensor:
    angles = positions[:, None].float() * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=1) * scale


@pytest.mark.parametrize("name", PARAMETERS)
def test_table_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = make_config(tmp_path, PARAMETERS[name])
    function = ROPE_INIT_FUNCTIONS.get(
        theirs.rope_parameters["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    inv_freq, scale = function(theirs)
    length = 512 if name == "dynamic" else LENGTH  # beyond its positions it has another base for each
    expected = table_of(inv_freq, scale, torch.arange(length))
    # An error of one unit in the last place of a frequency turns position 600 by 600 * 6e-8.
    torch.testing.assert_close(cos_sin_table(ours.attention[0].rope, HEAD_DIM, length), expected, atol=1e-4, rtol=0)


def test_dynamic_has_the_base_of_a_sequence_that_ends_at_the_position(tmp_path: Path) -> None:
    theirs, ours = make_config(tmp_path, PARAMETERS["dynamic"])
    table = cos_sin_table(ours.attention[0].rope, HEAD_DIM, LENGTH)
    for position in range(500, LENGTH):
        inv_freq, scale = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        expected = table_of(inv_freq, scale, torch.tensor([position]))[0]
        torch.testing.assert_close(table[position], expected, atol=2e-4, rtol=0)


def test_a_longer_table_begins_with_the_shorter_one(tmp_path: Path) -> None:
    for parameters in PARAMETERS.values():
        rope = make_config(tmp_path, parameters)[1].attention[0].rope
        for length in (100, 176, 177, 191):  # torch computes what does not fill its vectors in another way
            assert torch.equal(cos_sin_table(rope, HEAD_DIM, LENGTH)[:length], cos_sin_table(rope, HEAD_DIM, length))


def test_a_table_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """Three threads divide most lengths where one thread computes whole vectors."""
    before = torch.get_num_threads()
    try:
        for parameters in PARAMETERS.values():
            rope = make_config(tmp_path, parameters)[1].attention[0].rope
            tables = []
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                tables.append(cos_sin_table(rope, 64, 4160))
            assert torch.equal(*tables)
    finally:
        torch.set_num_threads(before)


def test_a_digest_tells_tables_apart(tmp_path: Path) -> None:
    ropes = {make_config(tmp_path, PARAMETERS[name])[1].attention[0].rope for name in ("default", "linear", "llama3")}
    digests = {table_digest([(rope, head_dim)]) for rope in ropes for head_dim in (32, 64)}
    assert len(digests) == 6
    assert table_digest((rope, 32) for rope in ropes) not in digests


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "dynamic"])
def test_a_part_of_a_head_is_turned_like_a_smaller_head(name: str, tmp_path: Path) -> None:
    rope = make_config(tmp_path, PARAMETERS[name])[1].attention[0].rope
    part = cos_sin_table(replace(rope, partial_rotary_factor=0.334), 192, LENGTH)
    assert part.shape == (LENGTH, 64)
    assert torch.equal(part, cos_sin_table(rope, 64, LENGTH))
