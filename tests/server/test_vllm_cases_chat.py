"""Cases after vLLM's own tests of its server: chats, tools, responses, and what swiftkv refuses on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from echo_gateway import Gateway

from swiftkv.server.protocol import ChatMessage
from swiftkv.server.tools import ToolFields, template_tools

USER: Any = [{"role": "user", "content": "what is the weather in Paris?"}]
CHAT: dict[str, Any] = {"model": "chat", "messages": USER, "max_tokens": 5}
COMPLETION: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 1}
RESPONSE: dict[str, Any] = {"model": "chat", "input": "hello", "max_output_tokens": 5}
ARGUMENTS = {"city": "Dallas", "state": "TX"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
FUNCTION: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
CALLING: dict[str, Any] = {
    "model": "chat", "messages": [{"role": "user", "content": f"{CALL} END"}], "tools": [TOOL], "stop": "END",
}  # fmt: skip


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.http() as client:
        yield client


@pytest.fixture(scope="module")
def tool_http(tool_gateway: Gateway) -> Iterator[httpx.Client]:
    with tool_gateway.http() as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    response = http.post(path, json=body)
    return response.status_code, response.json()


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    status, answer = post(http, "/v1/chat/completions", {**CHAT, **fields})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("number", [0, 5])
def test_each_token_has_as_many_others_as_were_asked_for(http: httpx.Client, number: int) -> None:
    """After test_chat's `test_zero_logprobs_chat` and `test_some_logprobs_chat`."""
    [choice] = chat(http, logprobs=True, top_logprobs=number)["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [number] * 5


def test_the_tokens_of_a_chat_have_as_many_logprobs_as_were_asked_for(http: httpx.Client) -> None:
    """After `test_prompt_logprobs_chat` and `test_more_than_one_prompt_logprobs_chat`."""
    for number in (1, 2):
        first, *others = chat(http, prompt_logprobs=number)["prompt_logprobs"]
        assert first is None
        assert {len(entry) for entry in others} == {number}
    status, answer = post(http, "/v1/chat/completions", {**CHAT, "prompt_logprobs": -1})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {}, {"structured_outputs": {"json": {"type": "object"}}}])
def test_a_choice_that_is_null_was_not_made(tool_http: httpx.Client, fields: dict[str, Any]) -> None:
    """After test_tool_choice_null and `test_chat_completion_request_with_no_tools`."""
    left_out, null = (chat(tool_http, **fields, **also) for also in ({}, {"tool_choice": None}))
    assert left_out["choices"] == null["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "bogus"},
        {"tools": [TOOL], "tool_choice": {}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nondefined"}}},
        {"tool_choice": NAMED},
        {"tool_choice": "required"},
        {"tools": None, "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED, "structured_outputs": {"json": {"type": "object"}}},
    ],
    ids=["bogus", "empty", "unknown", "named without tools", "required without tools", "null tools", "grammar"],
)
def test_a_choice_that_does_not_fit_is_refused(tool_http: httpx.Client, fields: dict[str, Any]) -> None:
    """After `test_inconsistent_tool_choice_and_tools`, `test_invalid_tool_choice_is_still_rejected`,
    `test_chat_completion_request_with_tool_choice_but_no_tools` and
    `test_structured_outputs_with_named_tool_choice_rejected`."""
    status, answer = post(tool_http, "/v1/chat/completions", {**CHAT, **fields})
    assert status == 400
    assert answer["error"]["param"].startswith("tool_choice")


def test_a_grammar_goes_with_tools_that_may_be_called(tool_http: httpx.Client) -> None:
    """After `test_structured_outputs_with_auto_tool_choice_allowed`."""
    fields = {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"json": {"type": "object"}}}
    assert chat(tool_http, **fields)["choices"]


def test_a_call_is_told_once_and_whole(tool_gateway: Gateway) -> None:
    """After test_tool_calls' `test_tool_call_and_choice`."""
    create = tool_gateway.openai().chat.completions.create
    whole = create(**CALLING).choices[0]
    [call] = whole.message.tool_calls
    assert (whole.message.role, whole.finish_reason, call.type) == ("assistant", "tool_calls", "function")
    assert len(call.id) >= 9
    assert json.loads(call.function.arguments) == ARGUMENTS
    choices = [chunk.choices[0] for chunk in create(**CALLING, stream=True)]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    [streamed_id] = [part.id for part in parts if part.id]
    assert len(streamed_id) >= 9
    assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_the_client_parsed_can_be_sent_back(tool_gateway: Gateway, is_streamed: bool) -> None:
    """OpenAI's client adds `parsed` to the message and `parsed_arguments` to its calls."""
    completions = tool_gateway.openai().chat.completions
    strict: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
    asked: Any = {**CALLING, "tools": [strict]}
    if is_streamed:
        with completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = completions.parse(**asked).choices[0].message
    [call] = message.tool_calls
    assert call.function.parsed_arguments == ARGUMENTS
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "98 degrees"}
    assert completions.create(**{**asked, "messages": [*USER, message, result]}).choices


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_can_be_sent_back(tool_http: httpx.Client, arguments: str) -> None:
    """After `test_no_args_tool_call` and `test_tool_call_with_results`."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "98 degrees"},
    ]
    message = chat(tool_http, messages=history, tools=[TOOL], max_tokens=50)["choices"][0]["message"]
    assert "98 degrees" in message["content"]
    assert "tool_calls" not in message


@pytest.mark.parametrize("arguments", ['{"city": "Dal', '{"city": "a "b""}', "[]", "Dallas"])
def test_arguments_that_are_cut_or_wrong_hold_up_no_conversation(tool_http: httpx.Client, arguments: str) -> None:
    """After test_chat_utils' cases of malformed arguments: LangChain and LiteLLM send them back as they got them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Error: the arguments are not JSON"}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert "Error" in chat(tool_http, messages=history, tools=[TOOL], max_tokens=60)["choices"][0]["message"]["content"]
    shown = ChatMessage.model_validate(history[-2]).for_template()["tool_calls"][0]["function"]
    assert shown == {"name": "get_weather", "arguments": {"arguments": arguments}}


def test_what_clients_of_several_providers_add_is_passed_over(tool_http: httpx.Client) -> None:
    """LiteLLM's answers have fields of their own, which come back; it and LangChain mark what Anthropic is to cache."""
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}, "index": 0}
    added = {
        "provider_specific_fields": {"reasoning": "Hm."},
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    }
    plain = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    marked = {**plain, **added, "tool_calls": [{**call, "provider_specific_fields": {"thought_signature": "a"}}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "98 degrees"}
    system = {"type": "text", "text": "Be kind."}
    answers = [
        chat(tool_http, messages=messages, tools=[tool], max_tokens=200)["choices"][0]["message"]["content"]
        for messages, tool in (
            ([{"role": "system", "content": [system]}, *USER, plain, result], TOOL),
            ([{"role": "system", "content": [system | cached]}, *USER, marked, result | cached], TOOL | cached),
        )
    ]
    assert answers[0] == answers[1]
    shown = [template_tools(ToolFields.model_validate({"tools": [tool]})) for tool in (TOOL, TOOL | cached)]
    assert shown[0] == shown[1]


def test_reasoning_goes_before_reasoning_content() -> None:
    """After `test_reasoning_takes_precedence_over_reasoning_content` and
    `test_reasoning_content_normalized_to_reasoning`."""
    message = {"role": "assistant", "content": "4", "reasoning": "the newer", "reasoning_content": "the older"}
    for shown, name in (("the newer", "reasoning"), ("the older", "reasoning_content")):
        given = {key: value for key, value in message.items() if key == name or "reasoning" not in key}
        assert ChatMessage.model_validate(given).for_template()["reasoning_content"] == shown
    assert ChatMessage.model_validate(message).for_template()["reasoning_content"] == "the newer"


PAIRS = {
    "response.incomplete": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


@pytest.mark.parametrize("fields", [{}, {"tools": [{"type": "function", **FUNCTION}], "input": f"{CALL} and {CALL}"}])
def test_what_a_stream_of_events_opens_it_closes(tool_gateway: Gateway, fields: dict[str, Any]) -> None:
    """After test_simple's `test_streaming_types` and test_function_call's
    `test_function_calling_with_streaming_types`."""
    asked: dict[str, Any] = {"model": "chat", "input": "a story", "max_output_tokens": 100, **fields}
    opened: list[str] = []
    item: tuple[Any, Any] = (None, None)
    for event in tool_gateway.openai().responses.create(**asked, stream=True):
        if event.type == "response.output_item.added":
            item = (event.item.id, event.output_index)
        if event.type in PAIRS:
            assert opened.pop() == PAIRS[event.type]
        elif event.type in PAIRS.values() and opened[-1:] != [event.type]:
            opened.append(event.type)
        if hasattr(event, "item_id"):
            assert (event.item_id, event.output_index) == item
    assert opened == []


def test_developers_instruct_as_the_instructions_do(http: httpx.Client) -> None:
    """After `test_responses_request_folds_developer_messages_into_instructions`."""
    said = {"role": "user", "content": "Hello"}
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be concise."}]}
    first, second = (
        post(http, "/v1/responses", {**RESPONSE, "max_output_tokens": 60, **fields})[1]
        for fields in ({"instructions": "Be concise.", "input": [said]}, {"input": [developer, said]})
    )
    texts = [answer["output"][0]["content"][0]["text"] for answer in (first, second)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("system\nBe concise.")


def test_responses_are_sampled_as_chats_are(http: httpx.Client) -> None:
    """After `test_extra_sampling_params` and `test_basic_sampling_params`."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": -(2**63)}
    status, answer = post(http, "/v1/responses", {**RESPONSE, **sampling})
    assert (status, answer["status"]) == (200, "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [{**USER[0], "extra_field": "0"}]}, "messages.0.extra_field"),
        ("/v1/chat/completions", {"messages": [{**USER[0], "role": "my-custom-role"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"echo": True}, "echo"),
        ("/v1/chat/completions", {"logprobs": "true"}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"use_beam_search": True, "n": 2}, "use_beam_search"),
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/responses", {"stop": "STOP"}, "stop"),
        ("/v1/responses", {"enable_response_messages": True}, "enable_response_messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_vllm_takes_and_swiftkv_does_not_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    """The rows of docs/from-vllm.md that say «refused»."""
    body = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE}[path]
    status, answer = post(http, path, {**body, **fields})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_what_asks_for_no_tools_is_taken(http: httpx.Client, fields: dict[str, Any]) -> None:
    """Unlike `test_chat_completion_request_with_no_tools`, where an empty list is a mistake."""
    assert chat(http, **fields)["choices"]


@pytest.mark.parametrize("path", ["/load", "/ping", "/invocations", "/tokenizer_info", "/pooling", "/classify"])
def test_routes_that_are_not_there_say_so(http: httpx.Client, path: str) -> None:
    """Unlike `test_server_load`, `test_invocations`, `test_tokenizer_info_basic` and the tests of pooling."""
    response = http.get(path) if path in ("/load", "/ping", "/tokenizer_info") else http.post(path, json={})
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
