"""Conversations of one turn or more to ask, under the names that `vllm bench serve` gives its datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

Prompt = list[int] | str


class DatasetError(ValueError):
    """A dataset that cannot be used; the message names the flag and the fix."""


@dataclass(frozen=True)
class Turn:
    """The text that one turn adds to its conversation, and the tokens to ask for (None: the server's default)."""

    prompt: Prompt
    output_len: int | None


Conversation = tuple[Turn, ...]


@dataclass(frozen=True)
class Tokens:
    """A source of random token ids.

    Byte and special tokens have the lowest ids in every tokenizer that we know. The ids above them are words, so a
    random prompt decodes to text, which chat endpoints need.
    """

    vocab_size: int
    special_ids: frozenset[int] = frozenset()

    def random(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` ids."""
        low = min(300, self.vocab_size // 2)
        ids = rng.integers(low, self.vocab_size, count)
        clash = np.isin(ids, list(self.special_ids))
        return [int(low if bad else token) for token, bad in zip(ids, clash, strict=True)]


def random_prompts(
    tokens: Tokens,
    rng: np.random.Generator,
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    prefix_len: int,
    range_ratio: float,
) -> list[Conversation]:
    """Draw prompts of random ids: `prefix_len` that all share, then about `input_len` of their own.

    Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)].
    """
    if not 0 <= range_ratio < 1:
        raise DatasetError(f"--random-range-ratio: {range_ratio} is not in [0, 1)")

    def lengths(middle: int, least: int) -> Any:
        low, high = int(np.floor(middle * (1 - range_ratio))), int(np.ceil(middle * (1 + range_ratio)))
        return np.maximum(rng.integers(low, high + 1, num_prompts), least)

    prefix = tokens.random(rng, prefix_len)
    own = lengths(input_len, 0 if prefix_len else 1)
    return [
        (Turn(prefix + tokens.random(rng, int(num_own)), int(num_out)),)
        for num_own, num_out in zip(own, lengths(output_len, 1), strict=True)
    ]


def prefix_repetition(
    tokens: Tokens,
    rng: np.random.Generator,
    num_prompts: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
) -> list[Conversation]:
    """Draw a few prefixes, each with many suffixes, shuffled."""
    if not 1 <= num_prefixes <= num_prompts:
        raise DatasetError(
            f"--prefix-repetition-num-prefixes: {num_prefixes} is not from 1 to --num-prompts ({num_prompts})"
        )
    prefixes = [tokens.random(rng, prefix_len) for _ in range(num_prefixes)]
    prompts: list[Conversation] = [
        (Turn(prefixes[i % num_prefixes] + tokens.random(rng, suffix_len), output_len),) for i in range(num_prompts)
    ]
    return [prompts[i] for i in rng.permutation(num_prompts)]


def multi_turn(
    tokens: Tokens,
    rng: np.random.Generator,
    num_conversations: int,
    *,
    num_turns: int,
    first_len: int,
    turn_len: int,
    output_len: int,
) -> list[Conversation]:
    """Draw conversations that grow: `first_len` tokens, then `turn_len` more after each answer."""
    if num_turns < 1:
        raise DatasetError(f"--multi-turn-num-turns: {num_turns} is not at least 1")
    return [
        tuple(Turn(tokens.random(rng, turn_len if i else first_len), output_len) for i in range(num_turns))
        for _ in range(num_conversations)
    ]


def sharegpt(
    path: Path, tokenizer: Any, rng: np.random.Generator, num_prompts: int, *, output_len: int | None
) -> list[Conversation]:
    """Return, shuffled, the first question of each conversation in a ShareGPT file, and the length of its answer."""
    entries = [turns for entry in _read_json(path) if len(turns := entry.conversations or []) >= 2]
    chosen: list[Conversation] = []
    for i in rng.permutation(len(entries)):
        question, answer = (turn.value for turn in entries[i][:2])
        prompt_len, answer_len = (len(tokenizer.encode(text)) for text in (question, answer))
        if 4 <= prompt_len <= 1024 and answer_len >= 4 and prompt_len + answer_len <= 2048:
            chosen.append((Turn(question, output_len or answer_len),))
        if len(chosen) == num_prompts:
            break
    return _enough(chosen, num_prompts, path)


def custom(
    path: Path,
    tokenizer: Any | None,
    rng: np.random.Generator,
    num_prompts: int,
    *,
    output_len: int | None,
    chat_template: bool,
    shuffle: bool,
) -> list[Conversation]:
    """Return the `prompt` of each line of a JSONL file, with its `output_tokens` if `output_len` is not given."""
    lines = list(_read_jsonl(path))
    order = rng.permutation(len(lines)) if shuffle else range(len(lines))
    chosen: list[Conversation] = []
    for i in order:
        prompt = lines[i].prompt
        if chat_template and tokenizer is not None and tokenizer.chat_template:
            asked = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        chosen.append((Turn(prompt, output_len or lines[i].output_tokens),))
        if len(chosen) == num_prompts:
            break
    return _enough(chosen, num_prompts, path)


def _enough(chosen: Sequence[Conversation], num_prompts: int, path: Path) -> list[Conversation]:
    if not chosen:
        raise DatasetError(f"--dataset-path: {path} holds no usable prompt")
    return [chosen[i % len(chosen)] for i in range(num_prompts)]


class _Said(msgspec.Struct):
    """A turn of ShareGPT's."""

    value: str


class _Conversation(msgspec.Struct):
    """An entry of ShareGPT's."""

    conversations: list[_Said] | None = None


class _Prompt(msgspec.Struct):
    """A line of a custom dataset."""

    prompt: str
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def _read_json(path: Path) -> list[_Conversation]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (OSError, ValueError) as error:
        raise DatasetError(f"--dataset-path: cannot read {path}: {error}") from None


def _read_jsonl(path: Path) -> Iterator[_Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DatasetError(f"--dataset-path: cannot read {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` would also end one at a U+2028 within a text
        if line.strip():
            try:
                yield msgspec.json.decode(line, type=_Prompt)
            except msgspec.DecodeError as error:
                raise DatasetError(f"--dataset-path: {path}:{number}: {error}") from None
