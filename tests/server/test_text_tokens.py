"""The tokens of an answer's text, among those of its reasoning, its calls and its end."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise

import pytest
from echo_gateway import train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.choices import Choice, Delta, StopRules
from swiftkv.server.detokenizer import StopStrings
from swiftkv.server.generation import SequenceOutput
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.text_tokens import TextToken, TextTokens, token_by_token
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tools import ToolUse

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = ToolUse(TOOL_PARSERS["hermes"], [ToolFunction("f", {})], must_call=False, is_named=False, several=True)
SHOWN = st.sampled_from(["4", "Grüße 👋🏽", "a < b, so", "<tool", "think", "</ think", "你好 stop", "st"])
HIDDEN = st.sampled_from(["", "hm", "So: 2 + 2.\n", " Grüße </ think"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("thinker")
    train_tokenizer(directory, ["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Tokenizer.from_pretrained(directory)


def deltas_of(tokenizer: Tokenizer, text: str, cuts: list[int], stops: list[str], end: str) -> list[Delta]:
    """Return what a choice makes of a text that comes in pieces. The logprob of a token is its position."""
    prompt = tokenizer.encode("Hi\n<think>\n", add_special_tokens=False)
    parser = choose_reasoning("qwen3", tokenizer)
    assert parser is not None
    sections = parser.sections(prompt, continues=False)
    choice = Choice(0, prompt, tokenizer, StopRules(StopStrings(stops)), TOOLS, sections, TextTokens())
    ids = tokenizer.encode(text, add_special_tokens=False) + ([300] if end == "stop" else [])
    ends = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    made: list[Delta] = []
    for begin, stop in pairwise(ends):
        logprobs = [TokenLogprobs(float(position), 1, [], []) for position in range(begin, stop)]
        reason = end if stop == len(ids) else None
        made += choice.decode(SequenceOutput(0, ids[begin:stop], logprobs, finish_reason=reason))
        if made[-1].finish_reason:
            break
    return made


def positions_of(tokenizer: Tokenizer, text: str, shown: list[tuple[int, int]]) -> list[int]:
    """Return the positions of the tokens that have a part of the bytes between the given characters."""
    sizes = [len(tokenizer.token_bytes(token_id)) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    spans = list(pairwise(accumulate(sizes, initial=0)))
    assert sum(sizes) == len(text.encode())
    in_bytes = [(len(text[:begin].encode()), len(text[:stop].encode())) for begin, stop in shown]
    return [
        position
        for position, (begin, stop) in enumerate(spans)
        if any(begin < shown_end and stop > shown_begin for shown_begin, shown_end in in_bytes)
    ]


@settings(max_examples=200, deadline=None)
@given(
    thought=HIDDEN,
    spaces=st.sampled_from(["", "\n\n"]),
    first=SHOWN,
    has_call=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    stops=st.lists(st.sampled_from(["stop", "st!", "</x"]), max_size=2, unique=True),
    end=st.sampled_from(["stop", "length"]),
)
def test_tokens_are_those_of_the_text(
    tokenizer: Tokenizer,
    thought: str,
    spaces: str,
    first: str,
    has_call: bool,
    cuts: list[int],
    stops: list[str],
    end: str,
) -> None:
    before = f"{thought}</think>{spaces}"
    text = before + first + (CALL if has_call else "")
    made = deltas_of(tokenizer, text, cuts, stops, end)
    shown = first.split("stop")[0] if "stop" in stops else first
    assert "".join(delta.text for delta in made) == shown
    tokens = [token for delta in made for token in delta.text_tokens]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [ids[int(token.logprobs.logprob)] for token in tokens] == [token.token_id for token in tokens]
    expected = positions_of(tokenizer, text, [(len(before), len(before) + len(shown))])
    assert [int(token.logprobs.logprob) for token in tokens] == expected
    assert not any(delta.text_tokens and not delta.text for delta in made)


def test_text_after_a_call_has_its_own_tokens(tokenizer: Tokenizer) -> None:
    text = f"hm</think>one{CALL}two"  # "t" is in the call's end, too
    made = deltas_of(tokenizer, text, [], [], "length")
    texts = [(len("hm</think>"), len("hm</think>one")), (len(text) - 3, len(text))]
    assert "".join(delta.text for delta in made) == "onetwo"
    told = [int(token.logprobs.logprob) for delta in made for token in delta.text_tokens]
    assert told == positions_of(tokenizer, text, texts)


def test_text_that_no_token_had_takes_all_that_wait() -> None:
    tokens = TextTokens()
    some = [TextToken(token_id, TokenLogprobs(0.0, 1, [], [])) for token_id in range(3)]
    for token, decoded in zip(some, ["a", "b", "c"], strict=True):
        tokens.push(token, decoded)
    assert tokens.take("xyz") == some
    assert tokens.take("") == []


def test_an_output_is_split_without_a_loss() -> None:
    logprobs = [TokenLogprobs(float(token), 1, [], []) for token in range(3)]
    whole = SequenceOutput(1, [0, 1, 2], logprobs, [b"packed"], finish_reason="length")
    parts = list(token_by_token(whole))
    assert [part.token_ids for part in parts] == [[0], [1], [2]]
    assert [part.logprobs for part in parts] == [[entry] for entry in logprobs]
    assert [part.finish_reason for part in parts] == [None, None, "length"]
    assert [part.prompt_logprobs for part in parts] == [[b"packed"], None, None]
    bare = dataclasses.replace(whole, token_ids=[], logprobs=[])
    assert list(token_by_token(bare)) == [bare]
