"""`/v1/messages` through the real `anthropic` client. The echo engine repeats the prompt, so answers are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from echo_gateway import MAX_MODEL_LEN, PATIENCE_S, Gateway, start_gateway

from swiftkv.server.app import ServerSettings
from swiftkv.server.body import parse_body
from swiftkv.server.messages_api.body import MessagesBody
from swiftkv.server.tokenizer import Tokenizer

TEXT = "Grüße 👋🏽"
PROMPT = "<|im_start|>user\nGrüße 👋🏽<|im_end|>\n<|im_start|>assistant\n"
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]
ASKED: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 50}
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALLING = [{"type": "text", "text": "Let me"}, {"type": "tool_use", "id": "1", "name": "add", "input": {}}]
ADD: dict[str, Any] = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}
TOOLED: dict[str, Any] = {
    "model": "chat",
    "tools": [ADD],
    "messages": [{"role": "user", "content": f"so {CALL}\n{CALL} END"}],
    "max_tokens": 500,
    "stop_sequences": ["END"],
}


def client_of(gateway: Gateway, path: str = "", key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url + path, api_key=key, max_retries=0, timeout=PATIENCE_S)


def echoed(tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    ids = list(itertools.islice(itertools.cycle(tokenizer.backend.encode(prompt).ids), num_tokens))
    return str(tokenizer.backend.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")


@pytest.mark.parametrize("path", ["", "/models/chat"])
def test_a_message_is_answered(gateway: Gateway, tokenizer: Tokenizer, path: str) -> None:
    message = client_of(gateway, path).messages.create(**ASKED)
    [block] = message.content
    assert block.type == "text"
    assert block.text == echoed(tokenizer, PROMPT, 50)
    assert (message.type, message.role, message.model) == ("message", "assistant", "chat")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 50
    assert message._request_id
    read = message.usage.cache_read_input_tokens
    assert read is not None
    assert message.usage.input_tokens + read == len(tokenizer.backend.encode(PROMPT).ids)


def test_a_stop_sequence_ends_the_text_and_is_named(gateway: Gateway) -> None:
    message = client_of(gateway).messages.create(**{**ASKED, "stop_sequences": ["👋", "nowhere"]})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "👋")
    assert message.content[0].type == "text"
    assert message.content[0].text == "user\nGrüße "


def test_what_the_cache_held_counts_apart(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "what the cache of messages held " * 20}]
    usages = [client_of(gateway).messages.create(**{**ASKED, "messages": messages}).usage for _ in range(2)]
    assert usages[0].cache_read_input_tokens < 32 < usages[1].cache_read_input_tokens
    totals = [usage.input_tokens + usage.cache_read_input_tokens for usage in usages]
    assert totals[0] == totals[1]
    asked = {**ASKED, "messages": messages, "extra_body": {"return_cached_tokens_details": True}}
    told = client_of(gateway).messages.create(**asked).usage.model_dump()
    by_tier = {"local": told["cache_read_input_tokens"] - 16, "peer": 0, "host": 16, "storage": 0}
    assert told["cached_tokens_details"] == by_tier


def test_a_stream_joins_to_the_whole(gateway: Gateway) -> None:
    client = client_of(gateway)
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        names = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    [text], [streamed] = whole.content, final.content
    assert text.type == streamed.type == "text"
    assert text.text == streamed.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 50)
    assert names[:2] == ["message_start", "content_block_start"]  # the client keeps pings to itself
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_wire_format_of_a_stream(gateway: Gateway) -> None:
    with gateway.http() as http:
        response = http.post(
            "/v1/messages", json={**ASKED, "stream": True}, headers={"anthropic-version": "2023-06-01"}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    events = response.text.split("\n\n")
    assert events.pop() == ""
    pairs = [event.split("\n") for event in events]
    names = [name.removeprefix("event: ") for name, _ in pairs]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [body["type"] for body in bodies] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert bodies[0]["message"]["stop_reason"] is None
    assert bodies[0]["message"]["usage"]["output_tokens"] == 0


def test_calls_are_blocks(tool_gateway: Gateway) -> None:
    client = client_of(tool_gateway)
    whole = client.messages.create(**TOOLED)
    text, first, second, *_ = whole.content
    assert text.type == "text"
    assert text.text == "user\nso"
    for block in (first, second):
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("add", {"a": 1, "b": [2, "}"]})
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    with client.messages.stream(**TOOLED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(pieces) == 2 * ARGUMENTS
    shown = [block.to_dict() for block in final.content]
    assert [{**each, "id": ""} for each in shown] == [{**block.to_dict(), "id": ""} for block in whole.content]


def test_a_call_that_is_cut_is_no_call_of_a_whole_answer(tool_gateway: Gateway) -> None:
    tokens = len(
        tool_gateway.models["chat"].tokenizer.encode(
            '<|im_start|>user\nso <tool_call>\n{"name": "add", "arguments": {"a"'
        )
    )
    message = client_of(tool_gateway).messages.create(**{**TOOLED, "max_tokens": tokens})
    assert message.stop_reason == "max_tokens"
    assert {block.type for block in message.content} == {"text"}


def test_tokens_are_counted_as_prompts_are(tool_gateway: Gateway) -> None:
    client = client_of(tool_gateway)
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    asked: Any = {"model": "chat", "messages": MESSAGES, "system": system, "tools": [ADD]}
    usage = client.messages.create(**asked, max_tokens=1).usage
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    longer = [{"role": "user", "content": "more than the model takes " * 4000}]
    assert client.messages.count_tokens(model="chat", messages=longer).input_tokens > 4096


def body_of(**fields: Any) -> MessagesBody:
    return parse_body(json.dumps({"max_tokens": 1, **fields}).encode(), MessagesBody)


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "one", "is_error": False},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3"}]},
    ]
    body = body_of(messages=messages, system="You are kind.", stop_sequences=["x"], temperature=0.5, top_k=3)
    assert [message.for_template() for message in body.chat.messages] == [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "1\n2"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "thinking": "Hm.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "add", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Done."},
        {"role": "tool", "content": "", "tool_call_id": "3"},
    ]
    chat = body.chat
    assert (chat.stops, chat.max_tokens, chat.temperature, chat.top_k) == (["x"], 1, 0.5, 3)


def test_an_answer_goes_on_with_a_message_of_the_assistants(gateway: Gateway) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    [block] = client_of(gateway).messages.create(**{**ASKED, "messages": messages}).content
    assert block.type == "text"
    assert block.text.startswith("user\nGrüße 👋🏽\nassistant\nHellouser")


@pytest.mark.parametrize(
    ("choice", "expected", "several"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
    ],
)
def test_choices_of_tools(choice: Any, expected: str, several: bool) -> None:
    chat = body_of(messages=MESSAGES, tools=[ADD], tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, several)


def test_what_an_answer_has_can_be_sent_back(tool_gateway: Gateway) -> None:
    client = client_of(tool_gateway)
    content = client.messages.create(**TOOLED).content
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in content
        if block.type == "tool_use"
    ]
    dumped = [block.model_dump() for block in content]  # with the fields of the client that no answer here has
    for answer in (content, dumped):
        messages: Any = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
        assert client.messages.create(**{**TOOLED, "messages": messages, "max_tokens": 3}).content


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"output_config": {"effort": "little"}}, "output_config.effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "'messages'"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": CALLING}]}, "the last message calls tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": None}, "field 'max_tokens' is required"),
        ({"nonsense": 1}, "nonsense"),
        # These are found in the chat that the request comes to.
        ({"messages": [{"role": "user", "content": "more " * 5000}]}, "maximum context length"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "refuses these messages"),
        ({"stop_sequences": ["x" * 1000] * 5}, "stop_sequences"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_a_mistake_is_told_in_anthropics_shape(tool_gateway: Gateway, fields: dict[str, Any], field: str) -> None:
    with tool_gateway.http() as http:
        response = http.post("/v1/messages", json={**ASKED, **fields})
    assert response.status_code == 400
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert field in answer["error"]["message"]
    assert set(answer) == {"type", "error"}


def test_the_models(gateway: Gateway) -> None:
    client = client_of(gateway)
    page = client.models.list()
    assert [model.id for model in page] == ["chat", "code"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "chat", "code")
    model = client.models.retrieve("code")
    assert model == page.data[1]
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", "code", MAX_MODEL_LEN)
    assert int(model.created_at.timestamp()) == gateway.models["code"].created
    assert [model.id for model in client_of(gateway, "/models/code").models.list()] == ["code"]
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_errors_reach_the_client_as_its_own_exceptions(gateway: Gateway) -> None:
    client = client_of(gateway)
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.messages.create(**{**ASKED, "model": "other"})
    with pytest.raises(anthropic.InternalServerError) as raised:
        client.messages.create(**ASKED, extra_body={"cache_salt": "starve"})
    assert raised.value.body["error"]["type"] == "overloaded_error"
    with gateway.http() as http:
        answer = http.get("/models/chat/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


@pytest.fixture
def locked_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(api_key="secret", max_body_bytes=1000))
    yield gateway
    stop()


def test_the_key_may_come_as_anthropics_clients_send_it(locked_gateway: Gateway) -> None:
    assert client_of(locked_gateway, key="secret").messages.create(**ASKED).content
    for client in (client_of(locked_gateway, key="wrong"), client_of(locked_gateway, key="secre")):
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client.messages.create(**ASKED)
        assert raised.value.body["error"]["type"] == "authentication_error"
    bearer = anthropic.Anthropic(base_url=locked_gateway.url, auth_token="secret", api_key=None, max_retries=0)
    assert bearer.messages.count_tokens(model="chat", messages=MESSAGES).input_tokens > 0
    too_long = {**ASKED, "system": "x" * 2000}
    with pytest.raises(anthropic.APIStatusError) as refused:
        client_of(locked_gateway, key="secret").messages.create(**too_long)
    assert (refused.value.status_code, refused.value.body["error"]["type"]) == (413, "request_too_large")


def test_a_stream_cut_by_a_dying_engine_is_an_error(slow_gateway: Gateway) -> None:
    client, engine = slow_gateway.clients["chat"], slow_gateway.engines["chat"]
    stream = client_of(slow_gateway).messages.create(**{**ASKED, "max_tokens": 4000}, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    engine.stop()
    slow_gateway.call(lambda: client.engine_down("was killed by SIGKILL", retry_after_s=3))
    with pytest.raises(anthropic.APIStatusError, match="stopped"):
        list(stream)
