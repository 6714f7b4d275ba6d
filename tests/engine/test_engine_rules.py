"""Rules about single tokens. What a rule forbids at a place, the oracle forbids by a logit bias, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from swiftkv.engine.messages import FINISH_LENGTH, ReasoningMarks
from swiftkv.grammars import GrammarSource, library_form
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import SHAPE, make_checkpoint

EOS, VOCAB = int(SHAPE["eos_token_id"]), int(SHAPE["vocab_size"])
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
PROMPT = [9, 40, 41, 7]
LENGTH = 24
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 3}
END = [50, 51, 50, 52]


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "a step ahead"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("rules")
    make_checkpoint(directory, "llama", tokenizer=True)
    with EngineProcess(directory, async_scheduling=request.param, **OPTIONS) as process:
        yield process


@pytest.fixture(autouse=True)
def every_block_comes_back(engine: EngineProcess) -> Iterator[None]:
    yield
    assert engine.wait_for_rest().num_used_blocks == 0


def forced_token(said: list[int], marks: ReasoningMarks, budget: int) -> int | None:
    """Return the only token that may come next, if the reasoning is over its budget: the next of its end."""
    begin = 0
    if marks.begin is not None:
        if said[:1] != [marks.begin]:
            return None
        begin = 1
    thoughts = said[begin:]
    ends = [n for n in range(len(thoughts) + 1) if thoughts[:n][-len(marks.end) :] == marks.end]
    if ends or len(thoughts) < budget:
        return None
    matched = [n for n in range(len(marks.end)) if n == 0 or thoughts[-n:] == marks.end[:n]]
    return marks.end[max(matched)]


def forbidden_tokens(said: list[int], rules: dict[str, Any]) -> set[int]:
    if "thinking_budget" in rules:
        forced = forced_token(said, rules["reasoning"], rules["thinking_budget"])
        if forced is not None:
            return set(range(VOCAB)) - {forced}
    allowed = rules.get("allowed_token_ids")
    forbidden = set() if allowed is None else set(range(VOCAB)) - set(allowed)
    for *before, last in rules.get("bad_words", []):
        if not before or said[-len(before) :] == before:
            forbidden.add(last)
    return forbidden


def expected(engine: EngineProcess, rules: dict[str, Any], sampling: dict[str, Any]) -> list[int]:
    said: list[int] = []
    for _ in range(LENGTH):
        bias = dict.fromkeys(forbidden_tokens(said, rules), -1e9) or None
        [answer] = engine.generate([PROMPT + said], max_tokens=1, logit_bias=bias, **sampling)
        said += answer.token_ids
    return said


@pytest.mark.parametrize("sampling", [{}, DRAWN], ids=["greedy", "drawn"])
def test_words_that_are_forbidden(engine: EngineProcess, sampling: dict[str, Any]) -> None:
    [free] = engine.generate([PROMPT], max_tokens=LENGTH, **sampling)
    said = free.token_ids
    words = [[said[0]], said[5:7], said[9:12], [3, *said[1:3]], [EOS]]
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, bad_words=words, **sampling)
    assert answer.token_ids == expected(engine, {"bad_words": words}, sampling) != said
    again = [answer.token_ids[4:6], answer.token_ids[10:14]]  # words of the answer that the first ones left
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, bad_words=words + again, **sampling)
    assert answer.token_ids == expected(engine, {"bad_words": words + again}, sampling)


@pytest.mark.parametrize("sampling", [{}, DRAWN], ids=["greedy", "drawn"])
def test_tokens_that_are_allowed(engine: EngineProcess, sampling: dict[str, Any]) -> None:
    rules = {"allowed_token_ids": [5, 31, 32, 64, 200, VOCAB - 1]}
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, **rules, **sampling)
    assert answer.token_ids == expected(engine, rules, sampling)
    assert answer.finish_reason == FINISH_LENGTH
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, ignore_eos=False, allowed_token_ids=[EOS])
    assert answer.token_ids == [EOS]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("begin", [None, 60])
@pytest.mark.parametrize("end", [[50], END], ids=["a token", "four tokens"])
def test_reasoning_is_ended(engine: EngineProcess, budget: int, begin: int | None, end: list[int]) -> None:
    rules: dict[str, Any] = {"reasoning": ReasoningMarks(end, begin), "thinking_budget": budget}
    sampling = {"logit_bias": {60: 30.0}} if begin else {}
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, **rules, **sampling)
    said = answer.token_ids
    if begin:
        assert said[0] == begin
        said = said[1:]
    else:
        assert answer.token_ids == expected(engine, rules, {})
    assert said[budget : budget + len(end)] == end


def test_reasoning_whose_end_has_begun_by_itself_is_ended_with_the_rest(engine: EngineProcess) -> None:
    [free] = engine.generate([PROMPT], max_tokens=LENGTH)
    said = free.token_ids
    end = [*said[4:6], 50]
    rules = {"reasoning": ReasoningMarks(end), "thinking_budget": 6}
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, **rules)
    assert answer.token_ids[:7] == [*said[:6], 50]
    assert answer.token_ids == expected(engine, rules, {})


def test_an_answer_without_reasoning_has_no_budget(engine: EngineProcess) -> None:
    [free] = engine.generate([PROMPT], max_tokens=LENGTH)
    marks = ReasoningMarks([50], begin=next(t for t in range(3, VOCAB) if t != free.token_ids[0]))
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, reasoning=marks, thinking_budget=0)
    assert answer.token_ids == free.token_ids


def test_a_grammar_begins_where_the_budget_ends(engine: EngineProcess) -> None:
    grammar = library_form(GrammarSource("regex", "[0-9]{2}"))
    rules = {"reasoning": ReasoningMarks([50]), "thinking_budget": 3, "grammar": grammar}
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, ignore_eos=False, **rules)
    assert answer.token_ids[3] == 50
    assert answer.token_ids[-1] == EOS
    assert len(answer.token_ids) < LENGTH


def test_a_grammar_that_needs_a_forbidden_word_has_it(engine: EngineProcess) -> None:
    grammar = library_form(GrammarSource("regex", "7{3}"))
    [free] = engine.generate([PROMPT], max_tokens=LENGTH, ignore_eos=False, grammar=grammar)
    words = [[token] for token in set(free.token_ids)]
    [answer] = engine.generate([PROMPT], max_tokens=LENGTH, ignore_eos=False, grammar=grammar, bad_words=words)
    assert answer.error is None
    assert answer.token_ids[-1] == EOS


def test_neighbours_get_the_tokens_that_they_get_alone(engine: EngineProcess) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"bad_words": [[7], [8, 9]]},
        DRAWN,
        {"allowed_token_ids": [70, 71, 72], **DRAWN},
        {"reasoning": ReasoningMarks(END), "thinking_budget": 4},
        {"grammar": library_form(GrammarSource("regex", "[0-9]{3,9}")), "ignore_eos": False},
    ]
    alone = [engine.generate([PROMPT], max_tokens=LENGTH, **each)[0].token_ids for each in asked]
    with engine.at_once():
        ids = [engine.add(PROMPT, **{"max_tokens": LENGTH, **each}) for each in asked]
    assert [answer.token_ids for answer in engine.wait(ids)] == alone


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"allowed_token_ids": []}, "one or more token ids"),
        ({"allowed_token_ids": [VOCAB]}, "of the vocabulary"),
        ({"allowed_token_ids": [5], "grammar": library_form(GrammarSource("regex", "a")), "ignore_eos": False},
         "with a grammar"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "which min_tokens forbids"),
        ({"bad_words": [[]]}, "bad_words must have"),
        ({"bad_words": [[5], [-1]]}, "bad_words must have"),
        ({"thinking_budget": 4}, "with reasoning"),
        ({"thinking_budget": -1, "reasoning": ReasoningMarks([50])}, "at least 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(engine: EngineProcess, rules: dict[str, Any], why: str) -> None:
    [answer] = engine.generate([PROMPT], **rules)
    assert answer.error is not None
    assert why in answer.error.message
