"""The tokens of a checkpoint, as llguidance needs them to hold answers to grammars."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

_LONGEST_BYTES = 1023
"""llguidance panics at a token of more than 1,024 bytes, one of which it adds itself."""


def open_tokenizer(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer | None:
    """Return the tokens of a checkpoint, or `None` if they cannot be had: then no answer can be held to a grammar.

    A token that is too long for llguidance is one that no grammar allows: other tokens can spell the same text.
    """
    file = directory / "tokenizer.json"
    if not eos_token_ids or not file.is_file():
        return None
    try:
        content = file.read_bytes()
        long = _long_tokens(content)
        source = _without_text_of(long, content) if long else str(file)
        tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=eos_token_ids[0])
    except (ValueError, msgspec.DecodeError) as error:
        logger.warning("%s: no answer can be held to a grammar: %s", file, error)
        return None
    if long:
        logger.warning("%s: no grammar allows its %d tokens of more than %d bytes", file, len(long), _LONGEST_BYTES)
    return tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]

    def ids(self) -> dict[str, int]:
        """Return the tokens by their spelling; a list of tokens and scores has them in the order of their ids."""
        if isinstance(self.vocab, dict):
            return self.vocab
        return {text: token_id for token_id, (text, _) in enumerate(self.vocab)}


class _TokenizerFile(msgspec.Struct):
    """The part of a `tokenizer.json` that lists tokens."""

    model: _Model
    added_tokens: list[_AddedToken] = []


def _long_tokens(content: bytes) -> dict[str, int]:
    """Return the tokens of a `tokenizer.json` that are too long, by their spelling."""
    file = msgspec.json.decode(content, type=_TokenizerFile)
    ids = file.model.ids() | {token.content: token.id for token in file.added_tokens}
    return {text: token_id for text, token_id in ids.items() if len(text.encode()) > _LONGEST_BYTES}


def _without_text_of(long: Mapping[str, int], content: bytes) -> str:
    """Return a `tokenizer.json` in which the `long` tokens are special ones with short names, which are no text."""
    tokenizer: dict[str, Any] = json.loads(content)
    names = {text: f"<|token {token_id}|>" for text, token_id in long.items()}
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    added |= {token_id: _special_token(token_id, names[text]) for text, token_id in long.items()}
    model = tokenizer["model"]
    model["vocab"] = _renamed(model["vocab"], names)
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in long]
    return json.dumps(tokenizer | {"added_tokens": [added[token_id] for token_id in sorted(added)]})


def _special_token(token_id: int, name: str) -> dict[str, Any]:
    habits = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, "special": True, **habits}


def _renamed(vocab: dict[str, int] | list[list[Any]], names: Mapping[str, str]) -> object:
    if isinstance(vocab, dict):
        return {names.get(text, text): token_id for text, token_id in vocab.items()}
    return [[names.get(text, text), score] for text, score in vocab]


def _merged(merge: str | list[str]) -> str:
    """Return the token that a merge makes; older files write its two parts with a space between them."""
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)
