"""The tokens of a checkpoint, as llguidance needs them to hold answers to grammars."""

from __future__ import annotations

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
    """Return the tokens of a checkpoint; `None` if they cannot be read, so that no answer can follow a grammar.

    Three kinds of tokens never spell the text of a grammar, because other tokens can: special tokens, tokens that are
    too long for llguidance, and tokens that the model lacks, such as the image token in a text-only Gemma 3.
    """
    file = directory / "tokenizer.json"
    if not eos_token_ids or not file.is_file():
        return None
    try:
        content = msgspec.json.decode(file.read_bytes())
        tokens = msgspec.convert(content, type=_TokenizerFile).below(vocab_size)
        long = {text for text in tokens.ids() if len(text.encode()) > _LONGEST_BYTES}
        tokenizer = LLTokenizer(_for_grammars(content, tokens, long), n_vocab=vocab_size, eos_token=eos_token_ids[0])
    except (ValueError, msgspec.DecodeError) as error:
        logger.warning("%s: no answer of this model can follow a grammar: %s", file, error)
        return None
    if long:
        logger.warning(
            "%s: answers that follow a grammar never have its %d tokens of more than %d bytes",
            file,
            len(long),
            _LONGEST_BYTES,
        )
    return tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False

    @property
    def has_tag_form(self) -> bool:
        """Whether llguidance takes the token for a special one by its form alone, and still spells text with it."""
        return self.content.startswith("<") and self.content.endswith(">")

    @property
    def is_plain(self) -> bool:
        """Whether every tokenizer writes the text in its vocabulary as it is."""
        return self.content.isascii() and self.content.isprintable() and " " not in self.content


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

    def ids(self) -> dict[str, int]:
        return self.model.ids() | {token.content: token.id for token in self.added_tokens}

    def below(self, vocab_size: int) -> _TokenizerFile:
        """Return the tokens that a model with a vocabulary of this size has."""
        vocab = {text: token_id for text, token_id in self.model.ids().items() if token_id < vocab_size}
        return _TokenizerFile(_Model(vocab), [token for token in self.added_tokens if token.id < vocab_size])


def _for_grammars(tokenizer: dict[str, Any], tokens: _TokenizerFile, long: set[str]) -> str:
    """Return a `tokenizer.json` with which llguidance spells texts as the model does.

    Special and `long` tokens get short names, which no text has. Tags such as `<tool_call>` that are not special become
    ordinary tokens. Changes `tokenizer`, and keeps only its `tokens`.
    """
    added_tokens, ids = tokens.added_tokens, tokens.ids()
    ordinary = {t.content for t in added_tokens if t.has_tag_form and t.is_plain and not t.special} - long
    nameless = {t.content for t in added_tokens if t.has_tag_form or t.special} - ordinary | long
    names = {text: f"<|token {ids[text]}|>" for text in nameless}
    kept = {token.id for token in added_tokens if token.content not in ordinary}
    added = {token["id"]: token for token in tokenizer.get("added_tokens", []) if token["id"] in kept}
    added |= {ids[text]: _special_token(ids[text], name) for text, name in names.items()}
    model = tokenizer["model"]
    # The vocabulary gets every added token, too. Otherwise the tokens after one that is no longer added would shift.
    model["vocab"] = _whole_vocab(model["vocab"], {names.get(text, text): token_id for text, token_id in ids.items()})
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        spelled = ids.keys() - long
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) in spelled]
    tokenizer["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    return msgspec.json.encode(tokenizer).decode()


def _special_token(token_id: int, name: str) -> dict[str, Any]:
    habits = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, "special": True, **habits}


def _whole_vocab(vocab: dict[str, int] | list[list[Any]], ids: Mapping[str, int]) -> object:
    """Return the vocabulary of a tokenizer with all the tokens of `ids`, in the form of `vocab`."""
    if isinstance(vocab, dict):
        return ids
    texts = {token_id: text for text, token_id in ids.items()}
    scores = [score for _, score in vocab]
    return [
        [texts.get(token_id, f"<|token {token_id}|>"), scores[token_id] if token_id < len(scores) else 0.0]
        for token_id in range(max(texts) + 1)
    ]


def _merged(merge: str | list[str]) -> str:
    """Return the token that a merge makes; older files write its two parts with a space between them."""
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)
