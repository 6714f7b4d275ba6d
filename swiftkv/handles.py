"""The models of a node as its gateway knows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv.config import Config
from swiftkv.errors import CheckpointError
from swiftkv.fleet import Member
from swiftkv.model_config import ModelConfig
from swiftkv.server.grammars import GrammarChecker
from swiftkv.server.templates import TemplateRenderer

if TYPE_CHECKING:
    from swiftkv.models.pooling import EmbeddingRecipe
    from swiftkv.server.models import ModelHandle
    from swiftkv.server.pooling.template import ScoreTemplate
    from swiftkv.server.tokenizer import Tokenizer


def load_handles(
    config: Config, members: Sequence[Member], grammars: GrammarChecker, templates: TemplateRenderer
) -> list[ModelHandle]:
    """Return a handle for each model, with its tokenizer. Takes seconds, the first time for imports alone."""
    from swiftkv.server.models import ClientPolicy, ModelHandle
    from swiftkv.server.reasoning_parsers import choose_reasoning
    from swiftkv.server.sampling_defaults import sampling_defaults
    from swiftkv.server.targets import Targets
    from swiftkv.server.tokenizer import Tokenizer
    from swiftkv.server.tool_parsers import choose_parser

    policy = ClientPolicy(config.node.show_cached_tokens, config.node.allow_priority)
    handles = []
    for member in members:
        model, plan = member.config, member.plan
        directory = plan.checkpoint.directory
        with _mistakes_named(plan.name):
            tokenizer = Tokenizer.from_pretrained(directory, split_special_tokens=model.split_special_tokens)
            handles.append(
                ModelHandle(
                    name=plan.name,
                    root=plan.checkpoint.public_name,
                    model_dir=directory,
                    further_names=model.names[1:],
                    max_model_len=plan.max_model_len,
                    vocab_size=plan.vocab_size,
                    max_num_seqs=model.max_num_seqs,
                    tokenizer=tokenizer,
                    client=member.client,
                    sleeper=member.sleeper,
                    storage=member.storage,
                    policy=policy,
                    grammars=grammars,
                    auto_wake=model.auto_wake,
                    targets=Targets(model.target_ttft, model.target_tpot),
                    tool_parser=choose_parser(model.tool_parser, tokenizer.chat_template),
                    reasoning=choose_reasoning(model.reasoning_parser, tokenizer),
                    templates=templates if model.trust_request_chat_template else None,
                    defaults=sampling_defaults(model.generation_config, directory, config.directory),
                    pooling=_pooling(model, directory, tokenizer),
                )
            )
    return handles


def _pooling(model: ModelConfig, directory: Path, tokenizer: Tokenizer) -> EmbeddingRecipe | ScoreTemplate | None:
    from swiftkv.models.pooling import read_embedding_recipe, read_score_recipe
    from swiftkv.server.pooling.template import ScoreTemplate

    match model.task:
        case "generate":
            return None
        case "embed":
            return read_embedding_recipe(directory, model.matryoshka_dimensions)
        case "score":
            return ScoreTemplate(tokenizer, read_score_recipe(directory))


@contextmanager
def _mistakes_named(model: str) -> Iterator[None]:
    """Add the model's name to `CheckpointError`s about its files and options."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"model '{model}': {error}") from error
