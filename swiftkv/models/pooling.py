"""Reads how a checkpoint makes embeddings and scores, from the files of sentence-transformers.

Anything in these files that is not supported is refused by name. A checkpoint without them is taken for one like
Qwen3-Embedding or Qwen3-Reranker: the last token counts. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from swiftkv.errors import ConfigError
from swiftkv.models.hf_config import read_json

_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_LAST_TOKEN = "lasttoken"
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": _LAST_TOKEN,
}
"""The older keys of a pooling module, and the values of `pooling_mode` that replace them."""
_SCORE_MODULES = ("LogitScore", "CausalScoreHead")

Dimensions = Literal["any"] | tuple[int, ...]
"""The lengths to which embeddings may be cut; if empty, they may not."""


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """The steps that make an embedding of the hidden state of a text's last token.

    Attributes:
        width: The size of an embedding that is not cut.
        normalize: Whether it is scaled to length 1.
        prompts: Texts that may be put before the text, by name.
        default_prompt: The name of the prompt to use, unless a request names another.
        dimensions: The lengths for which the model was trained (Matryoshka).
    """

    width: int
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: Dimensions = ()


@dataclass(frozen=True, slots=True)
class ScoreRecipe:
    """The tokens whose logits after a text make a score, if the checkpoint names them.

    Attributes:
        token_ids: The tokens that mean yes and no.
        instruction: The criterion in the prompt by which the model judges.
    """

    token_ids: tuple[int, int] | None = None
    instruction: str | None = None


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """The class without the package, which changes with the version of sentence-transformers."""
        return self.type.rpartition(".")[2]


class _Settings(msgspec.Struct):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None

    @property
    def default_prompt(self) -> str | None:
        return None if self.default_prompt_name is None else self.prompts.get(self.default_prompt_name)


class _Score(msgspec.Struct):
    true_token_id: int
    false_token_id: int | None = None


class _ModelKeys(msgspec.Struct):
    """The keys of `config.json` that tell what a model can be used for."""

    hidden_size: int
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None
    is_causal: bool = True
    use_bidirectional_attention: bool = False


def read_embedding_recipe(directory: Path, dimensions: Dimensions | None = None) -> EmbeddingRecipe:
    """Return how a checkpoint makes embeddings; `dimensions` replaces the lengths in its files.

    Raises `ConfigError` that names the file and its unsupported setting, `CheckpointError` for a file that cannot be
    read.
    """
    keys = _model_keys(directory)
    modules = _modules(directory)
    settings = _settings(directory)
    if dimensions is None:
        dimensions = "any" if keys.is_matryoshka else ()
        if keys.matryoshka_dimensions:
            dimensions = tuple(keys.matryoshka_dimensions)
    if dimensions != "any" and max(dimensions, default=0) > keys.hidden_size:
        raise ConfigError(f"matryoshka_dimensions: embeddings have {keys.hidden_size} numbers, not {max(dimensions)}")
    for module in modules:
        if module.name == "Pooling":
            _check_pooling(directory / module.path / "config.json")
        elif module.name not in ("Transformer", "Normalize"):
            raise _unsupported(directory, module, "embeds with Transformer, Pooling and Normalize only")
    return EmbeddingRecipe(
        width=keys.hidden_size,
        normalize=not modules or any(module.name == "Normalize" for module in modules),
        prompts=settings.prompts,
        default_prompt=settings.default_prompt_name,
        dimensions=dimensions,
    )


def read_score_recipe(directory: Path) -> ScoreRecipe:
    """Return how a checkpoint makes scores. Raises as `read_embedding_recipe` does."""
    _model_keys(directory)
    token_ids = None
    for module in _modules(directory):
        if module.name in _SCORE_MODULES:
            token_ids = _score_tokens(directory / module.path / "config.json")
        elif module.name != "Transformer":
            raise _unsupported(directory, module, "scores by the logits of two tokens only")
    return ScoreRecipe(token_ids, _settings(directory).default_prompt or None)


def _model_keys(directory: Path) -> _ModelKeys:
    file = directory / "config.json"
    keys = read_json(file, _ModelKeys)
    if not keys.is_causal or keys.use_bidirectional_attention:
        key = "use_bidirectional_attention" if keys.is_causal else "is_causal"
        raise ConfigError(f"{file}: {key}: attention that looks ahead is not supported")
    return keys


def _modules(directory: Path) -> Sequence[_Module]:
    """Return the modules that the checkpoint lists, none if it has no list."""
    file = directory / _MODULES
    modules = read_json(file, list[_Module]) if file.is_file() else []
    for module in modules:
        if module.name == "Transformer" and module.path:
            raise ConfigError(f"{file}: the transformer lies in {module.path!r}; name that directory, or move it up")
        if not (directory / module.path).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(f"{file}: {module.path!r} leads out of the directory")
    return modules


def _settings(directory: Path) -> _Settings:
    file = directory / _SETTINGS
    if not file.is_file():
        return _Settings()
    settings = read_json(file, _Settings)
    if settings.default_prompt_name is not None and settings.default_prompt is None:
        raise ConfigError(f"{file}: default_prompt_name: there is no prompt {settings.default_prompt_name!r}")
    return settings


def _check_pooling(file: Path) -> None:
    values = read_json(file, dict[str, Any])
    modes = values.get("pooling_mode") or [mode for key, mode in _POOLING_FLAGS.items() if values.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if modes != [_LAST_TOKEN]:
        raise ConfigError(f"{file}: pooling by {', '.join(map(str, modes))} is not supported, only {_LAST_TOKEN} is")


def _score_tokens(file: Path) -> tuple[int, int]:
    score = read_json(file, _Score)
    if score.false_token_id is None:
        raise ConfigError(f"{file}: false_token_id: a score of one logit is not supported; name the token for no")
    return score.true_token_id, score.false_token_id


def _unsupported(directory: Path, module: _Module, what: str) -> ConfigError:
    return ConfigError(f"{directory / _MODULES}: {module.type} is not supported: swiftkv {what}")
