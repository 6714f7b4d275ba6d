"""One sequence of a request on its way to the client: tokens become text, and stop strings end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.detokenizer import Detokenizer, StopMatcher, StopStrings
from swiftkv.server.generation import Generation, SequenceOutput
from swiftkv.server.reasoning import SectionEvent, Sections, Thought
from swiftkv.server.responses import FunctionDelta, ToolCallDelta
from swiftkv.server.text_tokens import TextToken, TextTokens, token_by_token
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import ArgumentsGrown, CallBegun, Said, ToolEvent
from swiftkv.server.tools import ToolUse

_MAX_TOKENS_ON_LOOP = 256
"""The most tokens decoded on the event loop: a slow reader finds thousands waiting, which take milliseconds."""


@dataclass(slots=True)
class Delta:
    """The part of one choice that is new since the last delta."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """The place in the text of the choice where the token of each of `logprobs` begins."""
    prompt_logprobs: list[bytes] | None = None  # packed
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    parts: list[Thought | Said | ToolCallDelta] = field(default_factory=list)
    """The reasoning, the text and the calls in their order."""
    decoded: str = ""
    """All text of the tokens, before stop strings are held back and reasoning and calls are taken out."""
    text_tokens: list[TextToken] = field(default_factory=list)
    """The tokens of `text`, for protocols that show log-probabilities beside the text alone."""

    def say(self, text: str) -> None:
        """Add text for the user."""
        if text:
            self.text += text
            self._grow(Said, text)

    def think(self, text: str) -> None:
        """Add reasoning."""
        self.reasoning += text
        self._grow(Thought, text)

    def _grow(self, kind: type[Said | Thought], text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            self.parts[-1] = kind(last.text + text)
        else:
            self.parts.append(kind(text))

    def append(self, later: Delta) -> None:
        """Add a later delta of the same choice, except its `parts`."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.num_reasoning_tokens += later.num_reasoning_tokens
        self.calls += later.calls
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(frozen=True)
class StopRules:
    """The rules that end a choice, besides `max_tokens` and the model's own end-of-sequence tokens.

    Attributes:
        shows_stop: Whether the text includes the stop string or token that ended it.
        skip_special_tokens: Whether the client is to see no special tokens.
    """

    strings: StopStrings
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    shows_stop: bool = False

    def new_matcher(self) -> StopMatcher:
        return StopMatcher(self.strings, shows_stop=self.shows_stop)


class _Calls:
    """Separates the calls of tools from the text of one choice."""

    def __init__(self, tools: ToolUse) -> None:
        self._is_named = tools.is_named
        self._parser = tools.new_parser()
        self._num_calls = 0

    def separate(self, delta: Delta) -> None:
        """Leave the text for the user in `delta.text`, and move the calls to `delta.calls`."""
        decoded, delta.parts, delta.text = delta.parts, [], ""
        for part in decoded:
            if isinstance(part, Said):
                self._take_all(self._parser.push(part.text), delta)
            else:
                delta.parts.append(part)
        if delta.finish_reason:
            self._take_all(self._parser.finish(), delta)
        if delta.finish_reason == "stop" and self._num_calls and not self._is_named:
            delta.finish_reason = "tool_calls"

    def _take_all(self, events: Sequence[ToolEvent], delta: Delta) -> None:
        for event in events:
            self.take(event, delta)

    def take(self, event: ToolEvent, delta: Delta) -> None:
        """Add a parser's event to `delta`."""
        match event:
            case Said(text):
                delta.say(text)
            case CallBegun(name):
                call = ToolCallDelta(self._num_calls, FunctionDelta(name), self._parser.new_call_id(), "function")
                self._num_calls += 1
                delta.calls.append(call)
                delta.parts.append(call)
            case ArgumentsGrown(text):
                if delta.calls:
                    delta.calls[-1].function.arguments += text
                else:
                    more = ToolCallDelta(self._num_calls - 1, FunctionDelta(arguments=text))
                    delta.calls.append(more)
                    delta.parts.append(more)


class Choice:
    """Decodes one sequence. The texts of its deltas, joined, are the choice's text."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        stop: StopRules,
        tools: ToolUse | None = None,
        sections: Sections | None = None,
        text_tokens: TextTokens | None = None,
    ) -> None:
        """`text_tokens`: finds the tokens of the text; `None` if nobody asks for them."""
        self.index = index
        self.num_tokens = 0
        self._rules = stop
        self._tokenizer = tokenizer
        skip_special_tokens = stop.skip_special_tokens and not (tools and tools.parser.shows_special_tokens)
        self._detokenizer = Detokenizer(tokenizer.backend, prompt_ids, skip_special_tokens)
        self._matcher = stop.new_matcher()
        self._calls = None if tools is None else _Calls(tools)
        self._sections = sections  # `None` once the rest of the answer is text for the user
        self._text_tokens = text_tokens

    def decode(self, output: SequenceOutput) -> list[Delta]:
        """Decode what the engine sent: one delta, or one for each token if the client asks which are the text's."""
        if self._text_tokens is None:
            return [self.push(output)]
        deltas: list[Delta] = []
        for part in token_by_token(output):
            deltas.append(self._push_token(part, self._text_tokens))
            if deltas[-1].finish_reason:
                break
        return deltas

    def _push_token(self, output: SequenceOutput, text_tokens: TextTokens) -> Delta:
        is_mark = self._sections is not None and any(map(self._sections.is_mark, output.token_ids))
        delta = self.push(output)
        if delta.logprobs and not is_mark:
            [token_id], [logprobs] = delta.token_ids, delta.logprobs
            if delta.decoded or not self._tokenizer.is_special(token_id):  # a part of a character waits for the rest
                text_tokens.push(TextToken(token_id, logprobs), delta.decoded)
        if delta.text:
            delta.text_tokens = text_tokens.take(delta.text)
        if is_mark or delta.reasoning or delta.calls:
            text_tokens.forget(in_call=bool(delta.calls))
        return delta

    def push(self, output: SequenceOutput) -> Delta:
        """Decode what the engine sent. A stop string can set the delta's `finish_reason` before the engine does."""
        delta = self._decoded(output)
        if self._calls is not None:
            self._calls.separate(delta)
        return delta

    def _decoded(self, output: SequenceOutput) -> Delta:
        delta = Delta(self.index, prompt_logprobs=output.prompt_logprobs, finish_reason=output.finish_reason)
        tokens, stop_token = output.token_ids, None
        if output.finish_reason == "stop":
            stop_token = tokens[-1]
            delta.stop_reason = stop_token if stop_token in self._rules.token_ids else None
        if self._rules.strings or self._sections is not None:
            self._push_one_by_one(delta, output, stop_token)
            return delta
        self.num_tokens += len(tokens)
        delta.token_ids, delta.logprobs = tokens, output.logprobs
        delta.say(self._text(tokens if stop_token is None else tokens[:-1], delta))
        if delta.finish_reason:
            delta.say(self._flushed(delta) + self._stop_text(stop_token, delta))
        return delta

    def _push_one_by_one(self, delta: Delta, output: SequenceOutput, stop_token: int | None) -> None:
        """Decode tokens one by one, because tokens after a stop string do not count, and reasoning ends at a token."""
        for position, token in enumerate(output.token_ids):
            self.num_tokens += 1
            delta.token_ids.append(token)
            delta.logprobs += output.logprobs[position : position + 1]
            if token == stop_token and position == len(output.token_ids) - 1:
                break
            text = self._text([token], delta)
            is_header = self._sections is not None and self._sections.is_header
            self._tell(token, text if is_header else self._matched(text), delta)
            if self._matcher.matched is not None:
                break
        if delta.finish_reason and self._matcher.matched is None:
            text = self._matched(self._flushed(delta))
            stop_text = self._stop_text(stop_token, delta)
            if self._matcher.matched is None:
                text += self._matcher.flush() + stop_text
            self._tell(None, text, delta)
        if self._matcher.matched is not None:
            if self._sections is not None:
                self._take(self._sections.finish(""), delta)
            delta.finish_reason, delta.stop_reason = "stop", self._matcher.matched

    def _matched(self, text: str) -> str:
        """Return the part of the text that can be shown; stop strings count once `min_tokens` is reached."""
        return self._matcher.push(text, watch=self.num_tokens > self._rules.min_tokens)

    def _text(self, tokens: Sequence[int], delta: Delta) -> str:
        text = self._detokenizer.push(tokens, delta.text_offsets if delta.logprobs else None)
        delta.decoded += text
        return text

    def _flushed(self, delta: Delta) -> str:
        text = self._detokenizer.flush()
        delta.decoded += text
        return text

    def _stop_text(self, token: int | None, delta: Delta) -> str:
        """Return the text of the token that ended the choice; empty if the client is not to see it."""
        if token is None:
            return ""
        if self._is_hidden_stop(token):
            if delta.logprobs:
                delta.text_offsets.append(self._detokenizer.num_chars)
            return ""
        return self._text([token], delta)

    def _is_hidden_stop(self, token: int) -> bool:
        if not self._rules.shows_stop:
            return True
        is_mark = self._sections is not None and self._sections.is_mark(token)
        # A parser of calls may need special tokens that the client did not ask for.
        return is_mark or (self._rules.skip_special_tokens and self._tokenizer.is_special(token))

    def _tell(self, token: int | None, text: str, delta: Delta) -> None:
        """Add `text` to the part of the answer that it belongs to. `token` is `None` for the last text."""
        sections = self._sections
        if sections is None:
            delta.say(text)
            return
        if token is None:
            self._take(sections.finish(text), delta)
            return
        if sections.is_mark(token) and self._matcher.matched is None:  # a stop string lies in one part
            text += self._matcher.flush()
            self._matcher = self._rules.new_matcher()
        was_reasoning = sections.is_reasoning
        self._take(sections.take(token, text), delta)
        delta.num_reasoning_tokens += was_reasoning and sections.is_reasoning
        if sections.is_done:
            self._sections = None

    def _take(self, events: Sequence[SectionEvent], delta: Delta) -> None:
        for event in events:
            match event:
                case Thought(text):
                    delta.think(text)
                case Said(text):
                    delta.say(text)
                case CallBegun() | ArgumentsGrown() if self._calls is not None:
                    self._calls.take(event, delta)
                case ArgumentsGrown(text):  # without tools, it is text
                    delta.say(text)


async def deltas(generation: Generation, choices: Sequence[Choice]) -> AsyncIterator[list[Delta]]:
    """Yield the engine's output as text, and end sequences that met a stop string."""

    def decode(outputs: list[SequenceOutput]) -> list[Delta]:
        return [delta for output in outputs for delta in choices[output.index].decode(output)]

    async for outputs in generation:
        is_small = sum(len(output.token_ids) for output in outputs) <= _MAX_TOKENS_ON_LOOP
        batch = decode(outputs) if is_small else await asyncio.to_thread(decode, outputs)
        ended = {output.index for output in outputs if output.finish_reason}
        for delta in batch:
            if delta.finish_reason and delta.index not in ended:
                generation.finish(delta.index, "stop")
        yield batch
