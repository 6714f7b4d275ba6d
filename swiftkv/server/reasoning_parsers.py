"""Parsers of reasoning, by the name that a model's `reasoning_parser` gives, or by its chat template."""

from __future__ import annotations

from swiftkv.errors import CheckpointError
from swiftkv.server.harmony import CHANNEL, HarmonyParser, HarmonyTokens
from swiftkv.server.reasoning import TAGS, ReasoningParser, TagParser
from swiftkv.server.tokenizer import Tokenizer

_BY_TEMPLATE = ("qwen3", "mistral")


def choose_reasoning(name: str | None, tokenizer: Tokenizer) -> ReasoningParser | None:
    """Return the parser of that name; without a name, the parser that the chat template implies, if any.

    Raises:
        CheckpointError: the tokenizer lacks the tokens that it needs.
    """
    if name == "none":
        return None
    found = _by_template(tokenizer.chat_template) if name is None else name
    if found is None:
        return None
    parser: ReasoningParser | None = _harmony(tokenizer) if found == "gpt_oss" else _tags(found, tokenizer)
    if parser is None and name is not None:
        wanted = "the special tokens of Harmony" if name == "gpt_oss" else f"{TAGS[name].begin} and {TAGS[name].end}"
        raise CheckpointError(
            f"reasoning_parser: {name} needs {wanted} as single tokens, and this tokenizer lacks at least one of them"
        )
    return parser


def _by_template(template: str) -> str | None:
    if CHANNEL in template:
        return "gpt_oss"
    # A template that cuts reasoning out of earlier turns may know only where it ends: DeepSeek-R1-0528's does.
    return next((name for name in _BY_TEMPLATE if TAGS[name].end in template), None)


def _harmony(tokenizer: Tokenizer) -> HarmonyParser | None:
    tokens = HarmonyTokens.of(tokenizer)
    return None if tokens is None else HarmonyParser(tokenizer, tokens)


def _tags(name: str, tokenizer: Tokenizer) -> TagParser | None:
    tags = TAGS[name]
    begin_id, end_id = tokenizer.token_id(tags.begin), tokenizer.token_id(tags.end)
    if begin_id is None or end_id is None:
        return None
    return TagParser(tokenizer, begin_id, end_id, always=tags.always)
