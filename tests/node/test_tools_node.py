"""Tools of a whole node, with OpenAI's own client: a grammar makes the calls that a random model cannot know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}Write <tool_call>…</tool_call>"
    "<|end|>{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def function(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "A tool", "parameters": parameters}}


TOOLS = [function("add", a=NUMBER, b=NUMBER), function("weather", city={"enum": ["Ulm", "Köln"]})]
ASKED: dict[str, Any] = {"model": "chat", "tools": TOOLS, "temperature": 1.0, "seed": 5, "max_tokens": 3000}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    checkpoint = tmp_path_factory.mktemp("tools")
    make_checkpoint(checkpoint, "llama", tokenizer=True, max_position_embeddings=8192)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    temporary = short_temporary_directory()
    model = {"name": "chat", "path": str(checkpoint), "dtype": "float32", "threads": 1, "max_model_len": 8192}
    config = {"node": {"port": 0}, "models": [{**model, "kv_cache": {"memory": "32MiB"}}]}
    with NodeProcess(config, tmp_path_factory.mktemp("node"), temporary) as node:
        yield openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
    remove(temporary)


def run(call: Any) -> str:
    arguments = json.loads(call.function.arguments)
    return str(arguments["a"] + arguments["b"]) if call.function.name == "add" else f"Rain in {arguments['city']}"


def test_a_loop_of_tools_goes_from_question_to_answer(client: openai.OpenAI) -> None:
    messages = list(MESSAGES)
    choice = client.chat.completions.create(messages=messages, tool_choice="required", **ASKED).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls
    messages.append(choice.message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": each.id, "content": run(each)} for each in choice.message.tool_calls]
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    answer = client.chat.completions.create(messages=messages, tool_choice="none", **{**ASKED, "max_tokens": 8})
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {**ASKED, "messages": MESSAGES, "tool_choice": "required"}
    whole = client.chat.completions.create(**asked).choices[0].message
    calls: dict[int, list[str]] = {}
    finish = None
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason
        assert not delta.content
        for part in delta.tool_calls or []:
            assert part.function is not None
            if part.index not in calls:
                assert (part.type, part.id is not None) == ("function", True)
                calls[part.index] = [str(part.function.name), ""]
            calls[part.index][1] += part.function.arguments or ""
    assert finish == "tool_calls"
    assert whole.tool_calls
    assert [*calls.values()] == [[call.function.name, call.function.arguments] for call in whole.tool_calls]


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(messages=MESSAGES, tool_choice=named, n=3, **ASKED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert run(call).startswith("Rain in ")


def test_without_parallel_calls_there_is_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, n=4, **ASKED
    )
    assert [len(choice.message.tool_calls or []) for choice in answer.choices] == [1] * 4
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


def test_a_model_that_may_choose_is_free(client: openai.OpenAI) -> None:
    """A random model chooses to say nothing sensible; the tools are in its prompt."""
    free = client.chat.completions.create(messages=MESSAGES, **{**ASKED, "max_tokens": 5})
    without = client.chat.completions.create(messages=MESSAGES, tool_choice="none", **{**ASKED, "max_tokens": 5})
    assert free.choices[0].message.tool_calls is None
    assert free.usage is not None
    assert without.usage is not None
    assert free.usage.prompt_tokens > without.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [function("f", x={"type": "str"})], "tool_choice": "required"}, "tools"),
        ({"tools": [function("a b")]}, "tools.0.function.name"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_a_mistake_with_tools_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASKED, "messages": MESSAGES, **fields})
    assert refused.value.param == param
