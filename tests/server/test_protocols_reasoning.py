"""Reasoning in OpenAI's responses and Anthropic's messages, with their own clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway, train_tokenizer

from swiftkv.server.messages_api.body import MessagesBody
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.hermes import HermesParser

# The echo engine answers with the prompt: what a user writes, the model thinks.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ tools | tojson if tools }}"
    "{{ '' if enable_thinking }}{% if add_generation_prompt %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CONTENT = f"So it is.\n</think>\n\nYes.\n{CALL}"
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("thinker")
    train_tokenizer(directory, ["<think>", "</think>"], TEMPLATE)
    tokenizer = Tokenizer.from_pretrained(directory)
    reasoning = choose_reasoning("qwen3", tokenizer)
    gateway, stop = start_gateway(
        tmp_path_factory.mktemp("thinking"), tokenizer, lending=False, reasoning=reasoning, tool_parser=HermesParser
    )
    yield gateway
    stop()


def num_tokens(gateway: Gateway) -> int:
    return len(gateway.models["chat"].tokenizer.encode(CONTENT))


def test_responses_have_an_item_of_reasoning(thinking: Gateway) -> None:
    client = thinking.openai()
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    asked: Any = {"model": "chat", "input": CONTENT, "max_output_tokens": num_tokens(thinking), "tools": tools}
    whole = client.responses.create(**asked, reasoning={"effort": "high"})
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning = whole.output[0]
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or []] == ["So it is."]
    assert whole.output_text == "Yes."
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert whole.reasoning is not None
    assert whole.reasoning.effort == "high"
    events = list(client.responses.create(**asked, stream=True))
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "So it is."
    names = [event.type.removeprefix("response.") for event in events[2:] if not event.type.endswith(".delta")]
    assert names[:5] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    shown = [item.to_dict() for item in events[-1].response.output]  # type: ignore[union-attr]
    for item, streamed in zip(whole.output, shown, strict=True):
        assert {**item.to_dict(), "id": "", "call_id": ""} == {**streamed, "id": "", "call_id": ""}


def test_messages_have_a_block_of_thinking(thinking: Gateway) -> None:
    client = anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    asked: Any = {
        "model": "chat",
        "messages": [{"role": "user", "content": CONTENT}],
        "max_tokens": num_tokens(thinking),
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].type == "thinking"
    assert whole.content[0].thinking == "So it is."
    with client.messages.stream(**asked) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(thoughts) == "So it is."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]


def test_an_answer_cut_off_in_its_reasoning_is_incomplete(thinking: Gateway) -> None:
    response = thinking.openai().responses.create(model="chat", input=CONTENT, max_output_tokens=3)
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]  # type: ignore[union-attr]


def test_earlier_reasoning_is_given_to_the_template() -> None:
    items: Any = [
        {"role": "user", "content": "1"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "deep"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
    ]
    chat = ResponsesBody.model_validate({"input": items}).chat
    assert [message.reasoning_content for message in chat.messages] == [None, "deep", None, None, None]


@pytest.mark.parametrize(("kind", "expected"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, expected: bool) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "thinking": {"type": kind}}
    body = MessagesBody.model_validate({**asked, "output_config": {"effort": "max"}})
    assert body.chat.chat_template_kwargs == {"enable_thinking": expected}
    assert body.chat.reasoning_effort == "max"
