"""Parsers make the assistant's message again from the text that a chat template has made of it.

Templates lay messages out as the published ones do. Each byte is a token of its own, so a stream of single tokens is
cut at every byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from swiftkv.engine.messages import ReasoningMarks
from swiftkv.server.choices import Choice, Delta, StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.generation import SequenceOutput
from swiftkv.server.passages import CallPassage, Passages, TextPassage, ThoughtPassage, content
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.responses import ToolCallDelta
from swiftkv.server.templating import Templating
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import choose_parser
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tools import ToolUse

KINDS = (TextPassage, ThoughtPassage)
CHATML_BEGIN = "{% if tools %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
CHATML_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
JSON_CALL = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}'
XML_CALL = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments | items %}"
    "<parameter={{ key }}>AROUND{% if value is string or value is boolean or value is none %}{{ value }}"
    "{% else %}{{ value | tojson }}{% endif %}AROUND</parameter>\n{% endfor %}</function>\n</tool_call>"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}CALL{% endfor %}"


@dataclass(frozen=True)
class Family:
    """A kind of models: its template, its special tokens, further tokens, and the token that ends an answer."""

    template: str
    special: Sequence[str]
    tags: Sequence[str]
    end: str
    thinks: bool = True
    several: bool = True
    says_and_calls: bool = True


FAMILIES = {
    "qwen3": Family(
        CHATML_BEGIN + THINK + "{{ m.content }}"
        + CALLS.replace("CALL", "<tool_call>\n" + JSON_CALL.replace("KEY", "arguments") + "\n</tool_call>")
        + CHATML_END,
        ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"], "<|im_end|>",
    ),
    "qwen3 that opens the thought": Family(
        CHATML_BEGIN + THINK + "{{ m.content }}" + CHATML_END.replace("assistant\n", "assistant\n<think>\n"),
        ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], "<|im_end|>", several=False, says_and_calls=False,
    ),
    "qwen3_coder": Family(
        CHATML_BEGIN + "{{ m.content }}" + CALLS.replace("CALL", XML_CALL.replace("AROUND", "\n")) + CHATML_END,
        ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"], "<|im_end|>", thinks=False,
    ),
    "mimo": Family(
        CHATML_BEGIN + THINK + "{{ m.content }}" + CALLS.replace("CALL", XML_CALL.replace("AROUND", "")) + CHATML_END,
        ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"], "<|im_end|>",
    ),
    "llama3_json": Family(
        '{# if tools: {"name": function name, "parameters": dictionary of argument name and its value}. #}'
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        + "{% for c in m.tool_calls or [] %}" + JSON_CALL.replace("KEY", "parameters") + "{% endfor %}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], [], "<|eot_id|>", thinks=False,
    ),
    "xlam": Family(
        "{# if tools: make calls in a single JSON array #}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        + JSON_CALL.replace("KEY", "arguments") + "{% endfor %}]{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], [], "<|eot_id|>",
        thinks=False, says_and_calls=False,
    ),
    "pythonic": Family(
        "{# if tools: [func_name1(params_name1=params_value1...), func_name2(params)] #}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ c.function.name }}("
        "{% for key, value in c.function.arguments | items %}{{ ', ' if not loop.first }}{{ key }}="
        "{{ value | tojson }}{% endfor %}){% endfor %}]{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], [], "<|eot_id|>",
        thinks=False, says_and_calls=False,
    ),
    "nemotron_json": Family(
        "{% if tools %}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        + JSON_CALL.replace("KEY", "arguments") + "{% endfor %}]</TOOLCALL>{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], [], "<|eot_id|>", thinks=False,
    ),
    "apriel": Family(
        "{# if tools: within <tool_call></tool_call> tags #}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% if m.tool_calls %}\n<tool_calls>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | string }}, "id": "{{ c.id }}"}'
        "{% endfor %}]</tool_calls>{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        "{% endif %}",
        ["<|user|>", "<|assistant|>", "<|end|>"], [], "<|end|>", thinks=False,
    ),
    "deepseek_v3": Family(
        "{% if tools %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "<｜Assistant｜>{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else "
        "'<｜tool▁calls▁begin｜>' }}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
        "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{{ '<｜tool▁calls▁end｜>' if loop.last }}"
        "{% endfor %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}",
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"], [], "<｜end▁of▁sentence｜>", thinks=False,
    ),
    "functiongemma": Family(
        "{% macro written(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is boolean %}"
        "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for key, each in v | dictsort %}"
        "{{ ',' if not loop.first }}{{ key }}:{{ written(each) }}{% endfor %}{{ '}' }}{% elif v is sequence %}["
        "{% for each in v %}{{ written(each) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}"
        "{% endmacro %}{% if tools %}{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}"
        "{{ written(c.function.arguments) }}<end_function_call>{% endfor %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}",
        ["<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"], [],
        "<end_of_turn>", thinks=False,
    ),
    "mistral": Family(
        "{# tools #}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        + JSON_CALL.replace("KEY", "arguments") + "{% endfor %}]{% endif %}</s>{% endif %}{% endfor %}",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[THINK]", "[/THINK]", "</s>"], [], "</s>",
    ),
    "mistral of the eleventh tokenizer": Family(
        "{# tools #}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}"
        "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>"], [], "</s>", thinks=False,
    ),
    "mistral of the thirteenth tokenizer": Family(
        "{# tools #}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"], [], "</s>",
    ),
    "gpt_oss": Family(
        "{# tools #}{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}"
        "<|end|>{% else %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
        "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"], [], "",
        several=False, says_and_calls=False,
    ),
}  # fmt: skip

ARGUMENTS = {"city": 'Köln <b> 👋🏽 "so"', "days": 3, "deep": {"a": [1, None, "x"]}, "sure": True, "text": "12"}
SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "sure": {"type": "boolean"},
        "text": {"type": "string"},
    }
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def messages_of(family: Family) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{"content": "It is 4, größer < 5 <tool </thin."}]
    if family.says_and_calls or not family.several:
        answers.append({"content": "", "tool_calls": [call("weather", ARGUMENTS)]})
    if family.several:
        answers.append({"content": "", "tool_calls": [call("weather", ARGUMENTS), call("now", {})]})
    if family.says_and_calls:
        answers.append({"content": "I look.", "tool_calls": [call("now", {}), call("weather", ARGUMENTS)]})
    if family.thinks:
        thought = "2 + 2, naïve?\n\nSo: <tool_call> 你好"
        answers += [{**answer, "reasoning_content": thought, "thinking": thought} for answer in answers]
    return answers


CASES = [
    pytest.param(name, answer, id=f"{name}-{number}")
    for name, family in FAMILIES.items()
    for number, answer in enumerate(messages_of(family))
    if "opens" not in name or ("reasoning_content" in answer and "tool_calls" not in answer)
]


def byte_tokenizer(family: Family) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.tags])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend)
    hf.chat_template = family.template
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: byte_tokenizer(family) for name, family in FAMILIES.items()}


def written(tokenizer: Tokenizer, family: Family, answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return a prompt, and what the model must write so that the template would make the answer of it."""
    question = {"role": "user", "content": "Well?"}
    whole = tokenizer.encode_chat([question, {"role": "assistant", **answer}], tools=TOOLS, max_chars=10**6,
                                  given=Templating(add_generation_prompt=False))  # fmt: skip
    prompt = tokenizer.encode_chat([question], tools=TOOLS, max_chars=10**6)
    assert whole[: len(prompt)] == prompt
    rest = whole[len(prompt) :]
    if family.end:
        end = tokenizer.token_id(family.end)
        assert end is not None
        rest = rest[: rest.index(end)]
    return prompt, rest


def parse(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]]) -> Delta:
    parser = choose_parser(None, tokenizer.chat_template)
    functions = [ToolFunction("weather", SCHEMA), ToolFunction("now", {})]
    tools = None if parser is None else ToolUse(parser, functions, must_call=False, is_named=False, several=True)
    reasoning = choose_reasoning(None, tokenizer)
    sections = None if reasoning is None else reasoning.sections(prompt, continues=False)
    choice = Choice(0, prompt, tokenizer, StopRules(StopStrings([])), tools, sections)
    total, passages = Delta(0), Passages()
    for number, piece in enumerate(pieces):
        finish_reason = "abort" if number == len(pieces) - 1 else None
        delta = choice.push(SequenceOutput(0, piece, finish_reason=finish_reason))
        list(passages.take(delta))
        total.append(delta)
    check_passages(passages, total)
    return total


def check_passages(passages: Passages, total: Delta) -> None:
    """The passages of other protocols say what a chat's answer says, and calls are whole."""
    joined = {kind: "".join(content(each) for each in passages.all if isinstance(each, kind)) for kind in KINDS}
    assert joined == {TextPassage: total.text, ThoughtPassage: total.reasoning}
    calls = [(each.name, json.loads(content(each) or "{}")) for each in passages.all if isinstance(each, CallPassage)]
    assert calls == calls_of(total.calls)


def calls_of(parts: Sequence[ToolCallDelta]) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for part in parts:
        if part.index == len(calls):
            calls.append([str(part.function.name), ""])
        calls[part.index][1] += part.function.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_a_message_is_parsed_from_what_the_template_makes_of_it(
    tokenizers: dict[str, Tokenizer], name: str, answer: dict[str, Any]
) -> None:
    tokenizer, family = tokenizers[name], FAMILIES[name]
    prompt, ids = written(tokenizer, family, answer)
    expected_calls = [(c["function"]["name"], c["function"]["arguments"]) for c in answer.get("tool_calls", [])]
    halves = [[ids[:cut], ids[cut:]] for cut in range(1, len(ids), 11)]
    for pieces in ([ids], [[token_id] for token_id in ids], *halves):
        total = parse(tokenizer, prompt, pieces)
        assert (total.reasoning, total.text) == (answer.get("reasoning_content", ""), answer["content"])
        assert calls_of(total.calls) == expected_calls


def test_harmony_has_more_than_templates_write(tokenizers: dict[str, Tokenizer]) -> None:
    """The order in which gpt-oss itself writes a call, a preamble, tools of its own, and text without any header."""
    tokenizer = tokenizers["gpt_oss"]
    prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False)

    def parsed(text: str) -> tuple[str, str, list[tuple[str, Any]]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        one, many = parse(tokenizer, prompt, [ids]), parse(tokenizer, prompt, [[token_id] for token_id in ids])
        assert (one.reasoning, one.text) == (many.reasoning, many.text)
        assert one.num_reasoning_tokens == many.num_reasoning_tokens
        return one.reasoning, one.text, calls_of(one.calls)

    call = '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}<|call|>'
    assert parsed(f"<|channel|>analysis<|message|>Hm.<|end|>{call}") == ("Hm.", "", [("now", {"x": 1})])
    preamble = "<|channel|>commentary<|message|>I look. <|end|>"
    assert parsed(preamble + call) == ("", "I look. ", [("now", {"x": 1})])
    assert parsed("<|channel|>analysis to=python code<|message|>1+1<|call|>") == ("1+1", "", [])
    assert parsed("no header at all") == ("", "no header at all", [])
    assert parsed("x" * 2000) == ("", "x" * 2000, [])
    assert parsed("<|channel|>fin") == ("", "", [])
    assert parsed("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant") == ("Hm.", "", [])
    thought = "Hm, größer."
    ids = tokenizer.encode(f"<|channel|>analysis<|message|>{thought}<|end|>", add_special_tokens=False)
    assert parse(tokenizer, prompt, [ids]).num_reasoning_tokens == len(thought.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|channel|>commentary to=now<|message|>{"x": 1}<|call|>', ("", "", [("now", {"x": 1})])),
        (' to=now<|channel|>commentary json<|message|>{"x": 1}', ("", "", [("now", {"x": 1})])),
        ('<|channel|>analysis to=functions.now code<|message|>{"x": 1}<|call|>', ("", "", [("now", {"x": 1})])),
        ('<|channel|>comment to=functions.now<|message|>{"x": 1}', ("", "", [("now", {"x": 1})])),
        ('<|channel|>commentary to=functions.now <|constrain|>json{"x": 1}<|call|>', ("", "", [("now", {"x": 1})])),
        ('<|channel|>commentary to=functions.now json {"x": 1}', ("", "", [("now", {"x": 1})])),
        ("<|channel|>commentary to=functions.now <|constrain|>json", ("", "", [])),
        ("<|channel|>analysis Hm. So.<|end|><|start|>assistant<|channel|>final<|message|>4", ("Hm. So.", "4", [])),
        ("<|channel|>final It is 4.", ("", "It is 4.", [])),
        ("<|channel|>commentary 2?<|end|><|start|>assistant<|channel|>final<|message|>4", ("", "4", [])),
        ("<|channel|>commentary?<|end|><|start|>assistant<|channel|>final<|message|>4", ("", "4", [])),
        ("<|channel|>final <|constrain|>response<|message|>4", ("", "4", [])),
        ("<|channel|>analysis<|message|>a<|end|>analysis<|message|>b<|end|>final<|message|>4", ("ab", "4", [])),
        ("<|channel|>analysis<|message|>a<|end|>commentary to=now <|message|>{}", ("a", "", [("now", {})])),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", ("{}", "", [])),
        ("<|channel|>commentary to=container.exec code<|message|>ls<|call|>", ("ls", "", [])),
        ("<|channel|>commentary to=functions.<|message|>{}", ("{}", "", [])),
    ],
)
def test_slips_of_gpt_oss_are_read_as_they_are_meant(
    tokenizers: dict[str, Tokenizer], text: str, expected: tuple[str, str, Any]
) -> None:
    """Those that users of other servers report: headers without prefix, channel or `<|message|>`, and with more."""
    tokenizer = tokenizers["gpt_oss"]
    prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for pieces in ([ids], [[token_id] for token_id in ids]):
        total = parse(tokenizer, prompt, pieces)
        assert (total.reasoning, total.text, calls_of(total.calls)) == expected


def test_a_grammar_of_gpt_oss_begins_in_the_final_channel(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gpt_oss"]
    reasoning = choose_reasoning(None, tokenizer)
    assert reasoning is not None

    def marks(prompt: str, continues: bool = False) -> ReasoningMarks | None:
        return reasoning.marks(tokenizer.encode(prompt, add_special_tokens=False), continues=continues)

    final = tokenizer.encode("<|channel|>final<|message|>", add_special_tokens=False)
    assert marks("<|start|>user<|message|>x<|end|><|start|>assistant") == ReasoningMarks(final, is_last=True)
    message = "<|start|>assistant<|channel|>{}<|message|>so"
    assert marks(message.format("analysis"), continues=True) == ReasoningMarks(final, is_last=True)
    assert marks(message.format("final"), continues=True) is None
