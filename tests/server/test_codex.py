"""The requests that the Codex CLI sends to a server that is not OpenAI's, as far as its users have shown them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from echo_gateway import Gateway

from swiftkv.server.responses_api.body import ResponsesBody

HEADERS = {
    "originator": "codex_cli_rs",
    "session_id": "019a",
    "user-agent": "codex_cli_rs/0.154.0",
    "version": "0.154.0",
}
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"Grüße"\n*** End Patch'
RUN: dict[str, Any] = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
APPLY: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
MCP: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files",
    "tools": [
        {
            "type": "function",
            "name": "read",
            "description": "Reads a file",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
    ],
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": {"type": "object"}},
]


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


CALLS = "\n".join(
    [called("apply_patch", input=PATCH), called("mcp__files__read", path="a.txt"), called("exec_command", cmd="ls")]
)


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def turn(**fields: Any) -> dict[str, Any]:
    return {
        "model": "chat",
        "instructions": "You are a coding agent.",
        "input": [message("developer", "You may write files."), message("user", CALLS)],
        "tools": [RUN, APPLY, MCP, *HOSTED],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "019b", "x-codex-turn-metadata": "m" * 5000},
        **fields,
    }


def post(gateway: Gateway, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    with gateway.http() as http:
        return http.post("/v1/responses", json=body, headers=HEADERS if headers is None else headers)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data: ")]


def test_calls_name_tools_as_the_client_does(tool_gateway: Gateway) -> None:
    events = events_of(post(tool_gateway, turn()))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    custom, of_namespace, plain = items[1:4]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (of_namespace["type"], of_namespace["namespace"]) == ("function_call", "mcp__files")
    assert (of_namespace["name"], json.loads(of_namespace["arguments"])) == ("read", {"path": "a.txt"})
    assert (plain["name"], "namespace" in plain) == ("exec_command", False)
    told = [event for event in events if event.get("item_id") == custom["id"]]
    assert [event["type"].removeprefix("response.custom_tool_call_input.") for event in told] == ["delta", "done"]
    assert {told[0]["delta"], told[1]["input"]} == {PATCH}
    done = next(event for event in events if event.get("item_id") == of_namespace["id"] and "arguments" in event)
    assert done["name"] == "read"


def test_the_official_client_reads_custom_calls(tool_gateway: Gateway) -> None:
    asked: Any = turn(stream=False)
    del asked["client_metadata"]
    output = tool_gateway.openai().responses.create(**asked).output
    assert output[1].type == "custom_tool_call"
    assert output[1].input == PATCH


def test_an_answer_repeats_the_tools_that_the_model_was_shown(tool_gateway: Gateway) -> None:
    answer = post(tool_gateway, turn(stream=False)).json()
    assert [tool["type"] for tool in answer["tools"]] == ["function", "custom", "namespace"]


def test_calls_can_be_sent_back(tool_gateway: Gateway) -> None:
    output = post(tool_gateway, turn(stream=False)).json()["output"][:4]
    results = [
        {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "Done"},
        {
            "type": "function_call_output",
            "call_id": output[2]["call_id"],
            "output": [
                {"type": "input_text", "text": "A picture:"},
                {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"},
            ],
        },
        {"type": "function_call_output", "call_id": output[3]["call_id"], "output": "a.txt"},
    ]
    left_out = [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}]
    reasoning = [{"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}]
    asked = turn(input=[*turn()["input"], *reasoning, *left_out, *output, *results])
    assert events_of(post(tool_gateway, asked))[-1]["type"] == "response.incomplete"
    shown = [each.for_template() for each in ResponsesBody.model_validate(asked).chat.messages]
    roles = [each["role"] for each in shown]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool", "tool"]
    functions = [call["function"] for call in shown[3]["tool_calls"]]
    assert functions == [
        {"name": "apply_patch", "arguments": {"input": PATCH}},
        {"name": "mcp__files__read", "arguments": {"path": "a.txt"}},
        {"name": "exec_command", "arguments": {"cmd": "ls"}},
    ]
    unseen = "[This is of the type input_image, which this model cannot read: it takes text.]"
    assert shown[5]["content"] == f"A picture:\n{unseen}"


@pytest.mark.parametrize("arguments", ['{"cmd": "l', "[]", "ls", '"ls"'])
def test_arguments_that_are_cut_or_wrong_hold_up_no_conversation(tool_gateway: Gateway, arguments: str) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "exec_command", "arguments": arguments}
    asked = turn(input=[message("user", "go"), call], max_output_tokens=1)
    assert post(tool_gateway, asked).status_code == 200
    shown = ResponsesBody.model_validate(asked).chat.messages[-1].for_template()
    assert shown["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


def test_tools_become_functions() -> None:
    tools = ResponsesBody.model_validate(turn()).chat.tools or []
    run, apply, read = (tool.function for tool in tools)
    assert (run.name, run.parameters) == ("exec_command", RUN["parameters"])
    assert read.name == "mcp__files__read"
    assert apply.parameters is not None
    assert apply.parameters["required"] == ["input"]
    assert apply.description is not None
    assert "start: /.+/s" in apply.description


def test_without_tools_that_it_can_show_a_model_calls_none(gateway: Gateway) -> None:
    """Models whose chat template takes no tools serve such requests, too."""
    assert post(gateway, turn(tools=HOSTED, max_output_tokens=1)).status_code == 200
    assert post(gateway, turn(tools=[], max_output_tokens=1)).status_code == 200


def test_a_call_that_is_cut_shows_what_there_is(tool_gateway: Gateway) -> None:
    whole = post(tool_gateway, turn(stream=False)).json()
    text = whole["output"][0]["content"][0]["text"]
    prefix = f'{text}\n<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": "*** Be'
    num_tokens = len(tool_gateway.models["chat"].tokenizer.encode(prefix))
    answer = post(tool_gateway, turn(stream=False, max_output_tokens=num_tokens + 6)).json()
    cut = answer["output"][-1]
    assert (cut["type"], cut["status"]) == ("custom_tool_call", "incomplete")
    assert cut["input"].startswith('{"input": "*** B')


def test_fields_that_nobody_knows_are_left_out_for_codex_alone(tool_gateway: Gateway) -> None:
    asked = turn(stream=False, max_output_tokens=1, access_token_hint="x")
    asked["input"][0]["end_turn"] = True
    assert post(tool_gateway, asked).status_code == 200
    refused = post(tool_gateway, asked, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_field")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools.0"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "https://a"}]}, "tools.0"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": HOSTED, "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input.0.content"),
    ],
)
def test_what_an_agent_would_wait_for_in_vain_is_refused(
    tool_gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    response = post(tool_gateway, turn(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, "mcp__files__read"),
    ],
)
def test_a_named_choice_is_of_the_function(choice: dict[str, str], name: str) -> None:
    chosen = ResponsesBody.model_validate(turn(tool_choice=choice)).chat.tool_choice
    assert chosen is not None
    assert not isinstance(chosen, str)
    assert chosen.function.name == name
