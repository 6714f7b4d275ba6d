"""Made checkpoints are what transformers, a tokenizer and a chat client expect of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swiftkv.checkpoint import Architecture, make
from swiftkv.errors import CheckpointError
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config

CLASS_OF = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


@pytest.fixture(scope="module", params=get_args(Architecture))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return request.param, make(request.param, "tiny", tmp_path_factory.mktemp("checkpoint") / "new" / request.param)


def test_transformers_runs_it(made: tuple[Architecture, Path]) -> None:
    arch, directory = made
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert type(model).__name__ == CLASS_OF[arch]
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor([tokenizer.encode("import os\n")])
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], model.config.vocab_size)
    assert torch.isfinite(logits).all()
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )


def test_tied_weights_are_stored_once(made: tuple[Architecture, Path]) -> None:
    _, directory = made
    tied = AutoConfig.from_pretrained(directory).tie_word_embeddings
    with safe_open(directory / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert ("lm_head.weight" in names) == (not tied)


def test_tokenizer_keeps_every_text(made: tuple[Architecture, Path]) -> None:
    _, directory = made
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("def f(x):\n    return x  # naïve — 日本語 🙂\n", "  two\tspaces \n\n", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == AutoConfig.from_pretrained(directory).vocab_size


def test_chat_template_is_a_prefix_of_the_next_turn(made: tuple[Architecture, Path]) -> None:
    """A turn's prompt and answer begin the next turn's prompt, which is how the prefix cache gets its hits."""
    _, directory = made
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = [{"role": "user", "content": "What is a list?"}]
    turn_1 = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    answered = [*asked, {"role": "assistant", "content": "A sequence."}, {"role": "user", "content": "And a set?"}]
    turn_2 = tokenizer.apply_chat_template(answered, add_generation_prompt=True, tokenize=False)
    assert turn_2.startswith(turn_1 + "A sequence.<|im_end|>")
    ids_1, ids_2 = tokenizer.encode(turn_1), tokenizer.encode(turn_2)
    assert ids_2[: len(ids_1)] == ids_1
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids_1


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        (make("qwen3", "tiny", tmp_path / str(i), seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((1, 1, 2))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_who_may_read_the_configuration_may_read_the_weights(made: tuple[Architecture, Path]) -> None:
    """A service often runs as another user than the one who made its model."""
    _, directory = made
    assert len({file.stat().st_mode for file in directory.iterdir()}) == 1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not empty"):
        make("qwen3", "tiny", tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"arch.*gpt2.*qwen3, qwen2"):
        make("gpt2", "tiny", tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"size.*huge.*tiny, small"):
        make("qwen3", "huge", tmp_path / "a")  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        make("qwen3", "tiny", tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be made: File exists"):
        make("qwen3", "tiny", tmp_path / "notes.txt")
    assert not (tmp_path / "a").exists()


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """A name that is not UTF-8 is refused by the libraries that write, as a full disk is."""
    with pytest.raises(CheckpointError, match=r"^directory: .* cannot be written to: .*; name another$"):
        make("qwen3", "tiny", tmp_path / "\udcff")


def test_the_server_knows_every_architecture(made: tuple[Architecture, Path]) -> None:
    arch, directory = made
    config = read_config(directory)
    assert config.architecture == CLASS_OF[arch]
    files = MappedWeights(directory)
    assert sum(group.num_layers for group in load_decoder(config, files, torch.bfloat16, "cpu", 64).kv_groups) == 3
