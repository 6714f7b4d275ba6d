"""Parsers of tool calls: the same calls and the same text, wherever the text is cut.

It is one file, for all parsers keep the same promises, and each test asks every one of them that it is about.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from swiftkv.grammars import GrammarSource, library_form, new_matcher
from swiftkv.model_config import ToolParserName
from swiftkv.server.tool_parsers import TOOL_PARSERS, choose_parser
from swiftkv.server.tool_parsers.base import (
    ArgumentsGrown,
    CallBegun,
    EitherParser,
    Said,
    ToolEvent,
    ToolFunction,
    ToolParser,
)

Outcome = tuple[str, list[tuple[str, str]]]
WEATHER = '{"city": "Köln", "note": "a \\"quoted\\" } ] \\\\ </tool_call> [TOOL_CALLS]", "days": [1, {"a": []}]}'
EMPTY = "{}"


def _in_apriels_tags(text: str) -> str:
    return text.replace("TOOLCALL", "tool_calls").replace("<TOOL", "<tool")


CASES: dict[str, list[tuple[str, Outcome]]] = {
    "hermes": [
        ("Just text, with < and <tool.", ("Just text, with < and <tool.", [])),
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
            ("", [("get_weather", WEATHER)]),
        ),
        (
            f'Let me see. \n<tool_call>\n{{"name": "a", "arguments": {EMPTY}}}\n</tool_call>\n'
            f'<tool_call>{{"arguments": {WEATHER}, "name": "b"}}</tool_call>\n',
            ("Let me see.", [("a", EMPTY), ("b", WEATHER)]),
        ),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("a", '{"x": 1}')])),
        ('<tool_call>{"name": "a"}</tool_call> \n And more. ', ("And more. ", [("a", "")])),
        ('<tool_call>{"id": 12, "name": "a", "arguments": {"x": 1', ("", [("a", '{"x": 1')])),
        ("<tool_call>no JSON</tool_call>, sorry", ("<tool_call>no JSON</tool_call>, sorry", [])),
        ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
        ('so: <tool_call> {"na', ('so: <tool_call> {"na', [])),
        ("", ("", [])),
    ],
    "llama3_json": [
        ("Hello {}", ("Hello {}", [])),
        (f'{{"name": "get_weather", "parameters": {WEATHER}}}', ("", [("get_weather", WEATHER)])),
        (f'<|python_tag|>{{"name": "a", "parameters": {EMPTY}}}', ("", [("a", EMPTY)])),
        (
            f'{{"name": "a", "parameters": {EMPTY}}}; {{"name": "b", "parameters": {WEATHER}}}',
            ("", [("a", EMPTY), ("b", WEATHER)]),
        ),
        ('{"answer": 42}', ('{"answer": 42}', [])),
        ("  {not JSON} at all", ("  {not JSON} at all", [])),
        ("<|pyth", ("<|pyth", [])),
        (
            f'Here is the result: {{"name": "get_weather", "parameters": {WEATHER}}} Would you like to know more?',
            ("Here is the result:Would you like to know more?", [("get_weather", WEATHER)]),
        ),
        (
            f'Both: {{"type": "function", "name": "add", "arguments": {EMPTY}}} ;\n{{"parameters": {WEATHER}, '
            f'"name": "get_weather"}}\n{{"name": "typed", "parameters": {EMPTY}}};',
            ("Both:", [("add", EMPTY), ("get_weather", WEATHER), ("typed", EMPTY)]),
        ),
        (
            f'```json\n{{"name": "add", "parameters": {EMPTY}}}\n```\nI used {{add}} with {EMPTY}.',
            ("```json```\nI used {add} with {}.", [("add", EMPTY)]),
        ),
        (f'Well. <|python_tag|> {{"name": "a", "parameters": {EMPTY}}}', ("Well.", [("a", EMPTY)])),
        ("<|python_tag|>print({})", ("<|python_tag|>print({})", [])),
        ('{"name": "Ulm", "country": {"name": "add"}}', ('{"name": "Ulm", "country": {"name": "add"}}', [])),
        (
            'I have {"name": "add", "description": "Adds", "parameters": {}} and {"name": "add"}.',
            ('I have {"name": "add", "description": "Adds", "parameters": {}} and {"name": "add"}.', []),
        ),
        (
            'So: {"name": "other", "parameters": {}}, {"first": {"name": "add", "parameters": {}}}',
            ('So: {"name": "other", "parameters": {}}, {"first": {"name": "add", "parameters": {}}}', []),
        ),
        ('So: {"name": "add", "parameters": ', ('So: {"name": "add", "parameters": ', [])),
        ('So: {"name": "add", "parameters": {"a"', ("So:", [("add", '{"a"')])),
    ],
    "xlam": [
        ("Just [text] {}", ("Just [text] {}", [])),
        (f'[{{"name": "a", "arguments": {WEATHER}}}]', ("", [("a", WEATHER)])),
        (
            f' [ {{"name": "a", "arguments": {EMPTY}}},\n{{"name": "b", "arguments": {WEATHER}}} ] \n',
            ("", [("a", EMPTY), ("b", WEATHER)]),
        ),
        (f'[{{"name": "a", "arguments": {EMPTY}}}] Done [1].', ("Done [1].", [("a", EMPTY)])),
        ('[{"name": "a", "arguments": {"x": 1', ("", [("a", '{"x": 1')])),
        ("[1, 2]", ("[1, 2]", [])),
        ("[]", ("[]", [])),
        ('[{"city": "Ulm"}, {"name": 1}]', ('[{"city": "Ulm"}, {"name": 1}]', [])),
        (' [{"na', (' [{"na', [])),
        ('[{"name": "Ulm", "rivers": 3}]', ('[{"name": "Ulm", "rivers": 3}]', [])),
    ],
    "pythonic": [
        ("Just [text], with (a=1)", ("Just [text], with (a=1)", [])),
        ('[get_weather(city="Köln")]', ("", [("get_weather", '{"city": "Köln"}')])),
        (
            "<|python_start|>[ a(x=1, y = -2.5, s='it\\'s ) ] , \\u00f6 \\d', t=True, f=false, n=None),\n b( ) ]"
            "<|python_end|> \n",
            (
                "",
                [
                    ("a", '{"x": 1, "y": -2.5, "s": "it\'s ) ] , ö \\\\d", "t": true, "f": false, "n": null}'),
                    ("b", "{}"),
                ],
            ),
        ),
        (
            '[a(d={\'k\': [1, (2, \'x\')], 3: None}, j={"a": true}, long="""two\n"lines" """, e=\'\', r=r\'\\d\')]',
            (
                "",
                [
                    (
                        "a",
                        '{"d": {"k": [1, [2, "x"]], "3": null}, "j": {"a": true}, "long": "two\\n\\"lines\\" ", '
                        '"e": "", "r": "\\\\d"}',
                    )
                ],
            ),
        ),
        (
            "[a(city=Bad Urach, f=g(1, 2), big=1e999)]",
            ("", [("a", '{"city": "Bad Urach", "f": "g(1, 2)", "big": "1e999"}')]),
        ),
        ("[a(x=1, 'left out', y=2)]", ("", [("a", '{"x": 1, "y": 2}')])),
        ("[a()] and more", ("and more", [("a", "{}")])),
        ("[a(x=1), oops]", (" oops]", [("a", '{"x": 1}')])),
        ("[a(x=1),]", ("", [("a", '{"x": 1}')])),
        ("[a(x=1", ("", [("a", "{")])),
        ("[a(x=1, y=2), b", (" b", [("a", '{"x": 1, "y": 2}')])),
        ("[a(x) for x in y]", ("[a(x) for x in y]", [])),
        ("[a() for x in y]", ("[a() for x in y]", [])),
        ("[a(x == 1)]", ("[a(x == 1)]", [])),
        ("[1, 2]", ("[1, 2]", [])),
        ('["a(x=1)"]', ('["a(x=1)"]', [])),
        ("[]", ("[]", [])),
        ("<|python_tag|> [get_wea", ("<|python_tag|> [get_wea", [])),
    ],
    "qwen3_coder": [
        ("Just text, with < and <tool.", ("Just text, with < and <tool.", [])),
        (
            "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln </p> <x>\n</parameter>\n"
            "</function>\n</tool_call>",
            ("Let me see.", [("get_weather", '{"city": "Köln </p> <x>"}')]),
        ),
        (
            "<tool_call>\n<function=typed>\n<parameter=n>\n12\n</parameter>\n<parameter=x>1.5</parameter>\n"
            '<parameter=yes>True</parameter><parameter=items>\n[1, {"a": null}]\n</parameter>\n'
            "<parameter=maybe>\nNone\n</parameter>\n<parameter=unknown>\n5\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call><function=empty></function></tool_call> Done.",
            (
                "Done.",
                [
                    (
                        "typed",
                        '{"n": 12, "x": 1.5, "yes": true, "items": [1, {"a": null}], "maybe": null, "unknown": "5"}',
                    ),
                    ("empty", "{}"),
                ],
            ),
        ),
        (
            "<tool_call>\n<function=typed>\n<parameter=n>\ntwelve\n</parameter>\n<parameter=name>\nnull\n</parameter>"
            "</tool_call>",
            ("", [("typed", '{"n": "twelve", "name": "null"}')]),
        ),
        ("<tool_call>\n<function=a>\n<parameter=x>\ncut o", ("", [("a", "{")])),
        (
            "Well.\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>\n"
            "<function=add></function>",
            ("Well.", [("get_weather", '{"city": "Ulm"}'), ("add", "{}")]),
        ),
        ("a <function=other>x</function> <functio", ("a <function=other>x</function> <functio", [])),
        (
            "<tool_call>\n<function=typed>\n<parameter=name>\na\n<parameter=n>\n1\n</function>\n</tool_call>",
            ("", [("typed", '{"name": "a", "n": 1}')]),
        ),
        ('<tool_call>{"name": "a"}</tool_call>', ('<tool_call>{"name": "a"}</tool_call>', [])),
        ("so: <tool_call> \n<func", ("so: <tool_call> \n<func", [])),
    ],
    "nemotron_json": [
        ("Just text, with <TOOL", ("Just text, with <TOOL", [])),
        (f'<TOOLCALL>[{{"name": "a", "arguments": {WEATHER}}}]</TOOLCALL>', ("", [("a", WEATHER)])),
        (
            f'Let me see.\n\n<TOOLCALL>[{{"name": "a", "arguments": {EMPTY}}}, {{"name": "b", "arguments": {WEATHER}}}]'
            "</TOOLCALL>\n And more.",
            ("Let me see.And more.", [("a", EMPTY), ("b", WEATHER)]),
        ),
        (
            '<TOOLCALL> {"name": "a", "arguments": "{\\"x\\": 1}"} oops </TOOLCALL>\n'
            '<TOOLCALL>[{"name": "b"}]</TOOLCALL>',
            ("", [("a", '{"x": 1}'), ("b", "")]),
        ),
        ('<TOOLCALL>[{"name": "a", "arguments": {"x": 1', ("", [("a", '{"x": 1')])),
        ("so <TOOLCALL>[]</TOOLCALL> it is", ("so <TOOLCALL>[]</TOOLCALL> it is", [])),
        ('<TOOLCALL>[{"x": 1}, no]</TOOLCALL>.', ('<TOOLCALL>[{"x": 1}, no]</TOOLCALL>.', [])),
        ("so: <TOOLCALL> [ no", ("so: <TOOLCALL> [ no", [])),
        ('<TOOLCALL>[{"na', ('<TOOLCALL>[{"na', [])),
    ],
    "deepseek_v3": [
        ("Just text, with <｜tool▁call", ("Just text, with <｜tool▁call", [])),
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{WEATHER}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ("", [("a", WEATHER)]),
        ),
        (
            f"So.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{EMPTY}\n```"
            f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n{WEATHER}\n<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>\n Done.",
            ("So.Done.", [("a", EMPTY), ("b", WEATHER)]),
        ),
        (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{EMPTY}\n```<｜tool▁call▁end｜> Done.",
            ("Done.", [("a", EMPTY)]),
        ),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{"x": 1',
            ("", [("a", '{"x": 1')]),
        ),
        (
            "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\nno\n```<｜tool▁call▁end｜>",
            (
                "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\nno\n```<｜tool▁call▁end｜>",
                [],
            ),
        ),
        ("<｜tool▁calls▁begin｜> so", ("<｜tool▁calls▁begin｜> so", [])),
        ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", [])),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n`", ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n`", [])),
    ],
    "functiongemma": [
        ("Just text, with <start_f", ("Just text, with <start_f", [])),
        (
            "<start_function_call>call:get_weather{city:<escape>Köln, {<b>}<escape>}<end_function_call>",
            ("", [("get_weather", '{"city": "Köln, {<b>}"}')]),
        ),
        (
            "Well. <start_function_call>call:typed{items:[1,<escape>a]<escape>,{k:None, <escape>l<escape>:[]}],"
            "maybe:null,n:<escape>12<escape>,name:12,unknown:<escape>5<escape>, x:-1.5,yes:True}<end_function_call>"
            "<start_function_call>call:empty{}<end_function_call>\n Done.",
            (
                "Well.Done.",
                [
                    (
                        "typed",
                        '{"items": [1, "a]", {"k": null, "l": []}], "maybe": null, "n": 12, "name": "12", '
                        '"unknown": "5", "x": -1.5, "yes": true}',
                    ),
                    ("empty", "{}"),
                ],
            ),
        ),
        (
            "<start_function_call>call:a{x:y z,big:1e999,list:[},open:[1,t:<escape>cut o",
            ("", [("a", '{"x": "y z", "big": "1e999", "list": "[}"')]),
        ),
        ("<start_function_call>call:a{x:1}<start_function_call>call:b{}", ("", [("a", '{"x": 1}'), ("b", "{}")])),
        (
            "<start_function_call>call:a{}<end_function_call>\n<start_function_response>response:a{<start_function_call>",
            ("", [("a", "{}")]),
        ),
        ("Not <start_function_response> yet", ("Not <start_function_response> yet", [])),
        ("<start_function_call>call:a{x", ("", [("a", "{")])),
        ("<start_function_call>call a{x:1}", ("<start_function_call>call a{x:1}", [])),
        ("so: <start_function_call> ca", ("so: <start_function_call> ca", [])),
        ("<start_function_call>call:a <end_function_call>", ("<start_function_call>call:a <end_function_call>", [])),
    ],
    "mistral": [
        ("Hello [TOOL", ("Hello [TOOL", [])),
        (f'[TOOL_CALLS][{{"name": "a", "arguments": {WEATHER}}}]', ("", [("a", WEATHER)])),
        (
            f'[TOOL_CALLS] [{{"name": "a", "arguments": {EMPTY}}}, {{"name": "b", "arguments": {WEATHER}}}]',
            ("", [("a", EMPTY), ("b", WEATHER)]),
        ),
        (f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}", ("", [("get_weather", WEATHER)])),
        (
            f"Well. [TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{EMPTY}[TOOL_CALLS]b{WEATHER}",
            ("Well. ", [("a", EMPTY), ("b", WEATHER)]),
        ),
        ("[TOOL_CALLS] none of these { can } help", ("[TOOL_CALLS] none of these { can } help", [])),
        ("[TOOL_CALLS][not JSON]", ("[TOOL_CALLS][not JSON]", [])),
        ('[TOOL_CALLS][{"arguments": {}}]', ('[TOOL_CALLS][{"arguments": {}}]', [])),
        ('[TOOL_CALLS] [{"na', ('[TOOL_CALLS] [{"na', [])),
        ("[TOOL_CALLS]get_wea", ("[TOOL_CALLS]get_wea", [])),
        ("[TOOL_CALLS]a[CALL_ID]abcd", ("[TOOL_CALLS]a[CALL_ID]abcd", [])),
        ('[TOOL_CALLS]a[ARGS]{"x": 1', ("", [("a", '{"x": 1')])),
        (f'[TOOL_CALLS][{{"name": "a", "arguments": {EMPTY}}}] Done: 1.', ("Done: 1.", [("a", EMPTY)])),
    ],
}
CASES["apriel"] = [
    (_in_apriels_tags(text), (_in_apriels_tags(said), calls)) for text, (said, calls) in CASES["nemotron_json"]
]
FLAT = [(name, text, outcome) for name, cases in CASES.items() for text, outcome in cases]


FUNCTIONS = [
    ToolFunction("get_weather", {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}}),
    ToolFunction(
        "add", {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    ),
    ToolFunction(
        "typed",
        {
            "properties": {
                "n": {"type": ["null", "integer"]},
                "x": {"type": "number"},
                "yes": {"type": "boolean"},
                "items": {"type": "array"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "name": {"type": "string"},
                "color": {"enum": ["rot", "grün"]},
            },
            "required": ["yes", "color"],
        },
    ),
]


def outcome_of(events: list[ToolEvent]) -> Outcome:
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallBegun(name):
                calls.append((name, ""))
            case ArgumentsGrown(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return "".join(event.text for event in events if isinstance(event, Said)), calls


def parse(name: str, pieces: list[str], *, must_call: bool = False) -> Outcome:
    parser = TOOL_PARSERS[name](FUNCTIONS, must_call=must_call)
    events = [event for piece in pieces for event in parser.push(piece)]
    return outcome_of(events + parser.finish())


@pytest.mark.parametrize(("name", "text", "outcome"), FLAT)
def test_a_text_is_the_same_calls_wherever_it_is_cut(name: str, text: str, outcome: Outcome) -> None:
    assert parse(name, [text]) == outcome
    assert parse(name, list(text)) == outcome
    for cut in range(len(text)):
        assert parse(name, [text[:cut], text[cut:]]) == outcome


pieces_of_calls = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{}", '{"x": "}"}', "}", "\n", " ", "text", "<",
         '"', "\\", "[", "]", ",", ";", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "<|python_tag|>", "null", "1",
         "<function=f>", "<function=", "</function>", "<parameter=n>", "<parameter=", "</parameter>", ">",
         "(", ")", "x=", "'", "[f(x=", "<TOOLCALL>", "</TOOLCALL>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<start_function_call>", "call:f{",
         "x:", "<escape>", "<end_function_call>"]
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(TOOL_PARSERS)), parts=pieces_of_calls, data=st.data())
def test_any_text_is_the_same_in_one_piece_and_in_many(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(name, pieces) == parse(name, [text]) == parse(name, list(text))


def matcher_of(name: str, **options: Any) -> LLMatcher:
    grammar = TOOL_PARSERS[name].call_grammar(FUNCTIONS, **options)
    source = GrammarSource("lark", f"start: calls\n{grammar}", tags=tags_of(TOOL_PARSERS[name]))
    return new_matcher(LLTokenizer("byte"), library_form(source))


def tags_of(parser: type[ToolParser]) -> tuple[tuple[str, int | None], ...]:
    """Return the tags of a model that has no tokens for them."""
    return tuple((tag, None) for tag in parser.call_tags)


@pytest.mark.parametrize("name", sorted(name for name, parser in TOOL_PARSERS.items() if parser.holds_calls))
def test_what_the_grammar_of_calls_allows_is_parsed_as_calls(name: str) -> None:
    calls = [("get_weather", '{"city":"Ulm"}'), ("add", '{"a":12}')]
    keys = {"llama3_json": "parameters"}
    written = [f'{{"name": "{f}", "{keys.get(name, "arguments")}": {a}}}' for f, a in calls]
    xml = [
        "<parameter=city>\nUlm\n</parameter>\n",
        "<parameter=a>\n12\n</parameter>\n",
    ]
    text = {
        "qwen3_coder": "\n".join(
            f"<tool_call>\n<function={f}>\n{a}</function>\n</tool_call>" for (f, _), a in zip(calls, xml, strict=True)
        ),
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        "llama3_json": "; ".join(written),
        "xlam": f"[{', '.join(written)}]",
        "pythonic": '[get_weather(city="Ulm"), add(a=12)]',
        "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
        "nemotron_json": f"<TOOLCALL>[{', '.join(written)}]</TOOLCALL>",
        "apriel": f"<tool_calls>[{', '.join(written)}]</tool_calls>",
        "deepseek_v3": DEEPSEEK_CALLS.format("\n".join(DEEPSEEK_CALL.format(f, a) for f, a in calls)),
        "functiongemma": "<start_function_call>call:get_weather{city:<escape>Ulm<escape>}<end_function_call>"
        "<start_function_call>call:add{a:12}<end_function_call>",
    }[name]
    matcher = matcher_of(name, several=True)
    assert matcher.consume_tokens(list(text.encode())), matcher.get_error()
    assert matcher.is_accepting()
    said, parsed = parse(name, list(text), must_call=True)
    assert said == ""
    assert [(f, json.loads(a)) for f, a in parsed] == [(f, json.loads(a)) for f, a in calls]
    assert not matcher_of(name, several=False).consume_tokens(list(text.encode()))
    wrong = text.replace("12", '"12"')
    assert not matcher_of(name, several=True).consume_tokens(list(wrong.encode()))


ANSWER = {
    "json": ('{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}', '{"name": "Ulm"}'),
    "regex": ("[a-z]{2}<[0-9]/", "ab<1/"),
    "choice": ('["yes", "<tool"]', "<tool"),
    "grammar": ('start: "a" calls\ncalls: "b" | "c"', "ac"),
}
DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
CALL = {
    "nemotron_json": '<TOOLCALL>[{"name": "add", "arguments": {"a":12}}]</TOOLCALL>',
    "apriel": '<tool_calls>[{"name": "add", "arguments": {"a":12}}]</tool_calls>',
    "deepseek_v3": DEEPSEEK_CALLS.format(DEEPSEEK_CALL.format("add", '{"a":12}')),
    "functiongemma": "<start_function_call>call:add{a:12}<end_function_call>",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a":12}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a":12}}]',
}
TWO_CALLS = {name: f"{call}\n{call}" for name, call in CALL.items()} | {
    "mistral": CALL["mistral"].removesuffix("]") + ", " + CALL["mistral"].removeprefix("[TOOL_CALLS]["),
    "nemotron_json": f"<TOOLCALL>[{', '.join(2 * [CALL['nemotron_json'][11:-12]])}]</TOOLCALL>",
    "apriel": f"<tool_calls>[{', '.join(2 * [CALL['apriel'][13:-14]])}]</tool_calls>",
    "deepseek_v3": DEEPSEEK_CALLS.format("\n".join(2 * [DEEPSEEK_CALL.format("add", '{"a":12}')])),
    "functiongemma": CALL["functiongemma"] * 2,
}


@pytest.mark.parametrize("kind", ANSWER)
@pytest.mark.parametrize("name", [name for name, parser in TOOL_PARSERS.items() if parser.call_opening is not None])
def test_a_grammar_allows_calls_or_what_is_asked_for(name: str, kind: Any) -> None:
    source, answer = ANSWER[kind]
    parser = TOOL_PARSERS[name]
    both = GrammarSource(kind, source, calls=parser.call_grammar(FUNCTIONS, several=True), tags=tags_of(parser))
    fresh = new_matcher(LLTokenizer("byte"), library_form(both))
    held = [answer, CALL[name], TWO_CALLS[name]]
    broken = [f"{answer}{CALL[name]}", CALL[name].replace("12", '"x"'), f"{CALL[name]}{answer}", "Well", "<tool_cat"]
    for text in held + broken:
        matcher = fresh.deep_copy()
        is_text = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
        assert is_text == (text in held), (text, matcher.get_error())


@pytest.mark.parametrize("name", [name for name, parser in TOOL_PARSERS.items() if parser.call_opening is not None])
def test_where_a_grammar_holds_an_answer_its_beginning_tells_calls_from_text(name: str) -> None:
    opening = TOOL_PARSERS[name].call_opening
    assert opening is not None
    quoting = json.dumps({"quote": CALL[name]})
    for text, outcome in (
        (quoting, (quoting, [])),
        (TWO_CALLS[name], ("", [("add", '{"a": 12}')] * 2)),
        (opening[:5], (opening[:5], [])),
        ("", ("", [])),
    ):
        for pieces in ([text], list(text)):
            parser = EitherParser(TOOL_PARSERS[name](FUNCTIONS), opening)
            events = [event for piece in pieces for event in parser.push(piece)]
            said, calls = outcome_of([*events, *parser.finish()])
            assert (said, [(f, json.dumps(json.loads(arguments))) for f, arguments in calls]) == outcome


NAMED = '[TOOL_CALLS]get_weather{id}[ARGS]{{"city": "Ulm"}}[TOOL_CALLS]add{id}[ARGS]{{"a": 12}}'


def test_calls_of_mistral_are_held_to_the_form_that_the_template_shows() -> None:
    texts = [TWO_CALLS["mistral"], NAMED.format(id=""), NAMED.format(id="[CALL_ID]Abcdefg12")]
    templates = ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]", "[TOOL_CALLS][CALL_ID][ARGS]"]
    for shown, template in enumerate(templates):
        for name in (None, "mistral"):
            parser = choose_parser(name, f"tools {template}")
            assert parser is not None
            rules = f"start: calls\n{parser.call_grammar(FUNCTIONS, several=True)}"
            fresh = new_matcher(LLTokenizer("byte"), library_form(GrammarSource("lark", rules, tags=tags_of(parser))))
            for number, text in enumerate(texts):
                matcher = fresh.deep_copy()
                is_held = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
                assert is_held == (number == shown), (template, text, matcher.get_error())
    outcomes = [parse("mistral", list(text), must_call=True) for text in texts[1:]]
    assert outcomes == [("", [("get_weather", '{"city": "Ulm"}'), ("add", '{"a": 12}')])] * 2


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ("<parameter=yes>\ntrue\n</parameter>\n<parameter=color>\ngrün\n</parameter>\n", True),
        (
            "<parameter=n>\nnull\n</parameter>\n<parameter=x>\n-1.5\n</parameter>\n<parameter=yes>\nfalse\n</parameter>\n"
            '<parameter=items>\n[1, "\\n"]\n</parameter>\n<parameter=name>\nany <b>\n\ntext\n</parameter>\n'
            "<parameter=color>\nrot\n</parameter>\n",
            True,
        ),
        ("<parameter=color>\nrot\n</parameter>\n", False),
        ("<parameter=yes>\ntrue\n</parameter>\n<parameter=color>\nblau\n</parameter>\n", False),
        ("<parameter=yes>\n1\n</parameter>\n<parameter=color>\nrot\n</parameter>\n", False),
    ],
)
def test_arguments_as_plain_text_are_held_to_their_types(arguments: str, holds: bool) -> None:
    text = f"<tool_call>\n<function=typed>\n{arguments}</function>\n</tool_call>"
    matcher = matcher_of("qwen3_coder", several=False)
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == holds
    if holds:
        _, [(name, parsed)] = parse("qwen3_coder", list(text), must_call=True)
        assert name == "typed"
        assert {"yes", "color"} <= json.loads(parsed).keys()


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ('yes=True, color="grün"', True),
        ('n=None, x=-1.5, yes=False, items=[1, {"a": true}], maybe=None, name="a, b)", color="rot"', True),
        ('n=null, yes=True, maybe="x", color="rot"', True),
        ('color="rot"', False),
        ('yes=True, color="blau"', False),
        ('yes=1, color="rot"', False),
        ('yes=True,color="rot"', False),
        ('yes=True, color="rot", ', False),
    ],
)
def test_arguments_as_python_are_held_to_their_types(arguments: str, holds: bool) -> None:
    text = f"[typed({arguments})]"
    matcher = matcher_of("pythonic", several=False)
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == holds
    if holds:
        _, [(name, parsed)] = parse("pythonic", list(text), must_call=True)
        assert name == "typed"
        assert json.loads(parsed)["yes"] in (True, False)


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ("color:<escape>grün<escape>,yes:true", True),
        (
            "color:<escape>rot<escape>,items:[1,<escape>a <b> <<i>,}<escape>,{k:null,l:[]}],maybe:<escape>x<escape>,"
            "n:null,name:<escape><escape>,x:-1.5,yes:false",
            True,
        ),
        ("color:<escape>rot<escape>", False),
        ("color:<escape>blau<escape>,yes:true", False),
        ("color:<escape>rot<escape>,yes:1", False),
        ("yes:true,color:<escape>rot<escape>", False),
        ("color:<escape>rot<escape>,n:<escape>1<escape>,yes:true", False),
    ],
)
def test_arguments_of_functiongemma_are_held_to_their_types(arguments: str, holds: bool) -> None:
    """They are sorted by their keys, as its chat template sorts them."""
    text = f"<start_function_call>call:typed{{{arguments}}}<end_function_call>"
    matcher = matcher_of("functiongemma", several=False)
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == holds
    if holds:
        _, [(name, parsed)] = parse("functiongemma", list(text), must_call=True)
        assert name == "typed"
        assert json.loads(parsed)["yes"] in (True, False)


NESTED = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["leaf"],
        }
    },
    "properties": {"tree": {"$ref": "#/$defs/tree"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
}


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ("tags:[<escape>a<escape>,<escape>b<escape>],tree:{below:[{below:[{leaf:2}],leaf:3},{leaf:4}],leaf:1}", True),
        ("tree:{leaf:1}", True),
        ("", True),
        ("tags:[<escape>c<escape>]", False),
        ("tree:{below:[{leaf:<escape>2<escape>}],leaf:1}", False),
        ("tree:{}", False),
    ],
)
def test_lists_and_objects_of_functiongemma_are_held_to_their_schemas(arguments: str, holds: bool) -> None:
    rules = TOOL_PARSERS["functiongemma"].call_grammar([ToolFunction("f", NESTED)], several=False)
    source = GrammarSource("lark", f"start: calls\n{rules}", tags=tags_of(TOOL_PARSERS["functiongemma"]))
    matcher = new_matcher(LLTokenizer("byte"), library_form(source))
    text = f"<start_function_call>call:f{{{arguments}}}<end_function_call>"
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == holds


@pytest.mark.parametrize(
    ("schema", "value", "holds"),
    [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, "[]", False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, "[1]", True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "[1]", False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "[1,2,3]", True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "[]", True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "[1,2,3]", False),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, "[]", True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, "[1]", False),
        ({"type": "object", "additionalProperties": False}, "{}", True),
        ({"type": "object", "additionalProperties": False}, "{a:1}", False),
        ({"type": "object"}, "{a:1}", True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{a:1,b:2}", True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{a:1,b:<escape>2<escape>}", False),
        ({"const": 5}, "5", True),
        ({"const": 5}, "6", False),
        ({"enum": [1, True]}, "true", True),
        ({"enum": [1, True]}, "<escape>true<escape>", False),
    ],
)
def test_values_of_functiongemma_are_held_to_what_their_schemas_list_and_count(
    schema: dict[str, Any], value: str, holds: bool
) -> None:
    function = ToolFunction("f", {"properties": {"x": schema}, "required": ["x"]})
    rules = TOOL_PARSERS["functiongemma"].call_grammar([function], several=False)
    source = GrammarSource("lark", f"start: calls\n{rules}", tags=tags_of(TOOL_PARSERS["functiongemma"]))
    matcher = new_matcher(LLTokenizer("byte"), library_form(source))
    text = f"<start_function_call>call:f{{x:{value}}}<end_function_call>"
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == holds


def test_references_within_a_schema_do_not_multiply_the_rules_of_functiongemma() -> None:
    member = {"type": "object", "properties": {f"a{number}": {"$ref": "#/$defs/m"} for number in range(50)}}
    function = ToolFunction("f", {"$defs": {"m": member}, "properties": {"m": {"$ref": "#/$defs/m"}}})
    assert len(TOOL_PARSERS["functiongemma"].call_grammar([function], several=True)) < 50_000


def test_a_parser_is_chosen_by_name_or_by_the_template() -> None:
    assert set(TOOL_PARSERS) == {*get_args(ToolParserName)}
    assert choose_parser(None, "{% if tools %}<TOOLCALL>[{% endif %}") is TOOL_PARSERS["nemotron_json"]
    assert (
        choose_parser(None, "{% if tools %}within <tool_call> tags: <tool_calls>[{% endif %}") is TOOL_PARSERS["apriel"]
    )
    assert choose_parser(None, "{% if tools %}function<｜tool▁sep｜>{% endif %}") is TOOL_PARSERS["deepseek_v3"]
    assert choose_parser(None, "{% if tools %}<start_function_call>{% endif %}") is TOOL_PARSERS["functiongemma"]
    assert choose_parser("mistral", "") is TOOL_PARSERS["mistral"]
    assert choose_parser(None, "{% if tools %}<tool_call>{% endif %}") is TOOL_PARSERS["hermes"]
    coder = "{% if tools %}<tool_call><function=f><parameter=x>{% endif %}"
    assert choose_parser(None, coder) is TOOL_PARSERS["qwen3_coder"]
    assert choose_parser(None, "{% if tools %}<function=f>{}</function>{% endif %}") is None  # functionary's
    assert choose_parser(None, "{% if tools %}[TOOL_CALLS]{% endif %}") is TOOL_PARSERS["mistral"]
    pythonic = "{% if tools %}[func_name1(params_name1=params_value1, params_name2=params_value2...)]{% endif %}"
    assert choose_parser(None, pythonic) is TOOL_PARSERS["pythonic"]
    xlam = "{% if tools %}When using tools, make calls in a single JSON array: {% endif %}"
    assert choose_parser(None, xlam) is TOOL_PARSERS["xlam"]
    assert choose_parser(None, "{% if tools %}call{% endif %}") is None
    assert choose_parser(None, "<tool_call>") is None


def test_arguments_come_as_they_are_written() -> None:
    """The first piece of a call names it, and its arguments need not be whole to be told."""
    parser = TOOL_PARSERS["hermes"]()
    assert parser.push('<tool_call>{"name": "f", ') == [CallBegun("f")]
    assert outcome_of([CallBegun("f"), *parser.push('"arguments": {"x": [1')])[1] == [("f", '{"x": [1')]
    assert json.loads(parse("hermes", [CASES["hermes"][1][0]])[1][0][1])["city"] == "Köln"


def test_json_in_text_that_is_no_call_is_not_held_back() -> None:
    parser = TOOL_PARSERS["llama3_json"](FUNCTIONS)
    assert parser.push('So: {"city": ') == [Said("So:"), Said(' {"city":')]
    assert parser.push('"Ulm"') == [Said(' "Ulm"')]
