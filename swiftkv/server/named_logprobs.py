"""Logprobs in the shapes of the protocols, in which tokens have names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec
from msgspec import Struct

from swiftkv.engine.messages import TokenLogprobs, unpack_prompt_logprobs
from swiftkv.server.detokenizer import Detokenizer
from swiftkv.server.tokenizer import Tokenizer

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
# JSON has no infinity; vLLM writes this number for it.
_LOWEST_LOGPROB = -9999.0


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, by token id; the first token has none."""


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


def _encoded(value: T) -> T:
    """Return `value` as the JSON that it will be in an answer.

    The encoder holds the GIL: a long list is encoded entry by entry, so that other threads can run in between.
    """
    return cast("T", msgspec.Raw(_encoder.encode(value)))


class TokenNames:
    """The tokens of one model as logprobs name them: by their texts, or `token_id:7` where that is asked for."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        self.tokenizer = tokenizer
        self._by_id = by_id

    def of(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self._by_id else self.tokenizer.token_text(token_id)


def completion_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text_offsets: list[int]
) -> CompletionLogprobs:
    """Return logprobs in the shape of OpenAI's completions. `None` is for the first token of an echoed prompt."""
    result = CompletionLogprobs([], [], [], text_offsets)
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        name = names.of(token_id)
        result.tokens.append(name)
        result.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        top = None if entry is None else {**_top(names, entry), name: _finite(entry.logprob)}
        result.top_logprobs.append(_encoded(top))
    return result


def prompt_offsets(tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Return where in `text` each token of a prompt begins. Special tokens that were added to it take no characters."""
    detokenizer = Detokenizer(tokenizer.backend, (), skip_special_tokens=False)
    offsets: list[int] = []
    for token_id in prompt_ids:
        is_added = tokenizer.is_special(token_id) and not text.startswith(
            tokenizer.token_text(token_id), detokenizer.num_chars
        )
        if is_added:
            offsets.append(detokenizer.num_chars)
        else:
            detokenizer.push([token_id], offsets)
    return offsets


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return logprobs in the shape of OpenAI's chats."""
    token_bytes = names.tokenizer.token_bytes
    return ChatLogprobs(
        [
            _encoded(
                ChatTokenLogprob(
                    names.of(token_id),
                    _finite(entry.logprob),
                    token_bytes(token_id),
                    [
                        TopLogprob(names.of(top_id), _finite(logprob), token_bytes(top_id))
                        for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                    ],
                )
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], packed: list[bytes], num_top: int
) -> PromptLogprobs:
    """Return logprobs in vLLM's shape: one entry per prompt token, the first of which is `None`.

    `packed` may have more than the `num_top` likeliest tokens that are wanted of each.
    """
    result: PromptLogprobs = [None]
    for token_id, whole in zip(prompt_ids[1:], unpack_prompt_logprobs(packed), strict=True):
        entry = whole.with_top(num_top)
        ranked = zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
        by_id = {
            str(top_id): PromptLogprob(_finite(logprob), rank, tokenizer.token_text(top_id))
            for top_id, logprob, rank in ranked
        }
        by_id[str(token_id)] = PromptLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(token_id))
        result.append(_encoded(by_id))
    return _encoded(result)


def _top(names: TokenNames, entry: TokenLogprobs) -> dict[str, float]:
    return {
        names.of(top_id): _finite(logprob) for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
