"""One sequence of a request on its way to the client: tokens become text, stop strings end it, logprobs get names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.client import Generation, SequenceOutput
from swiftkv.server.detokenizer import Detokenizer, StopMatcher
from swiftkv.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from swiftkv.server.tokenizer import Tokenizer

# JSON has no infinity; this is what vLLM writes for it.
_LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class Delta:
    """What one choice has to say since the last time."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class StopRules:
    """What ends a choice besides ``max_tokens`` and the model's own end-of-sequence tokens."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True


class Choice:
    """Decodes one sequence. Everything it returned so far, joined, is the choice's text."""

    def __init__(self, index: int, prompt_ids: Sequence[int], tokenizer: Tokenizer, stop: StopRules) -> None:
        self.index = index
        self.num_tokens = 0
        self._rules = stop
        self._detokenizer = Detokenizer(tokenizer.backend, prompt_ids, stop.skip_special_tokens)
        self._matcher = StopMatcher(stop.strings)

    def push(self, output: SequenceOutput) -> Delta:
        """Take what the engine sent. The delta's ``finish_reason`` may come before the engine's: a stop string."""
        delta = Delta(self.index, prompt_logprobs=output.prompt_logprobs, finish_reason=output.finish_reason)
        tokens, stop_token = output.token_ids, None
        if output.finish_reason == "stop":
            stop_token = tokens[-1]
            delta.stop_reason = stop_token if stop_token in self._rules.token_ids else None
        if self._rules.strings:
            self._push_one_by_one(delta, output, stop_token)
            return delta
        self.num_tokens += len(tokens)
        delta.text = self._detokenizer.push(tokens if stop_token is None else tokens[:-1])
        delta.token_ids, delta.logprobs = tokens, output.logprobs
        return delta

    def _push_one_by_one(self, delta: Delta, output: SequenceOutput, stop_token: int | None) -> None:
        """With stop strings, so that no token after the one that completes a stop string is counted."""
        for position, token in enumerate(output.token_ids):
            self.num_tokens += 1
            delta.token_ids.append(token)
            delta.logprobs += output.logprobs[position : position + 1]
            if token == stop_token and position == len(output.token_ids) - 1:
                break
            watch = self.num_tokens > self._rules.min_tokens
            delta.text += self._matcher.push(self._detokenizer.push([token]), watch=watch)
            if self._matcher.matched is not None:
                delta.finish_reason, delta.stop_reason = "stop", self._matcher.matched
                return
        if delta.finish_reason:
            delta.text += self._matcher.flush()


async def deltas(generation: Generation, choices: Sequence[Choice]) -> AsyncIterator[list[Delta]]:
    """What the engine sends, as text; sequences that met a stop string are ended."""
    async for outputs in generation:
        batch = [choices[output.index].push(output) for output in outputs]
        for delta, output in zip(batch, outputs, strict=True):
            if delta.finish_reason and not output.finish_reason:
                generation.finish(delta.index, delta.finish_reason)
        yield batch


def usage(num_prompt_tokens: Sequence[int], n: int, generation: Generation, num_completion_tokens: int) -> Usage:
    """Prompts count once, however many choices they have; so does what the first of these found in the cache."""
    prompt_tokens = sum(num_prompt_tokens)
    cached = sum(
        min(cached_tokens or 0 for cached_tokens in generation.cached_tokens[prompt * n : (prompt + 1) * n])
        for prompt in range(len(num_prompt_tokens))
    )
    return Usage(
        prompt_tokens, num_completion_tokens, prompt_tokens + num_completion_tokens, PromptTokensDetails(cached)
    )


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text_offset: int
) -> CompletionLogprobs:
    """OpenAI's completion shape. ``None`` stands for the first token of an echoed prompt."""
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = tokenizer.token_text(token_id)
        result.tokens.append(text)
        result.text_offset.append(text_offset)
        text_offset += len(text)
        result.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        result.top_logprobs.append(None if entry is None else {**_top(tokenizer, entry), text: _finite(entry.logprob)})
    return result


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """OpenAI's chat shape."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                tokenizer.token_text(token_id),
                _finite(entry.logprob),
                tokenizer.token_bytes(token_id),
                [
                    TopLogprob(tokenizer.token_text(top_id), _finite(logprob), tokenizer.token_bytes(top_id))
                    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """vLLM's shape: one entry per prompt token, the first of which is ``None``."""
    result: PromptLogprobs = [None]
    for token_id, entry in zip(prompt_ids[1:], logprobs, strict=True):
        ranked = zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
        by_id = {
            str(top_id): PromptLogprob(_finite(logprob), rank, tokenizer.token_text(top_id))
            for top_id, logprob, rank in ranked
        }
        by_id[str(token_id)] = PromptLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(token_id))
        result.append(by_id)
    return result


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    return {
        tokenizer.token_text(top_id): _finite(logprob)
        for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
