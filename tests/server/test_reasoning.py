"""Reasoning is told from the answer: by its tokens, whole and streamed, beside tools, stop strings and grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from typing import Any

import pytest
from echo_gateway import Gateway, start_gateway, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.engine.messages import ReasoningMarks
from swiftkv.errors import CheckpointError
from swiftkv.server.choices import Choice, Delta, StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.generation import SequenceOutput
from swiftkv.server.reasoning import ReasoningParser, TagParser
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tools import ToolUse

# The echo engine answers with the prompt: what a user writes, the model thinks.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ tools | tojson if tools }}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("thinker")
    train_tokenizer(directory, ["<think>", "</think>"], TEMPLATE)
    return Tokenizer.from_pretrained(directory)


def parser_of(tokenizer: Tokenizer, name: str | None = "qwen3") -> ReasoningParser:
    parser = choose_reasoning(name, tokenizer)
    assert parser is not None
    return parser


def parse(
    tokenizer: Tokenizer,
    text: str,
    *,
    prompt: str = "Hi\n<think>\n",
    name: str = "qwen3",
    cuts: list[int] | None = None,
    stops: list[str] | None = None,
    calls: bool = False,
    continues: bool = False,
) -> Delta:
    """Return what a client is told of an answer whose tokens come in pieces."""
    prompt_ids, ids = (tokenizer.encode(each, add_special_tokens=False) for each in (prompt, text))
    tools = ToolUse(TOOL_PARSERS["hermes"], [ToolFunction("f", {})], must_call=False, is_named=False, several=True)
    sections = parser_of(tokenizer, name).sections(prompt_ids, continues=continues)
    rules = StopRules(StopStrings(stops or []))
    choice = Choice(0, prompt_ids, tokenizer, rules, tools if calls else None, sections)
    total = Delta(0)
    ends = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts or range(len(ids)))})
    for begin, end in pairwise(ends):
        output = SequenceOutput(0, ids[begin:end], finish_reason="length" if end == len(ids) else None)
        total.append(choice.push(output))
        if total.finish_reason:
            break
    return total


CASES: list[tuple[str, dict[str, Any], tuple[str, str]]] = [
    ("So: 2 + 2.\n</think>\n\n4", {}, ("So: 2 + 2.", "4")),
    ("\n\n</think>\n\n  4\n", {}, ("", "4\n")),
    ("cut off in thou", {}, ("cut off in thou", "")),
    ("<think>twice</think>x", {}, ("twice", "x")),
    ("a </think> b </think> c <think>", {}, ("a", "b </think> c <think>")),
    ("Grüße 👋🏽 </think>你好", {}, ("Grüße 👋🏽", "你好")),
    ("\n4", {"prompt": "Hi\n<think>\n\n</think>\n\n"}, ("", "\n4")),
    ("<think>\nhm\n</think>\n\n4", {"prompt": "Hi\n"}, ("hm", "4")),
    ("just 4, <think>no</think>", {"prompt": "Hi\n"}, ("", "just 4, <think>no</think>")),
    ("hm</think>4", {"prompt": "Hi\n", "name": "deepseek_r1"}, ("hm", "4")),
    ("<think>hm</think>4", {"prompt": "Hi\n", "name": "deepseek_r1"}, ("hm", "4")),
    ("4", {"prompt": "Hi <think>\n</think>\n", "name": "deepseek_r1"}, ("", "4")),
    ("ing on</think>4", {"prompt": "Hi<think>\nGo", "continues": True}, ("ing on", "4")),
    ("ing on</think>4", {"prompt": "Hi", "continues": True}, ("", "ing on</think>4")),
    ("one STOP two</think>4", {"stops": ["STOP"]}, ("one", "")),
    ("one </think> two STOP", {"stops": ["STOP"]}, ("one", "two ")),
    ("one ST</think>OP two", {"stops": ["STOP"]}, ("one ST", "OP two")),
    ("one </think>\n\nFour", {"stops": ["</think>\n\nFive"]}, ("one", "Four")),
    ("one </think>\n\nFour", {"stops": ["</think>"]}, ("one", "")),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_reasoning_is_the_same_wherever_the_tokens_are_cut(
    thinker: Tokenizer, text: str, options: dict[str, Any], expected: tuple[str, str]
) -> None:
    for cuts in (None, [0], [1], [3], [5, 6]):
        total = parse(thinker, text, cuts=cuts, **options)
        assert (total.reasoning, total.text) == expected


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "é", "👋", "STOP", "ST", "word"]), max_size=10),
    prompt=st.sampled_from(["Hi", "Hi<think>\n", "Hi<think></think>\n"]),
    name=st.sampled_from(["qwen3", "deepseek_r1"]),
    stops=st.sampled_from([[], ["STOP"], ["</think>\n"]]),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_any_answer_is_the_same_in_one_piece_and_in_many(
    thinker: Tokenizer, parts: list[str], prompt: str, name: str, stops: list[str], cuts: list[int]
) -> None:
    options: dict[str, Any] = {"prompt": prompt, "name": name, "stops": stops}
    one, many = (parse(thinker, "".join(parts), cuts=each, **options) for each in ([0], cuts))
    assert (one.reasoning, one.text, one.num_reasoning_tokens) == (many.reasoning, many.text, many.num_reasoning_tokens)


def test_calls_come_behind_the_reasoning_and_none_are_in_it(thinker: Tokenizer) -> None:
    total = parse(thinker, f"Maybe {CALL}?\n</think>\n\nI call.\n{CALL}", calls=True)
    assert (total.reasoning, total.text) == (f"Maybe {CALL}?", "I call.")
    assert [call.function.name for call in total.calls if call.id] == ["f"]


def test_tokens_of_reasoning_are_counted_without_the_tags(thinker: Tokenizer) -> None:
    ids = thinker.encode("So: 2 + 2.\n", add_special_tokens=False)
    assert parse(thinker, "So: 2 + 2.\n</think>\n\n4").num_reasoning_tokens == len(ids)
    assert parse(thinker, "<think>So: 2 + 2.\n</think>4", prompt="Hi").num_reasoning_tokens == len(ids)
    assert parse(thinker, "4", prompt="Hi").num_reasoning_tokens == 0


def test_engines_are_told_where_reasoning_ends(thinker: Tokenizer) -> None:
    begin, end = thinker.token_id("<think>"), thinker.token_id("</think>")
    assert begin is not None
    assert end is not None

    def marks(prompt: str, name: str, continues: bool = False) -> ReasoningMarks | None:
        return parser_of(thinker, name).marks(thinker.encode(prompt, add_special_tokens=False), continues=continues)

    assert marks("Hi<think>\n", "qwen3") == marks("Hi", "deepseek_r1") == ReasoningMarks([end])
    assert marks("Hi", "qwen3") == marks("<think> Hi", "qwen3") == ReasoningMarks([end], begin)
    assert marks("Hi<think>\n\n</think>\n\n", "qwen3") is None
    assert marks("Hi<think>So", "deepseek_r1", continues=True) == ReasoningMarks([end])
    assert marks("Hi<think>So</think>4", "qwen3", continues=True) is marks("Hi", "deepseek_r1", continues=True) is None


def test_a_parser_is_chosen_by_name_or_by_the_template(thinker: Tokenizer, tokenizer: Tokenizer) -> None:
    assert choose_reasoning(None, thinker) is None  # its template never ends a thought
    assert choose_reasoning(None, tokenizer) is None
    assert choose_reasoning("none", thinker) is None
    fast = copy(thinker._hf)
    fast.chat_template = "{{ messages[0].content.split('</think>')[-1] }}"  # as DeepSeek-R1-0528's
    assert isinstance(choose_reasoning(None, Tokenizer(fast)), TagParser)
    with pytest.raises(CheckpointError, match=r"\[THINK\]"):
        choose_reasoning("mistral", thinker)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, thinker: Tokenizer) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("thinking")
    gateway, stop = start_gateway(
        directory, thinker, lending=False, reasoning=parser_of(thinker), tool_parser=TOOL_PARSERS["hermes"]
    )
    yield gateway
    stop()


def ask(gateway: Gateway, content: str, **fields: Any) -> dict[str, Any]:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    with gateway.http() as http:
        response = http.post("/v1/chat/completions", json={"model": "chat", "messages": messages, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return dict(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return {"chunks": [json.loads(line) for line in lines]}


def test_a_whole_answer_has_both_parts(thinking: Gateway, thinker: Tokenizer) -> None:
    content = "So it is.\n</think>\n\nYes."
    num_tokens = len(thinker.encode(content))
    answer = ask(thinking, content, max_tokens=num_tokens, n=2)
    for choice in answer["choices"]:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] == "So it is."
        assert message["content"] == "Yes."
    expected = 2 * len(thinker.encode("So it is.\n"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert answer["usage"]["completion_tokens"] == 2 * num_tokens


def test_an_answer_cut_off_in_its_reasoning_has_no_content(thinking: Gateway) -> None:
    [choice] = ask(thinking, "So it is, or is it not? </think> Yes.", max_tokens=4)["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"]
    assert choice["finish_reason"] == "length"


def test_reasoning_can_be_left_out_of_an_answer_and_is_counted_all_the_same(
    thinking: Gateway, thinker: Tokenizer
) -> None:
    content = "So it is.\n</think>\n\nYes."
    fields: dict[str, Any] = {"include_reasoning": False, "max_tokens": len(thinker.encode(content))}
    whole = ask(thinking, content, **fields)
    message = whole["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert not {"reasoning", "reasoning_content"} & set(message)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = ask(thinking, content, **fields, stream=True)["chunks"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)
    assert ask(thinking, content, **fields | {"max_tokens": 2})["choices"][0]["message"]["content"] == ""


def test_deltas_join_to_the_whole_answer(thinking: Gateway, thinker: Tokenizer) -> None:
    content = f"So, tools.\n</think>\n\nWell:\n{CALL}"
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": len(thinker.encode(content))}
    message = ask(thinking, content, **fields)["choices"][0]["message"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = ask(thinking, content, **fields, **options)["chunks"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == message["tool_calls"][0]["function"]["arguments"]
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    [first_content] = [i for i, delta in enumerate(deltas) if delta.get("content")][:1]
    assert not any(delta.get("reasoning_content") for delta in deltas[first_content + 1 :])


def test_reasoning_of_earlier_messages_is_given_to_the_template(thinking: Gateway, thinker: Tokenizer) -> None:
    """vLLM's newer name means the same."""
    for name in ("reasoning_content", "reasoning"):
        messages = [{"role": "assistant", "content": "", name: "deep thought"}, {"role": "user", "content": "ok"}]
        answer = ask(thinking, "", messages=messages, max_tokens=len(thinker.encode("deep thoughtok")))
        assert answer["choices"][0]["message"]["reasoning_content"] == "deep thoughtok"


def test_tools_are_tokenized_where_a_template_shows_them(thinking: Gateway) -> None:
    """After vLLM's `test_tokenize_chat_with_tools`."""
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    with thinking.http() as http:
        for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
            tokenized = http.post("/tokenize", json={**body, **fields}).json()
            rendered = http.post("/v1/chat/completions/render", json={**body, **fields, "max_tokens": 1}).json()
            assert tokenized["tokens"] == rendered["token_ids"]
            prompt = http.post("/detokenize", json={"model": "chat", "tokens": tokenized["tokens"]}).json()["prompt"]
            assert ('"name": "f"' in prompt) == (fields == {"tools": TOOLS})


def test_completions_are_left_as_they_are(thinking: Gateway, thinker: Tokenizer) -> None:
    prompt = "a</think>b"
    body = {"model": "chat", "prompt": prompt, "max_tokens": len(thinker.encode(prompt))}
    with thinking.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == prompt
    assert "completion_tokens_details" not in answer["usage"]
