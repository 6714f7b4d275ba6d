"""The answer to one request, whole or as server-sent events, from the text of its choices."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import UNSET, Struct

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.choices import (
    Choice,
    Delta,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    usage,
)
from swiftkv.server.client import Generation
from swiftkv.server.models import ModelHandle
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
    CompletionLogprobs,
    Usage,
)
from swiftkv.server.sampling import stop_rules


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids; its text is there where the answer repeats it (``echo``)."""

    token_ids: list[int]
    text: str = ""


class Answer(ABC):
    """What is said about one generation. `chunks` for a stream, or `add` until the end and then `whole`."""

    id_prefix: ClassVar[str]

    def __init__(
        self, model: ModelHandle, body: CompletionBody | ChatBody, prompts: Sequence[Prompt], generation: Generation
    ) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.prompts = prompts
        self.generation = generation
        self.n = body.n or 1
        rules = stop_rules(body)
        self.choices = [
            Choice(index, prompts[index // self.n].token_ids, model.tokenizer, rules)
            for index in range(len(prompts) * self.n)
        ]
        options = body.stream_options
        self.final_usage = bool(options and options.include_usage)
        self.running_usage = self.final_usage and bool(options and options.continuous_usage_stats)
        self._return_token_ids = bool(body.return_token_ids)
        self._started: set[int] = set()
        self._totals = [Delta(choice.index) for choice in self.choices]

    @abstractmethod
    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        """The events that tell of ``batch``."""

    @abstractmethod
    def usage_chunk(self) -> Struct:
        """The event that closes a stream whose client asked for its usage."""

    @abstractmethod
    def whole(self) -> Struct:
        """The answer, once everything was added."""

    def add(self, batch: Sequence[Delta]) -> None:
        for delta in batch:
            total = self._totals[delta.index]
            total.text += delta.text
            total.token_ids += delta.token_ids
            total.logprobs += delta.logprobs
            total.prompt_logprobs = delta.prompt_logprobs or total.prompt_logprobs
            total.finish_reason, total.stop_reason = delta.finish_reason, delta.stop_reason

    def usage(self) -> Usage:
        num_prompt_tokens = [len(prompt.token_ids) for prompt in self.prompts]
        return usage(num_prompt_tokens, self.n, self.generation, self._num_completion_tokens())

    def _num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def _is_first(self, index: int) -> bool:
        """True the first time that a choice is heard of."""
        first = index not in self._started
        self._started.add(index)
        return first


class CompletionAnswer(Answer):
    id_prefix = "cmpl"

    def __init__(
        self, model: ModelHandle, body: CompletionBody, prompts: Sequence[Prompt], generation: Generation
    ) -> None:
        super().__init__(model, body, prompts, generation)
        self._echo = bool(body.echo)
        self._only_echo = body.max_tokens == 0
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._text_offsets = [0] * len(self.choices)

    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        result: list[Struct] = []
        for delta in batch:
            first = self._is_first(delta.index)
            choice = self._choice(delta, first)
            if choice.text or choice.finish_reason or choice.logprobs or self._return_token_ids:
                usage_so_far = self.usage() if self.running_usage else UNSET
                result.append(Completion(self.id, self.created, self.model.name, [choice], usage=usage_so_far))
        return result

    def usage_chunk(self) -> Struct:
        return Completion(self.id, self.created, self.model.name, [], usage=self.usage())

    def whole(self) -> Struct:
        choices = [self._choice(total, first=True) for total in self._totals]
        if self._prompt_logprobs:
            for choice, total in zip(choices, self._totals, strict=True):
                choice.prompt_logprobs = prompt_logprobs(
                    self.model.tokenizer, self._prompt(total.index).token_ids, total.prompt_logprobs or []
                )
        return Completion(self.id, self.created, self.model.name, choices, usage=self.usage())

    def _num_completion_tokens(self) -> int:
        return 0 if self._only_echo else super()._num_completion_tokens()

    def _choice(self, delta: Delta, first: bool) -> CompletionChoice:
        if self._only_echo:
            delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], [], None
            delta.finish_reason = delta.finish_reason and "length"
        prompt = self._prompt(delta.index)
        echo = self._echo and first
        return CompletionChoice(
            delta.index,
            prompt.text + delta.text if echo else delta.text,
            self._named_logprobs(delta, prompt if echo else None) if self._logprobs else None,
            delta.finish_reason,
            delta.stop_reason,
            delta.token_ids if self._return_token_ids else UNSET,
            prompt.token_ids if self._return_token_ids and first else UNSET,
        )

    def _named_logprobs(self, delta: Delta, echoed: Prompt | None) -> CompletionLogprobs:
        token_ids = delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        if echoed is not None:
            token_ids = echoed.token_ids + token_ids
            entries = [None, *(delta.prompt_logprobs or ()), *delta.logprobs]
        offset = self._text_offsets[delta.index]
        named = completion_logprobs(self.model.tokenizer, token_ids, entries, offset)
        self._text_offsets[delta.index] += sum(map(len, named.tokens))
        return named


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"

    def __init__(self, model: ModelHandle, body: ChatBody, prompts: Sequence[Prompt], generation: Generation) -> None:
        super().__init__(model, body, prompts, generation)
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs is not None

    def chunks(self, batch: Sequence[Delta]) -> list[Struct]:
        result: list[Struct] = []
        for delta in batch:
            if self._is_first(delta.index):
                result.append(self._opening(delta.index))
            if delta.text or delta.finish_reason or self._logprobs or self._return_token_ids:
                result.append(self._chunk(delta))
        return result

    def usage_chunk(self) -> Struct:
        return ChatChunk(self.id, self.created, self.model.name, [], usage=self.usage())

    def whole(self) -> Struct:
        tokenizer, prompt = self.model.tokenizer, self.prompts[0]
        return ChatCompletion(
            self.id,
            self.created,
            self.model.name,
            [
                ChatChoice(
                    total.index,
                    AssistantMessage(total.text),
                    chat_logprobs(tokenizer, total.token_ids, total.logprobs) if self._logprobs else None,
                    total.finish_reason,
                    total.stop_reason,
                    total.token_ids if self._return_token_ids else UNSET,
                )
                for total in self._totals
            ],
            self.usage(),
            prompt_token_ids=prompt.token_ids if self._return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(tokenizer, prompt.token_ids, self._totals[0].prompt_logprobs or [])
            if self._prompt_logprobs
            else UNSET,
        )

    def _opening(self, index: int) -> ChatChunk:
        choice = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
        token_ids = self.prompts[0].token_ids if self._return_token_ids and index == 0 else UNSET
        return ChatChunk(self.id, self.created, self.model.name, [choice], prompt_token_ids=token_ids)

    def _chunk(self, delta: Delta) -> ChatChunk:
        choice = ChatChunkChoice(
            delta.index,
            ChatDelta(content=delta.text),
            chat_logprobs(self.model.tokenizer, delta.token_ids, delta.logprobs) if self._logprobs else None,
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else UNSET,
            delta.token_ids if self._return_token_ids else UNSET,
        )
        usage_so_far = self.usage() if self.running_usage else UNSET
        return ChatChunk(self.id, self.created, self.model.name, [choice], usage=usage_so_far)
