"""Passages of an answer: the same ones however a text is cut, each opened, grown and closed in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.server.choices import Choice, Delta, StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.generation import SequenceOutput
from swiftkv.server.passages import CallPassage, Closed, Grown, Opened, Passage, Passages, TextPassage, content
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tool_parsers.hermes import HermesParser
from swiftkv.server.tools import ToolUse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
CALLS_OF_ANY = ToolUse(HermesParser, [ToolFunction("add", {})], must_call=False, is_named=False, several=True)


def deltas(tokenizer: Tokenizer, text: str, cuts: Sequence[int], finish_reason: str) -> list[Delta]:
    """Return what a choice makes of a text that comes in pieces."""
    choice = Choice(0, [300], tokenizer, StopRules(StopStrings([])), CALLS_OF_ANY)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    starts = [0, *ends[:-1]]
    made = [choice.push(SequenceOutput(0, ids[start:end])) for start, end in zip(starts, ends, strict=True)]
    last = [300] if finish_reason == "stop" else []
    return [*made, choice.push(SequenceOutput(0, last, finish_reason=finish_reason))]


def shown(passage: Passage) -> tuple[str, ...]:
    return ("text", content(passage)) if isinstance(passage, TextPassage) else (passage.name, content(passage))


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
