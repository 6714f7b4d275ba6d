"""Tools of a whole node in each protocol, with its own client and with an agent framework that nobody here wrote.

A grammar makes the calls that a random model cannot know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any

import agents
import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.checkpoints import SHAPE, make_checkpoint, make_tokenizer
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}Write <tool_call>…</tool_call>"
    "<|end|>{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
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
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint = tmp_path_factory.mktemp("tools")
    make_checkpoint(checkpoint, "llama", max_position_embeddings=8192)
    tokenizer = make_tokenizer(int(SHAPE["vocab_size"]) - 4)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])  # not special, as Qwen has them
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    temporary = short_temporary_directory()
    model = {"name": "chat", "path": str(checkpoint), "dtype": "float32", "threads": 1, "max_model_len": 8192}
    config = {"node": {"port": 0}, "models": [{**model, "kv_cache": {"memory": "32MiB"}}]}
    with NodeProcess(config, tmp_path_factory.mktemp("node"), temporary) as node:
        yield node.url
    remove(temporary)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


@pytest.fixture
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    url = f"{str(client.base_url).removesuffix('v1/')}tokenize"
    tokens: list[int] = httpx.post(url, json={"prompt": text}, timeout=DEADLINE_S).json()["tokens"]
    return tokens


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


def test_grammars_and_calls_begin_behind_the_reasoning(client: openai.OpenAI) -> None:
    [end] = tokens_of(client, "</think>")
    thinks = {"logit_bias": {str(end): 5}, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    asked: dict[str, Any] = {**ASKED, "messages": MESSAGES, "n": 4, **thinks}
    called = client.chat.completions.create(tool_choice="required", **asked)
    for choice in called.choices:
        assert {run(call) for call in choice.message.tool_calls or []}
    schema = {"name": "sum", "schema": TOOLS[0]["function"]["parameters"]}
    del asked["tools"]
    held = client.chat.completions.create(response_format={"type": "json_schema", "json_schema": schema}, **asked)
    for choice in held.choices:
        assert {*json.loads(choice.message.content or "")} == {"a", "b"}
    thoughts = [
        choice.message.reasoning_content for choice in held.choices if hasattr(choice.message, "reasoning_content")
    ]
    assert any(thoughts)
    assert held.usage is not None
    assert held.usage.completion_tokens_details is not None
    assert held.usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize("opening", ["<tool_call>", "{"])
def test_a_model_that_may_choose_calls_or_answers_by_the_schema(client: openai.OpenAI, opening: str) -> None:
    """A bias chooses for the random model; all else is the grammar's doing."""
    first = tokens_of(client, opening)[0]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": TOOLS[0]["function"]["parameters"]}}
    asked: dict[str, Any] = {**ASKED, "messages": MESSAGES, "logit_bias": {str(first): 100}, "response_format": schema}
    for choice in client.chat.completions.create(n=3, **asked).choices:
        if opening == "{":
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
            assert {*json.loads(choice.message.content or "")} == {"a", "b"}
        else:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert all(run(call) for call in choice.message.tool_calls or [])
            assert choice.message.tool_calls


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
        ({"tool_choice": "required", "extra_body": {"guided_choice": ["yes", "no"]}}, "tool_choice"),
        ({"tools": [function("f", x={"type": "str"})], "tool_choice": "required"}, "tools"),
        ({"tools": [function("a b")]}, "tools.0.function.name"),
    ],
)
def test_a_mistake_with_tools_names_its_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASKED, "messages": MESSAGES, **fields})
    assert refused.value.param == param


Small = Annotated[int, Field(ge=0, le=99)]
QUESTION = "What is 12 + 30?"
ADDING = function("add", a=NUMBER, b=NUMBER)["function"]
RESPONSE_ASKED: dict[str, Any] = {
    "model": "chat",
    "input": QUESTION,
    "tools": [{"type": "function", **ADDING}],
    "max_output_tokens": 3000,
    "extra_body": {"seed": 5},
}
MESSAGE_ASKED: dict[str, Any] = {
    "model": "chat",
    "messages": MESSAGES,
    "tools": [{"name": "add", "description": "Adds", "input_schema": ADDING["parameters"]}],
    "max_tokens": 3000,
    "extra_body": {"seed": 5},
}


MAX_TURNS = 20  # a random model answers sooner or later


class Verdict(BaseModel):
    is_right: bool


async def run_agent(url: str, model_type: Any, called: list[tuple[int, int]], *, is_streamed: bool) -> Any:
    """Return the result of an agent that must call `add` in its first turn."""

    @agents.function_tool
    def add(a: Small, b: Small) -> int:
        """Add two numbers."""
        called.append((a, b))
        return a + b

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
    async with client:
        agent = agents.Agent(
            name="adder",
            instructions="You add numbers.",
            model=model_type("chat", openai_client=client),
            tools=[add],
            output_type=Verdict,
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=3000, extra_body={"seed": 5}
            ),
        )
        if not is_streamed:
            return await agents.Runner.run(agent, QUESTION, max_turns=MAX_TURNS)
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
        return result


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model_type", [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel])
def test_an_agent_calls_a_tool_and_answers(url: str, model_type: Any, is_streamed: bool) -> None:
    """From the second turn on the framework lets the model choose: a grammar allows calls, or the answer's schema."""
    agents.set_tracing_disabled(True)
    called: list[tuple[int, int]] = []
    result = asyncio.run(run_agent(url, model_type, called, is_streamed=is_streamed))
    assert called
    assert isinstance(result.final_output, Verdict)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == [sum(numbers) for numbers in called]
    assert result.context_wrapper.usage.requests == len(called) + 1


def total(arguments: dict[str, int]) -> str:
    return str(arguments["a"] + arguments["b"])


def test_a_loop_of_responses_goes_from_question_to_answer(client: openai.OpenAI) -> None:
    first = client.responses.create(**RESPONSE_ASKED, tool_choice="required")
    assert first.status == "completed"
    assert {item.type for item in first.output} == {"function_call"}
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": total(json.loads(item.arguments))}
        for item in first.output
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": QUESTION}, *first.output, *results]
    parsed = client.responses.parse(**{**RESPONSE_ASKED, "input": items}, tool_choice="none", text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)
    assert parsed.completed_at is not None


def test_a_stream_of_responses_has_the_calls_of_the_whole_answer(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "name": "add"}
    whole = client.responses.create(**RESPONSE_ASKED, tool_choice=named)
    with client.responses.stream(**RESPONSE_ASKED, tool_choice=named) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert names[-1] == "response.completed"
    [call], [streamed] = whole.output, final.output
    assert call.type == streamed.type == "function_call"
    assert (call.name, call.arguments) == (streamed.name, streamed.arguments)


def test_a_loop_of_messages_goes_from_question_to_answer(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(**MESSAGE_ASKED, tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": total(block.input)}
        for block in first.content
        if block.type == "tool_use"
    ]
    assert len(results) == len(first.content)
    turns: Any = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    asked = {**MESSAGE_ASKED, "messages": MESSAGE_ASKED["messages"] + turns}
    schema = {"type": "json_schema", "schema": {**Verdict.model_json_schema(), "additionalProperties": False}}
    answer = claude.messages.create(**asked, tool_choice={"type": "none"}, output_config={"format": schema})
    assert answer.stop_reason == "end_turn"
    [block] = answer.content
    assert block.type == "text"
    Verdict.model_validate_json(block.text)


def test_a_stream_of_messages_has_the_call_of_the_whole_answer(claude: anthropic.Anthropic) -> None:
    asked = {**MESSAGE_ASKED, "tool_choice": {"type": "tool", "name": "add"}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason == "tool_use"
    [block], [streamed] = whole.content, final.content
    assert block.type == streamed.type == "tool_use"
    assert (block.name, block.input) == (streamed.name, streamed.input)
