"""The answer to a request to `/v1/responses`, whole or as OpenAI's events."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from swiftkv.server.begun import BegunRequest
from swiftkv.server.choices import Delta
from swiftkv.server.errors import ApiError
from swiftkv.server.passage_answer import PassageAnswer
from swiftkv.server.passages import (
    CallPassage,
    Closed,
    Grown,
    Opened,
    Passage,
    PassageEvent,
    TextPassage,
    ThoughtPassage,
    content,
)
from swiftkv.server.protocol import ChatBody
from swiftkv.server.responses import PromptTokensDetails
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.responses_api.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomCallItem,
    CustomInputDelta,
    CustomInputDone,
    Effort,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningOutput,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
)
from swiftkv.server.responses_api.tools import custom_input
from swiftkv.server.sse import NamedEvent

_SMALL_ECHO_BYTES = 1 << 16
_ID_PREFIXES = {ThoughtPassage: "rs_", TextPassage: "msg_", CallPassage: "fc_"}
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesAnswer(PassageAnswer):
    id_prefix = "resp_"

    def __init__(self, asked: ResponsesBody, request: BegunRequest[ChatBody]) -> None:
        """Answer `asked`; `request` is its translation to a chat."""
        super().__init__(request)
        self._asked = asked
        self._num_events = 0

    def opening(self) -> list[NamedEvent]:
        begun = self._response("in_progress")
        return [self._event(ResponseEvent, kind, begun) for kind in ("response.created", "response.in_progress")]

    def written(self, event: PassageEvent) -> list[NamedEvent]:
        match event:
            case Opened((TextPassage() | ThoughtPassage()) as passage):
                return [self._item_event("added", passage), self._part_event("added", passage)]
            case Opened(passage):
                return [self._item_event("added", passage)]
            case Grown(TextPassage() as passage, text, logprobs):
                kind = "response.output_text.delta"
                return [self._event(TextDelta, kind, self._item_id(passage), passage.index, 0, text, logprobs)]
            case Grown(ThoughtPassage() as passage, text):
                kind = "response.reasoning_text.delta"
                return [self._event(ReasoningDelta, kind, self._item_id(passage), passage.index, 0, text)]
            case Grown(CallPassage() as passage, _) if self._asked.tool_called(passage.name).is_custom:
                return []  # the JSON around the input grows, not the input
            case Grown(passage, text):
                kind = "response.function_call_arguments.delta"
                return [self._event(ArgumentsDelta, kind, self._item_id(passage), passage.index, text)]
            case Closed(passage):
                return [*self._done(passage), self._item_event("done", passage)]

    def closing(self) -> list[Struct]:
        status = self._status()
        return [self._event(ResponseEvent, f"response.{status}", self._response(status))]

    def failure(self, error: ApiError) -> Struct:
        self.passages.cut()
        failed = self._response("failed")
        failed.error = ResponseFailure(_FAILURES.get(error.status, "server_error"), error.answer().error.message)
        return self._event(ResponseEvent, "response.failed", failed)

    def whole(self) -> Struct:
        return self._response(self._status())

    def is_small(self, batch: Sequence[Delta]) -> bool:
        """Return whether the events are small; the first repeat the request's tools and instructions."""
        return super().is_small(batch) and (0 in self._started or self._has_small_echo())

    @property
    def has_small_closing(self) -> bool:
        return super().has_small_closing and self._has_small_echo()

    def _has_small_echo(self) -> bool:
        return len(self._asked.instructions or "") + self._asked.num_echoed_bytes <= _SMALL_ECHO_BYTES

    def _event(self, event_type: type[NamedEvent], kind: str, *fields: object) -> NamedEvent:
        event = event_type(kind, self._num_events, *fields)  # type: ignore[call-arg]
        self._num_events += 1
        return event

    def _item_event(self, what: str, passage: Passage) -> NamedEvent:
        status: Status = "in_progress" if what == "added" else _status_of(passage)
        return self._event(ItemEvent, f"response.output_item.{what}", passage.index, self._item(passage, status))

    def _part_event(self, what: str, passage: TextPassage | ThoughtPassage) -> NamedEvent:
        part = ReasoningText(content(passage)) if isinstance(passage, ThoughtPassage) else _output_text(passage)
        kind = f"response.content_part.{what}"
        return self._event(PartEvent, kind, self._item_id(passage), passage.index, 0, part)

    def _done(self, passage: Passage) -> list[NamedEvent]:
        item_id, text = self._item_id(passage), content(passage)
        if isinstance(passage, CallPassage) and self._asked.tool_called(passage.name).is_custom:
            return self._custom_done(item_id, passage.index, custom_input(text))
        if isinstance(passage, CallPassage):
            kind = "response.function_call_arguments.done"
            name = self._asked.tool_called(passage.name).name
            return [self._event(ArgumentsDone, kind, item_id, passage.index, name, text)]
        if isinstance(passage, ThoughtPassage):
            done = self._event(ReasoningDone, "response.reasoning_text.done", item_id, passage.index, 0, text)
        else:
            kind = "response.output_text.done"
            done = self._event(TextDone, kind, item_id, passage.index, 0, text, passage.logprobs)
        return [done, self._part_event("done", passage)]

    def _custom_done(self, item_id: str, index: int, text: str) -> list[NamedEvent]:
        kind = "response.custom_tool_call_input"
        return [
            self._event(CustomInputDelta, f"{kind}.delta", item_id, index, text),
            self._event(CustomInputDone, f"{kind}.done", item_id, index, text),
        ]

    def _item(self, passage: Passage, status: Status) -> OutputItem:
        if isinstance(passage, CallPassage):
            return self._call(passage, status)
        is_begun = status == "in_progress"
        if isinstance(passage, ThoughtPassage):
            thoughts = [] if is_begun else [ReasoningText(content(passage))]
            return ReasoningOutput(self._item_id(passage), thoughts, status)
        return OutputMessage(self._item_id(passage), [] if is_begun else [_output_text(passage)], status)

    def _call(self, passage: CallPassage, status: Status) -> FunctionCallItem | CustomCallItem:
        tool, text = self._asked.tool_called(passage.name), content(passage)
        call: FunctionCallItem | CustomCallItem
        if tool.is_custom:
            call = CustomCallItem(self._item_id(passage), passage.call_id, tool.name, custom_input(text), status)
        else:
            call = FunctionCallItem(self._item_id(passage), passage.call_id, tool.name, text, status)
        call.namespace = UNSET if tool.namespace is None else tool.namespace
        return call

    def _item_id(self, passage: Passage) -> str:
        return f"{_ID_PREFIXES[type(passage)]}{self.id.removeprefix(self.id_prefix)}{passage.index:04}"

    def _status(self) -> Status:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _response(self, status: Status) -> ResponseObject:
        asked = self._asked
        response = ResponseObject(
            self.id,
            self.created,
            status,
            self.model.name,
            []
            if status == "in_progress"
            else [self._item(passage, _status_of(passage)) for passage in self.passages.all],
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=asked.temperature,
            text=asked.echoed_text,
            tool_choice=asked.echoed_tool_choice,
            tools=asked.echoed_tools,
            top_p=asked.top_p,
            safety_identifier=asked.safety_identifier,
            prompt_cache_key=asked.prompt_cache_key,
            user=asked.user,
            reasoning=Effort(None if asked.reasoning is None else asked.reasoning.effort),
            service_tier=self.service_tier,
            top_logprobs=asked.top_logprobs or 0,
        )
        if status == "completed":
            response.completed_at = int(time.time())
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        if status in ("completed", "incomplete"):
            response.usage = self._response_usage()
        return response

    def _response_usage(self) -> ResponseUsage:
        usage = self.usage()
        details, of_output = usage.prompt_tokens_details, usage.completion_tokens_details
        return ResponseUsage(
            usage.prompt_tokens,
            _input_details(details),
            usage.completion_tokens,
            OutputTokensDetails(0 if of_output is msgspec.UNSET else of_output.reasoning_tokens),
            usage.total_tokens,
        )


def _input_details(details: PromptTokensDetails | UnsetType) -> InputTokensDetails:
    if details is UNSET:
        return InputTokensDetails(0)
    return InputTokensDetails(details.cached_tokens, cached_tokens_details=details.cached_tokens_details)


def _output_text(passage: TextPassage) -> OutputText:
    return OutputText(content(passage), logprobs=passage.logprobs)


def _status_of(passage: Passage) -> Status:
    return "incomplete" if passage.is_cut else "completed"
