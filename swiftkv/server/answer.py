"""The answer to one request, whole or as server-sent events, from the text of its choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from msgspec import UNSET, Struct, UnsetType

from swiftkv.engine.messages import TokenLogprobs, unpack_prompt_logprobs
from swiftkv.server.begun import BegunRequest, Prompt
from swiftkv.server.choices import Delta
from swiftkv.server.errors import ApiError
from swiftkv.server.named_logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    FunctionCall,
    ToolCall,
    Usage,
)
from swiftkv.server.sse import END_OF_STREAM, plain_events
from swiftkv.server.tiers import tier_of
from swiftkv.server.usage import RunningUsage

_SMALL_NUMBERS = 512


class Answer(ABC):
    """The answer to one request. Call `chunks` for a stream, or `add` until the end and then `whole`."""

    id_prefix: ClassVar[str]
    end_of_stream: ClassVar[bytes] = END_OF_STREAM

    def __init__(self, request: BegunRequest[CompletionBody | ChatBody]) -> None:
        model, body = request.model, request.body
        self.id = f"{self.id_prefix}{request.request_id}"
        self.created = int(time.time())
        self.model = model
        self.prompts = request.prompts
        self.generation = request.generation
        self.choices = request.choices
        self.n = body.n or 1
        tier = tier_of(body.service_tier, model.policy.max_tier)
        self.service_tier: str | UnsetType = UNSET if body.service_tier is None else tier
        options = body.stream_options
        self.final_usage = bool(options and options.include_usage)
        self.running_usage = self.final_usage and bool(options and options.continuous_usage_stats)
        self._return_token_ids = bool(body.return_token_ids)
        self._token_names = TokenNames(model.tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        self._repeats_prompts = self._return_token_ids or (isinstance(body, CompletionBody) and bool(body.echo))
        self._started: set[int] = set()
        self._totals = [Delta(choice.index) for choice in self.choices]
        self._usage = RunningUsage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            self.n,
            self.generation,
            show_cached=model.policy.shows_cached(body.cache_salt),
            show_tiers=bool(body.return_cached_tokens_details),
            show_reasoning=model.reasoning is not None and isinstance(body, ChatBody),
        )

    def note_first_written(self) -> None:
        """Note that the first token of a stream has been written."""
        if (ended_s := self.generation.first_step_ended_s) is not None:
            self.model.client.metrics.observe_first_written(time.perf_counter() - ended_s)

    @abstractmethod
    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        """Return the stream's events for `batch`."""

    @abstractmethod
    def closing(self) -> list[Struct]:
        """Return the events that end a stream: its usage, if the client asked for it."""

    @abstractmethod
    def whole(self) -> Struct:
        """Return the whole answer; call it once every delta has been added."""

    def failure(self, error: ApiError) -> Struct:
        """Return the event that ends a stream which fails."""
        return error.answer()

    def encode(self, events: Sequence[Struct]) -> bytes:
        """Return events as the bytes of a stream."""
        return plain_events(events)

    @property
    def has_small_closing(self) -> bool:
        """Whether the events of `closing` are written in less than a millisecond."""
        return True

    def add(self, batch: Sequence[Delta]) -> None:
        self._count(batch)
        for delta in batch:
            self._totals[delta.index].append(delta)

    def is_small(self, batch: Sequence[Delta]) -> bool:
        """Return whether the events of `batch` are written in less than a millisecond."""
        numbers = sum(len(delta.token_ids) + sum(len(entry.top_ids) for entry in delta.logprobs) for delta in batch)
        brings_prompts = any(delta.prompt_logprobs for delta in batch)
        repeats_prompts = self._repeats_prompts and any(delta.index not in self._started for delta in batch)
        return numbers <= _SMALL_NUMBERS and not brings_prompts and not repeats_prompts

    def usage(self) -> Usage:
        """Return the usage so far; the cost does not depend on the number of sequences."""
        return self._usage.now()

    def _count(self, batch: Sequence[Delta]) -> None:
        self._usage.num_completion_tokens += sum(len(delta.token_ids) for delta in batch)
        self._usage.num_reasoning_tokens += sum(delta.num_reasoning_tokens for delta in batch)

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def _is_first(self, index: int) -> bool:
        """Return whether nothing of a choice has been sent yet; note that something is sent now."""
        first = index not in self._started
        self._started.add(index)
        return first


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"

    def __init__(self, request: BegunRequest[CompletionBody]) -> None:
        super().__init__(request)
        body = request.body
        self._echo = bool(body.echo)
        self._only_echo = body.max_tokens == 0
        self._num_logprobs = body.logprobs
        self._num_prompt_logprobs = body.prompt_logprobs
        self._echoed: dict[int, CompletionLogprobs] = {}  # by prompt
        self._held: dict[int, dict[int, Delta]] = {}  # by prompt, by choice

    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        self._count(batch)
        result: list[Struct] = []
        for delta in self._ready(batch):
            first = self._is_first(delta.index)
            choice = self._choice(delta, first)
            if choice.text or choice.finish_reason or choice.logprobs or self._return_token_ids:
                usage_so_far = self.usage() if self.running_usage else UNSET
                result.append(self._completion([choice], usage_so_far))
        return result

    def closing(self) -> list[Struct]:
        return [self._completion([], self.usage())] if self.final_usage else []

    def whole(self) -> Struct:
        choices = [self._choice(total, first=True) for total in self._ready(self._totals)]
        if self._num_prompt_logprobs is not None:
            shown: PromptLogprobs = []
            for choice, total in zip(choices, self._totals, strict=True):
                if total.index % self.n == 0:
                    prompt = self._prompt(total.index)
                    shown = prompt_logprobs(
                        self.model.tokenizer,
                        prompt.token_ids,
                        total.prompt_logprobs or [],
                        self._num_prompt_logprobs,
                    )
                choice.prompt_logprobs = shown
        return self._completion(choices, self.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model.name, choices, usage=usage, service_tier=self.service_tier)

    def _count(self, batch: Sequence[Delta]) -> None:
        if not self._only_echo:
            super()._count(batch)

    def _ready(self, batch: Sequence[Delta]) -> list[Delta]:
        """Return the deltas that can be sent now.

        Echoed logprobs of a prompt come with its first choice; its other choices wait until that one has come.
        """
        if not self._echo or self._num_logprobs is None:
            return list(batch)
        ready: list[Delta] = []
        for delta in batch:
            prompt = delta.index // self.n
            if delta.prompt_logprobs is not None:
                self._echoed[prompt] = self._echo_of(self.prompts[prompt], delta.prompt_logprobs, self._num_logprobs)
                ready += [delta, *self._held.pop(prompt, {}).values()]
            elif prompt in self._echoed:
                ready.append(delta)
            else:
                held = self._held.setdefault(prompt, {})
                held.setdefault(delta.index, Delta(delta.index)).append(delta)
        return ready

    def _choice(self, delta: Delta, first: bool) -> CompletionChoice:
        if self._only_echo:
            delta.text, delta.token_ids, delta.logprobs, delta.text_offsets, delta.stop_reason = "", [], [], [], None
            delta.finish_reason = delta.finish_reason and "length"
        prompt = self._prompt(delta.index)
        echo = self._echo and first
        return CompletionChoice(
            delta.index,
            prompt.text + delta.text if echo else delta.text,
            self._named_logprobs(delta, echo) if self._num_logprobs is not None else None,
            delta.finish_reason,
            delta.stop_reason,
            delta.token_ids if self._return_token_ids else UNSET,
            prompt.token_ids if self._return_token_ids and first else UNSET,
        )

    def _echo_of(self, prompt: Prompt, packed: list[bytes], num_top: int) -> CompletionLogprobs:
        # The engine sends as many as `prompt_logprobs` wants, if that is more.
        named = (entry.with_top(num_top) for entry in unpack_prompt_logprobs(packed))
        entries: list[TokenLogprobs | None] = [None, *named]
        offsets = prompt_offsets(self.model.tokenizer, prompt.token_ids, prompt.text)
        return completion_logprobs(self._token_names, prompt.token_ids, entries, offsets)

    def _named_logprobs(self, delta: Delta, echo: bool) -> CompletionLogprobs:
        echoed = self._echoed[delta.index // self.n] if echo else CompletionLogprobs([], [], [], [])
        echoed_chars = len(self._prompt(delta.index).text) if self._echo else 0
        offsets = [echoed_chars + offset for offset in delta.text_offsets]
        named = completion_logprobs(self._token_names, delta.token_ids, delta.logprobs, offsets)
        return CompletionLogprobs(
            echoed.tokens + named.tokens,
            echoed.token_logprobs + named.token_logprobs,
            echoed.top_logprobs + named.top_logprobs,
            echoed.text_offset + named.text_offset,
        )


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"

    def __init__(self, request: BegunRequest[ChatBody]) -> None:
        super().__init__(request)
        body = request.body
        self._logprobs = bool(body.logprobs)
        self._num_prompt_logprobs = body.prompt_logprobs
        self._hides_reasoning = body.include_reasoning is False

    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        result: list[Struct] = [self._opening(delta.index) for delta in batch if self._is_first(delta.index)]
        self._count(batch)
        for delta in self._told(batch):
            tells = delta.text or delta.reasoning or delta.calls or delta.finish_reason
            if tells or self._logprobs or self._return_token_ids:
                result.append(self._chunk(delta))
        return result

    def closing(self) -> list[Struct]:
        return [self._event([], self.usage())] if self.final_usage else []

    def whole(self) -> Struct:
        tokenizer, prompt = self.model.tokenizer, self.prompts[0]
        return ChatCompletion(
            self.id,
            self.created,
            self.model.name,
            [
                ChatChoice(
                    total.index,
                    _message(total),
                    chat_logprobs(self._token_names, total.token_ids, total.logprobs) if self._logprobs else None,
                    total.finish_reason,
                    total.stop_reason,
                    total.token_ids if self._return_token_ids else UNSET,
                )
                for total in self._told(self._totals)
            ],
            self.usage(),
            service_tier=self.service_tier,
            prompt_token_ids=prompt.token_ids if self._return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if self._num_prompt_logprobs is None
            else prompt_logprobs(
                tokenizer, prompt.token_ids, self._totals[0].prompt_logprobs or [], self._num_prompt_logprobs
            ),
        )

    def _told(self, batch: Sequence[Delta]) -> Sequence[Delta]:
        """Return `batch`, without its reasoning if the client asked for that."""
        if self._hides_reasoning:
            for delta in batch:
                delta.reasoning = ""
        return batch

    def _opening(self, index: int) -> ChatChunk:
        choice = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
        token_ids = self.prompts[0].token_ids if self._return_token_ids and index == 0 else UNSET
        return self._event([choice], self.usage() if self.running_usage else UNSET, token_ids)

    def _chunk(self, delta: Delta) -> ChatChunk:
        choice = ChatChunkChoice(
            delta.index,
            ChatDelta(
                content=UNSET if (delta.calls or delta.reasoning) and not delta.text else delta.text,
                tool_calls=delta.calls or UNSET,
                reasoning_content=delta.reasoning or UNSET,
                reasoning=delta.reasoning or UNSET,
            ),
            chat_logprobs(self._token_names, delta.token_ids, delta.logprobs) if self._logprobs else None,
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else UNSET,
            delta.token_ids if self._return_token_ids else UNSET,
        )
        usage_so_far = self.usage() if self.running_usage else UNSET
        return self._event([choice], usage_so_far)

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self.id,
            self.created,
            self.model.name,
            choices,
            service_tier=self.service_tier,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


def _message(total: Delta) -> AssistantMessage:
    calls: list[ToolCall] = []
    for part in total.calls:
        if part.id is not UNSET and part.function.name is not UNSET:
            calls.append(ToolCall(part.id, FunctionCall(part.function.name, part.function.arguments)))
        else:
            calls[-1].function.arguments += part.function.arguments
    reasoning = total.reasoning or UNSET
    return AssistantMessage(
        total.text or (None if calls or total.reasoning else ""),
        tool_calls=calls or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )
