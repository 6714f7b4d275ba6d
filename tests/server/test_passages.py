"""Passages of an answer: the same ones however a text is cut, each opened, grown and closed in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from echo_gateway import train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.server.choices import Choice, Delta, StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.generation import SequenceOutput
from swiftkv.server.passages import (
    CallPassage,
    Closed,
    Grown,
    Opened,
    Passage,
    Passages,
    TextPassage,
    ThoughtPassage,
    content,
)
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tool_parsers.gpt_oss import GptOssParser
from swiftkv.server.tool_parsers.hermes import HermesParser
from swiftkv.server.tools import ToolUse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
CALLS_OF_ANY = ToolUse(HermesParser, [ToolFunction("add", {})], must_call=False, is_named=False, several=True)

HARMONY_CALLS = ToolUse(GptOssParser, [ToolFunction("add", {})], must_call=False, is_named=False, several=True)
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_MESSAGES = {
    ("thought", "I think."): "<|channel|>analysis<|message|>I think.<|end|>",
    ("text", "Let me look."): "<|channel|>commentary<|message|>Let me look.<|end|>",
    ("add", ARGUMENTS): f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    ("text", "It is 3."): "<|channel|>final<|message|>It is 3.<|end|>",
}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("harmony")
    train_tokenizer(path, tags=HARMONY_MARKS)
    return Tokenizer.from_pretrained(path)


def harmony_choice(tokenizer: Tokenizer, stops: Sequence[str] = ()) -> Choice:
    reasoning = choose_reasoning("gpt_oss", tokenizer)
    assert reasoning is not None
    sections = reasoning.sections([300], continues=False)
    return Choice(0, [300], tokenizer, StopRules(StopStrings(list(stops))), HARMONY_CALLS, sections)


def deltas(
    tokenizer: Tokenizer, text: str, cuts: Sequence[int], finish_reason: str, choice: Choice | None = None
) -> list[Delta]:
    """Return what a choice makes of a text that comes in pieces."""
    choice = choice or Choice(0, [300], tokenizer, StopRules(StopStrings([])), CALLS_OF_ANY)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    starts = [0, *ends[:-1]]
    outputs = [SequenceOutput(0, ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    outputs.append(SequenceOutput(0, [300] if finish_reason == "stop" else [], finish_reason=finish_reason))
    made: list[Delta] = []
    while outputs and not (made and made[-1].finish_reason):
        made.append(choice.push(outputs.pop(0)))
    return made


def shown(passage: Passage) -> tuple[str, ...]:
    names = {TextPassage: "text", ThoughtPassage: "thought"}
    return passage.name if isinstance(passage, CallPassage) else names[type(passage)], content(passage)


def check_events(passages: Passages, all_deltas: Sequence[Delta]) -> None:
    """Feed the deltas, and check that the events say what the passages are in the end."""
    told: list[tuple[Passage, list[str]]] = []
    is_open = False
    for delta in all_deltas:
        for event in passages.take(delta):
            match event:
                case Opened(passage):
                    assert not is_open
                    assert passage.index == len(told)
                    told.append((passage, []))
                    is_open = True
                case Grown(passage, text):
                    assert is_open
                    assert passage is told[-1][0]
                    told[-1][1].append(text)
                case Closed(passage):
                    assert is_open
                    assert passage is told[-1][0]
                    is_open = False
    assert not is_open
    assert [passage for passage, _ in told] == passages.all
    assert ["".join(pieces) for _, pieces in told] == [content(passage) for passage in passages.all]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello!", [("text", "Hello!")]),
        ("", [("text", "")]),
        (CALL, [("add", ARGUMENTS)]),
        (f"Let me see.\n{CALL}\n{CALL}", [("text", "Let me see."), ("add", ARGUMENTS), ("add", ARGUMENTS)]),
        (f"{CALL} so: {CALL}", [("add", ARGUMENTS), ("text", "so:"), ("add", ARGUMENTS)]),
    ],
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_passages_do_not_depend_on_how_text_comes(
    tokenizer: Tokenizer, text: str, expected: list[tuple[str, str]], data: st.DataObject
) -> None:
    size = len(tokenizer.encode(text, add_special_tokens=False))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=size))
    passages = Passages()
    check_events(passages, deltas(tokenizer, text, cuts, "length"))
    assert [shown(passage) for passage in passages.all] == expected
    assert [passage.is_cut for passage in passages.all] == [*[False] * (len(expected) - 1), True]


def test_nothing_is_cut_where_the_model_came_to_its_end(tokenizer: Tokenizer) -> None:
    passages = Passages()
    check_events(passages, deltas(tokenizer, CALL, [], "stop"))
    [passage] = passages.all
    assert isinstance(passage, CallPassage)
    assert passage.call_id.startswith("call_")
    assert not passage.is_cut


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_reasoning_text_and_calls_stay_in_their_order(harmony: Tokenizer, data: st.DataObject) -> None:
    """Drafts, and clients that read slowly, bring several messages at once."""
    kinds = data.draw(st.lists(st.sampled_from(list(HARMONY_MESSAGES)), min_size=1, max_size=5))
    text = "<|start|>assistant".join(HARMONY_MESSAGES[kind] for kind in kinds)
    size = len(harmony.encode(text, add_special_tokens=False))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=6))
    passages = Passages()
    check_events(passages, deltas(harmony, text, cuts, "length", harmony_choice(harmony)))
    told = [shown(passage) for passage in passages.all]
    assert told == joined(kinds)


def joined(kinds: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the passages of messages: texts that follow each other are one, and so is reasoning."""
    passages: list[tuple[str, str]] = []
    for name, said in kinds:
        if passages and name != "add" and passages[-1][0] == name:
            passages[-1] = name, passages[-1][1] + said
        else:
            passages.append((name, said))
    return passages


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is final.", "assistant", "It is final."),
        ("Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is final.", "final", "It is "),
        ("Hm.<|end|><|start|>assistant<|channel|>final\n{} Q: next", "Q:", "{} "),
    ],
)
def test_a_stop_string_is_looked_for_in_what_is_shown(harmony: Tokenizer, text: str, stop: str, shown: str) -> None:
    for cuts in ([], range(99)):
        told = deltas(
            harmony, f"<|channel|>analysis<|message|>{text}", list(cuts), "length", harmony_choice(harmony, [stop])
        )
        assert "".join(delta.reasoning for delta in told) == "Hm."
        assert "".join(delta.text for delta in told) == shown


def test_a_stop_string_leaves_the_text_before_it_to_an_answer_without_marks(harmony: Tokenizer) -> None:
    told = deltas(harmony, "Plain text.\nUser: more", [], "length", harmony_choice(harmony, ["\nUser:"]))
    assert ("".join(delta.text for delta in told), told[0].finish_reason) == ("Plain text.", "stop")
