"""The requests that Claude Code sends to a server that is not Anthropic's, as far as its users have shown them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from echo_gateway import MAX_MODEL_LEN, Gateway

from swiftkv.server.body import parse_body
from swiftkv.server.errors import ApiError
from swiftkv.server.messages_api.body import MessagesBody

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.208 (external, cli)",
    "authorization": "Bearer none",
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PROMPT = "You are a coding agent."
READ: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
}
DEFERRED = {**READ, "name": "mcp__files__write", "defer_loading": True, "allowed_callers": ["direct"]}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def attribution(nonce: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.208.3af; cc_entrypoint=cli; cch={nonce};"


def first_turn(nonce: str = "0aaa9", **fields: Any) -> dict[str, Any]:
    return {
        "model": "chat",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [{"type": "text", "text": attribution(nonce)}, {"type": "text", "text": PROMPT, **CACHED}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nThe date is today's.\n</system-reminder>"},
                    {"type": "text", "text": "What is in a.txt?", **CACHED},
                ],
            },
            {"role": "system", "content": "These agents are there: none."},
        ],
        "tools": [READ, DEFERRED],
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s" * 36})},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **fields,
    }


def second_turn() -> dict[str, Any]:
    asked = first_turn()
    results = [
        {"type": "text", "text": "A picture:"},
        PNG,
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A letter."}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
        {"type": "tool_reference", "tool_name": "mcp__files__write"},
    ]
    changed = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "mcp__files__write"}}
    asked["messages"] += [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": ""},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"title": "A"}]},
                {"type": "tool_use", "id": "1", "name": "Read", "input": {"file_path": "a.txt"}, **CACHED},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": results, "is_error": False, **CACHED}],
        },
        {"role": "system", "content": [changed]},
    ]
    return asked


def post(gateway: Gateway, body: dict[str, Any], path: str = "/v1/messages?beta=true") -> httpx.Response:
    with gateway.http() as http:
        return http.post(path, json=body, headers=HEADERS)


def body_of(fields: dict[str, Any], *, leaves_out_unknown: bool = False) -> MessagesBody:
    return parse_body(json.dumps(fields).encode(), MessagesBody, leaves_out_unknown=leaves_out_unknown)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("asked", [first_turn(), second_turn()], ids=["first turn", "second turn"])
def test_a_turn_is_answered(tool_gateway: Gateway, asked: dict[str, Any]) -> None:
    events = events_of(post(tool_gateway, asked))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert text.startswith(f"system\n{PROMPT}\nuser\n")  # it is echoed from the beginning of the prompt on
    assert events[-1]["type"] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
    usage = events[-2]["usage"]
    num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt_tokens + usage["output_tokens"] == MAX_MODEL_LEN


def test_a_limit_that_is_reached_is_no_full_context(tool_gateway: Gateway) -> None:
    answer = post(tool_gateway, first_turn(max_tokens=7, stream=False)).json()
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 7)


@pytest.mark.parametrize(
    "system",
    [
        f"{attribution('36ee5')}\n{PROMPT}",
        [{"type": "text", "text": attribution("36ee5")}, {"type": "text", "text": PROMPT}],
        [{"type": "text", "text": f"{attribution('36ee5')}\n{PROMPT}", **CACHED}],
    ],
    ids=["text", "block of its own", "one block"],
)
def test_the_line_that_changes_with_each_request_is_in_no_prompt(system: Any) -> None:
    first = body_of({**first_turn(), "system": system}).chat.messages[0]
    assert first.for_template() == {"role": "system", "content": PROMPT}


def test_a_prompt_of_nothing_else_is_none() -> None:
    assert body_of(first_turn(system=attribution("36ee5"))).chat.messages[0].role == "user"
    named = f"Look at {attribution('36ee5')}"
    assert body_of(first_turn(system=named)).chat.messages[0].content == named


def test_the_prefix_of_a_turn_is_found_in_the_cache(tool_gateway: Gateway) -> None:
    system = [{"type": "text", "text": attribution("1")}, {"type": "text", "text": f"{PROMPT} Be brief. " * 30}]
    usages = []
    for nonce in ("36ee5", "0aaa9"):
        system[0]["text"] = attribution(nonce)
        asked = first_turn(system=system, stream=False, max_tokens=1)
        usages.append(post(tool_gateway, asked).json()["usage"])
    assert usages[0]["cache_read_input_tokens"] < 32 < usages[1]["cache_read_input_tokens"]


def test_blocks_of_a_second_turn_become_messages() -> None:
    shown = [message.for_template() for message in body_of(second_turn()).chat.messages]
    assert [message["role"] for message in shown] == ["system", "user", "system", "assistant", "tool", "system"]
    assert shown[3]["tool_calls"][0]["function"] == {"name": "Read", "arguments": {"file_path": "a.txt"}}
    assert shown[3]["content"] == ""
    assert shown[4]["content"].split("\n") == [
        "A picture:",
        "[This is of the type image, which this model cannot read: it takes text.]",
        "A letter.",
        "[This is of the type document, which this model cannot read: it takes text.]",
        "The tool mcp__files__write can be called.",
    ]
    assert shown[5]["content"] == "The tool mcp__files__write can be called from here on."


def test_a_tool_may_be_taken_away() -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Read"}}
    asked = first_turn(messages=[{"role": "user", "content": "a"}, {"role": "system", "content": [removal]}])
    assert body_of(asked).chat.messages[-1].for_template()["content"] == "The tool Read cannot be called any more."


def test_deferred_tools_are_in_the_prompt_from_the_beginning() -> None:
    tools = body_of(first_turn()).chat.tools or []
    assert [tool.function.name for tool in tools] == ["Read", "mcp__files__write"]


def test_fields_of_betas_that_nobody_knows_are_left_out(tool_gateway: Gateway) -> None:
    new = {"type": "text", "text": "a", "color": "red"}
    fields = {"speed": "fast", "messages": [{"role": "user", "content": [new]}], "max_tokens": 1, "stream": False}
    asked = first_turn(**fields)
    assert post(tool_gateway, asked).status_code == 200
    with pytest.raises(ApiError, match=r"speed|color"):
        body_of(asked)
    body = body_of(asked, leaves_out_unknown=True)
    assert body.chat.messages[1].for_template() == {"role": "user", "content": "a"}
    with tool_gateway.http() as http:
        refused = http.post("/v1/messages", json=asked)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}, "tools.0"),
        ({"messages": [{"role": "user", "content": [PNG]}]}, "messages.0.content.0"),
    ],
)
def test_what_a_beta_asks_for_and_nobody_can_do_is_refused(
    tool_gateway: Gateway, fields: dict[str, Any], message: str
) -> None:
    response = post(tool_gateway, first_turn(**fields))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("words", [5000, 500_000], ids=["too many tokens", "too many characters to count them"])
def test_a_prompt_that_is_too_long_is_told_as_the_agent_understands_it(tool_gateway: Gateway, words: int) -> None:
    long = [{"role": "user", "content": "more " * words}]
    error = post(tool_gateway, first_turn(messages=long)).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")


def test_many_tools_with_long_names_are_taken(tool_gateway: Gateway) -> None:
    tools = [{**READ, "name": f"mcp__{'server' * 18}__{number}"} for number in range(300)]
    asked = first_turn(tools=tools)
    counted = {name: asked[name] for name in ("model", "system", "messages", "tools", "thinking")}
    counted["context_management"] = asked["context_management"]
    response = post(tool_gateway, counted, "/v1/messages/count_tokens?beta=true")
    assert response.json()["input_tokens"] > 0
    assert post(tool_gateway, {**asked, "max_tokens": 1}).status_code == 200


def test_the_address_itself_answers(tool_gateway: Gateway) -> None:
    with tool_gateway.http() as http:
        assert http.head("/").status_code == 200
        assert http.get("/v1/models?limit=1000", headers=HEADERS).json()["data"][0]["id"] == "chat"
