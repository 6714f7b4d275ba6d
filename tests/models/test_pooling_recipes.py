"""The files of sentence-transformers: what they say of a checkpoint is done, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.models.pooling import EmbeddingRecipe, ScoreRecipe, read_embedding_recipe, read_score_recipe
from tests.support.pooling import write_module, write_modules, write_pooling, write_settings

NEWER = "sentence_transformers.base.modules.transformer"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


def write_config(directory: Path, **keys: Any) -> None:
    (directory / "config.json").write_text(json.dumps({"hidden_size": 64, **keys}))


def test_without_files_the_last_token_counts_and_has_length_one(checkpoint: Path) -> None:
    assert read_embedding_recipe(checkpoint) == EmbeddingRecipe(width=64, normalize=True, prompts={}, dimensions=())
    assert read_score_recipe(checkpoint) == ScoreRecipe()


def test_the_layout_of_qwen3_embedding(checkpoint: Path) -> None:
    write_modules(checkpoint, "Transformer", "Pooling", "Normalize")
    write_pooling(checkpoint, "lasttoken")
    write_settings(checkpoint, {"query": "Query:", "document": ""}, default="query")
    recipe = read_embedding_recipe(checkpoint)
    assert recipe == EmbeddingRecipe(64, True, {"query": "Query:", "document": ""}, "query", ())


def test_without_a_normalize_module_lengths_are_kept(checkpoint: Path) -> None:
    write_modules(checkpoint, "Transformer", "Pooling")
    write_module(checkpoint, "1_Pooling", {"embedding_dimension": 64, "pooling_mode": "lasttoken"})
    assert not read_embedding_recipe(checkpoint).normalize


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"pooling_mode_mean_tokens": True}, "pooling by mean is not supported"),
        ({"pooling_mode": "cls"}, "pooling by cls is not supported"),
        ({"pooling_mode": ["lasttoken", "mean"]}, "pooling by lasttoken, mean is not supported"),
        ({}, "pooling by mean is not supported"),
    ],
)
def test_other_poolings_are_refused(checkpoint: Path, config: dict[str, Any], why: str) -> None:
    write_modules(checkpoint, "Transformer", "Pooling")
    write_module(checkpoint, "1_Pooling", config)
    with pytest.raises(ConfigError, match=rf"1_Pooling/config\.json: {why}"):
        read_embedding_recipe(checkpoint)


def test_modules_that_are_not_known_are_refused(checkpoint: Path) -> None:
    write_modules(checkpoint, "Transformer", "Pooling", "Dense")
    write_pooling(checkpoint, "lasttoken")
    with pytest.raises(ConfigError, match=r"sentence_transformers\.models\.Dense is not supported"):
        read_embedding_recipe(checkpoint)


def test_a_transformer_in_another_directory_is_refused(checkpoint: Path) -> None:
    module = {"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
    (checkpoint / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ConfigError, match="0_Transformer"):
        read_embedding_recipe(checkpoint)


def test_no_module_leads_out_of_the_directory(checkpoint: Path) -> None:
    module = {"path": "../../etc", "type": "sentence_transformers.models.Pooling"}
    (checkpoint / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ConfigError, match="leads out"):
        read_embedding_recipe(checkpoint)


def test_a_default_prompt_that_is_not_there(checkpoint: Path) -> None:
    write_settings(checkpoint, {"query": "Query:"}, default="quest")
    with pytest.raises(ConfigError, match="default_prompt_name: there is no prompt 'quest'"):
        read_embedding_recipe(checkpoint)


@pytest.mark.parametrize("keys", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_that_looks_ahead_is_refused(checkpoint: Path, keys: dict[str, Any]) -> None:
    write_config(checkpoint, **keys)
    with pytest.raises(ConfigError, match=next(iter(keys))):
        read_embedding_recipe(checkpoint)


def test_what_embeddings_may_be_cut_to(checkpoint: Path) -> None:
    write_config(checkpoint, is_matryoshka=True)
    assert read_embedding_recipe(checkpoint).dimensions == "any"
    write_config(checkpoint, is_matryoshka=True, matryoshka_dimensions=[64, 32])
    assert read_embedding_recipe(checkpoint).dimensions == (64, 32)
    assert read_embedding_recipe(checkpoint, (16,)).dimensions == (16,)
    assert read_embedding_recipe(checkpoint, "any").dimensions == "any"
    with pytest.raises(ConfigError, match="embeddings have 64 numbers, not 128"):
        read_embedding_recipe(checkpoint, (32, 128))


def test_the_layout_of_qwen3_reranker(checkpoint: Path) -> None:
    write_modules(checkpoint, "Transformer", "LogitScore", package=NEWER)
    write_module(checkpoint, "1_LogitScore", {"true_token_id": 9, "false_token_id": 4})
    write_settings(checkpoint, {"web": "find it"}, default="web")
    assert read_score_recipe(checkpoint) == ScoreRecipe((9, 4), "find it")


def test_scores_of_one_logit_and_classifiers_are_refused(checkpoint: Path) -> None:
    write_modules(checkpoint, "Transformer", "LogitScore", package=NEWER)
    write_module(checkpoint, "1_LogitScore", {"true_token_id": 9})
    with pytest.raises(ConfigError, match="false_token_id"):
        read_score_recipe(checkpoint)
    write_modules(checkpoint, "Transformer", "Dense")
    with pytest.raises(ConfigError, match="Dense is not supported"):
        read_score_recipe(checkpoint)


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path) -> None:
    (checkpoint / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_embedding_recipe(checkpoint)
