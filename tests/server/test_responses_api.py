"""`/v1/responses` through the real `openai` client. The echo engine repeats the prompt, so answers are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from echo_gateway import MAX_MODEL_LEN, Gateway

from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.tokenizer import Tokenizer

TEXT = "Grüße 👋🏽"
PROMPT = "<|im_start|>user\nGrüße 👋🏽<|im_end|>\n<|im_start|>assistant\n"
ASKED: dict[str, Any] = {"model": "chat", "input": TEXT, "max_output_tokens": 50}
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TOOLED: dict[str, Any] = {"model": "chat", "tools": [ADD], "input": f"so {CALL}\n{CALL} end"}


def echoed(tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    ids = list(itertools.islice(itertools.cycle(tokenizer.backend.encode(prompt).ids), num_tokens))
    return str(tokenizer.backend.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")


def dump(response: Any) -> dict[str, Any]:
    """Return a response without what differs between two equal ones."""
    found: dict[str, Any] = response.to_dict()
    own_id = found.pop("id").removeprefix("resp_")
    found.pop("created_at")
    found.pop("completed_at")
    for item in found["output"]:
        assert own_id in item.pop("id")
        item.pop("call_id", None)
    found["usage"].pop("input_tokens_details")
    return found


def test_a_text_is_answered(gateway: Gateway, tokenizer: Tokenizer) -> None:
    response = gateway.openai().responses.create(**ASKED, metadata={"run": "7"}, instructions=None)
    assert response.output_text == echoed(tokenizer, PROMPT, 50)
    assert (response.object, response.model, response.metadata) == ("response", "chat", {"run": "7"})
    [message] = response.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage is not None
    assert response.usage.input_tokens == len(tokenizer.backend.encode(PROMPT).ids)
    assert (response.usage.output_tokens, response.usage.total_tokens) == (50, response.usage.input_tokens + 50)


def test_without_a_limit_an_answer_has_the_rest_of_the_context(gateway: Gateway) -> None:
    response = gateway.openai("/models/code/v1").responses.create(model="code", input="a")
    assert response.usage is not None
    assert response.usage.total_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": TEXT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
    ],
)
def test_items_say_the_same_as_a_text(gateway: Gateway, items: Any) -> None:
    create = gateway.openai().responses.create
    assert create(**{**ASKED, "input": items}).output_text == create(**ASKED).output_text


def test_what_the_cache_held_is_reported(gateway: Gateway) -> None:
    asked = {**ASKED, "input": "what the cache held " * 20, "max_output_tokens": 1}
    usages = [gateway.openai().responses.create(**asked).usage for _ in range(2)]
    cached = [usage.input_tokens_details.cached_tokens for usage in usages if usage is not None]
    assert cached[0] < 32 < cached[1]
    by_tier = {"local": cached[1] - 16, "peer": 0, "host": 16, "storage": 0}
    told_usage = gateway.openai().responses.create(**asked, extra_body={"return_cached_tokens_details": True}).usage
    assert told_usage is not None
    assert told_usage.input_tokens_details.model_dump()["cached_tokens_details"] == by_tier


def told(client: openai.OpenAI, asked: dict[str, Any]) -> Sequence[Any]:
    """Return the events of a stream whose names and numbers are in order."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event.response.status for event in events[:2]} == {"in_progress"}
    return events


def test_a_stream_joins_to_the_whole(gateway: Gateway) -> None:
    client = gateway.openai()
    whole = client.responses.create(**ASKED)
    events = told(client, ASKED)
    names = [event.type.removeprefix("response.") for event in events[2:]]
    closing = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names[:2] == ["output_item.added", "content_part.added"]
    assert set(names[2:-4]) == {"output_text.delta"}
    assert names[-4:] == closing
    text, part, item, last = events[-4:]
    assert "".join(event.delta for event in events[4:-4]) == text.text == part.part.text == whole.output_text
    assert {event.item_id for event in events[3:-2]} == {item.item.id}
    assert dump(last.response) == dump(whole)


def test_texts_have_the_logprobs_of_their_tokens(tool_gateway: Gateway, tokenizer: Tokenizer) -> None:
    client = tool_gateway.openai()
    asked = {**TOOLED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    assert whole.top_logprobs == 2
    parts = [item.content[0] for item in whole.output if item.type == "message"]
    assert len(parts) > 1
    for part in parts:
        assert part.type == "output_text"
        assert part.logprobs
        # Spaces around calls are no text, but may share a token with it.
        joined = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
        assert joined.strip() == part.text.strip()
        for entry in part.logprobs:
            [token_id] = tokenizer.encode(entry.token, add_special_tokens=False)
            assert entry.logprob == pytest.approx(-(token_id % 10) / 10)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx([entry.logprob, entry.logprob - 1])
    events = told(client, asked)
    grown = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    done = [entry for event in events if event.type == "response.output_text.done" for entry in event.logprobs]
    of_parts = [entry for part in parts if part.type == "output_text" for entry in part.logprobs or ()]
    assert [entry.to_dict() for entry in grown] == [entry.to_dict() for entry in of_parts]
    assert [entry.to_dict() for entry in done] == [entry.to_dict() for entry in of_parts]
    assert dump(events[-1].response) == dump(whole)


def test_top_logprobs_alone_bring_none(gateway: Gateway) -> None:
    response = gateway.openai().responses.create(**ASKED, top_logprobs=2)
    [message] = response.output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert message.content[0].logprobs == []


def test_the_wire_format_of_a_stream(gateway: Gateway) -> None:
    with gateway.http() as http:
        response = http.post("/v1/responses", json={**ASKED, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


def test_calls_are_items(tool_gateway: Gateway) -> None:
    client = tool_gateway.openai()
    size = len(tool_gateway.models["chat"].tokenizer.encode(f"user\nso {CALL}\n{CALL}")) + 8
    asked = {**TOOLED, "max_output_tokens": size}
    whole = client.responses.create(**asked)
    text, first, second = whole.output[:3]
    assert text.type == "message"
    assert text.content[0].text == "user\nso"
    for call in (first, second):
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("add", ARGUMENTS, "completed")
    assert first.call_id != second.call_id
    assert whole.tools[0].to_dict() == ADD
    assert whole.tool_choice == "auto"
    events = told(client, asked)
    assert dump(events[-1].response) == dump(whole)
    by_item: dict[int, list[Any]] = {}
    for event in events[2:-1]:
        by_item.setdefault(event.output_index, []).append(event)
    assert list(by_item) == sorted(by_item)
    added, *pieces, done, item_done = by_item[1]
    assert (added.item.name, added.item.arguments, added.item.status) == ("add", "", "in_progress")
    assert {event.type for event in pieces} == {"response.function_call_arguments.delta"}
    assert "".join(event.delta for event in pieces) == done.arguments == item_done.item.arguments == ARGUMENTS


def test_without_tools_a_call_is_text(tool_gateway: Gateway) -> None:
    asked = {**TOOLED, "tool_choice": "none", "max_output_tokens": 90}
    response = tool_gateway.openai().responses.create(**asked)
    [message] = response.output
    assert "<tool_call>" in response.output_text
    assert message.type == "message"


def messages(**fields: Any) -> list[dict[str, Any]]:
    body = ResponsesBody.model_validate(fields)
    return [message.for_template() for message in body.chat.messages]


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
    items = [
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        call,
        {**call, "call_id": "2", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {**call, "call_id": "3"},
        {"role": "user", "content": "Go on."},
    ]
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": number, "type": "function", "function": function} for number in "123"]
    assert messages(input=items, instructions="You are kind.") == [
        {"role": "system", "content": "You are kind."},
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "1\n2"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls[:2]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "user", "content": "Go on."},
    ]


def test_what_an_answer_has_can_be_sent_back(tool_gateway: Gateway) -> None:
    create = tool_gateway.openai().responses.create
    output = create(**TOOLED, max_output_tokens=90).output
    calls = [item.call_id for item in output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call, "output": "3"} for call in calls[:1]]
    # With the fields of the client that no answer here has, under their own names and under Python's.
    dumped = [[item.model_dump(by_alias=by_alias) for item in output[:2]] for by_alias in (True, False)]
    for answer in (output[:2], *dumped):
        history: Any = [{"role": "user", "content": "go"}, *answer, *results]
        assert create(model="chat", input=history, max_output_tokens=5).output


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logits"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"reasoning": {"effort": "little"}}, "reasoning.effort"),
        ({"tools": [{"type": "file_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a b", "arguments": "{}"}]}, "input.0.name"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"messages": []}, "messages"),
        # These are found in the chat that the request comes to.
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "refuse me"}, "input"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "str"}}}},
            "text.format.schema",
        ),
        ({"priority": 3}, "priority"),
    ],
)
def test_a_mistake_names_its_field(tool_gateway: Gateway, fields: dict[str, Any], field: str) -> None:
    with tool_gateway.http() as http:
        response = http.post("/v1/responses", json={**ASKED, **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"] or "").startswith(field)


def test_what_the_engine_refuses_has_its_status(gateway: Gateway) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError):
            gateway.openai().responses.create(**ASKED, stream=stream, extra_body={"cache_salt": "starve"})


def test_a_stream_cut_by_a_dying_engine_fails(slow_gateway: Gateway) -> None:
    client, engine = slow_gateway.clients["chat"], slow_gateway.engines["chat"]
    stream = slow_gateway.openai().responses.create(**{**ASKED, "max_output_tokens": 4000}, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    engine.stop()
    slow_gateway.call(lambda: client.engine_down("was killed by SIGKILL", retry_after_s=3))
    *_, last = stream
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert [item.status for item in last.response.output] == ["incomplete"]
    assert "chat" in last.response.error.message
