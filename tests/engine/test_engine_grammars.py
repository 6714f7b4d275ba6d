"""An engine holds answers to grammars, whatever else a step has. Weights are random: the grammar does all the work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from swiftkv.engine.grammars import Grammars
from swiftkv.engine.messages import FINISH_LENGTH, FINISH_STOP, ReasoningMarks
from swiftkv.grammars import GrammarSource, library_form
from tests.engine.engine_process import Answer, EngineProcess
from tests.engine.test_sampler import make_request
from tests.support.checkpoints import SHAPE, make_checkpoint
from tests.support.schemas import ENDLESS, SCHEMAS

EOS = int(SHAPE["eos_token_id"])
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
PROMPT = [9, 40, 41, 7]
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
WORDS = ["yes", "no", 'perhaps "so"', "ja, größer", "no\nline"]
SUM = 'start: NUMBER (("+" | "-") NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'
SUM_GBNF = 'root ::= number ("+" number)? ("-" number)?\nnumber ::= [0-9] [0-9]?'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grammars")
    make_checkpoint(directory, "llama", tokenizer=True)
    return directory


@pytest.fixture(scope="module")
def read(checkpoint: Path) -> Callable[[Answer], str]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)

    def text(answer: Answer) -> str:
        assert answer.error is None
        return str(tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    return text


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "a step ahead"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    with EngineProcess(checkpoint, async_scheduling=request.param, **OPTIONS) as process:
        yield process


@pytest.fixture(autouse=True)
def every_block_comes_back(engine: EngineProcess) -> Iterator[None]:
    yield
    assert engine.wait_for_rest().num_used_blocks == 0


def held(kind: Any, text: str, whitespace: str | None = None, **sampling: Any) -> dict[str, Any]:
    grammar = library_form(GrammarSource(kind, text, whitespace))
    return {"max_tokens": 300, "ignore_eos": False, "grammar": grammar, **sampling}


def draws(count: int) -> list[dict[str, Any]]:
    return [{"temperature": 0.0}, *({"temperature": 1.5, "seed": seed} for seed in range(count))]


@pytest.mark.parametrize(
    ("kind", "text", "holds"),
    [
        ("regex", DATE, lambda text: re.fullmatch(DATE, text)),
        ("choice", json.dumps(WORDS), lambda text: text in WORDS),
        ("grammar", SUM, lambda text: re.fullmatch(r"[0-9]{1,3}([+-][0-9]{1,3}){1,3}", text)),
        ("grammar", SUM_GBNF, lambda text: re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})?(-[0-9]{1,2})?", text)),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_an_answer_is_one_that_the_grammar_has(
    engine: EngineProcess, read: Callable[[Answer], str], kind: str, text: str, holds: Callable[[str], object]
) -> None:
    answers = engine.wait([engine.add(PROMPT, **held(kind, text, **drawn)) for drawn in draws(6)])
    texts = [read(answer) for answer in answers]
    assert [text for text in texts if not holds(text)] == []
    assert {answer.finish_reason for answer in answers} == {FINISH_STOP}
    assert {answer.token_ids[-1] for answer in answers} == {EOS}
    assert len(set(texts)) > 1


@pytest.mark.parametrize("whitespace", [None, ""], ids=["with spaces", "without"])
def test_every_schema_holds_what_is_drawn(
    engine: EngineProcess, read: Callable[[Answer], str], whitespace: str | None
) -> None:
    """Greedy and random; what is cut off by its length is the beginning of something longer, and judged by nobody."""
    drawn = draws(2) if whitespace == "" else draws(1)[:1]
    ids = {
        (name, number): engine.add(PROMPT, **held("json", json.dumps(schema), whitespace, **sampling))
        for name, schema in SCHEMAS.items()
        for number, sampling in enumerate(drawn)
    }
    engine.wait(ids.values())
    wrong, num_ended = {}, 0
    for (name, number), request_id in ids.items():
        answer = engine.answers[request_id]
        text = read(answer)
        if answer.finish_reason == FINISH_LENGTH:
            continue
        num_ended += 1
        validator = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
        without_leap_seconds = text.replace(":60", ":59")  # the grammar allows them in any minute
        if not validator.is_valid(json.loads(without_leap_seconds)):
            wrong[name, number] = text
    assert wrong == {}
    assert num_ended > 0.9 * len(ids)


@pytest.mark.parametrize("token", [None, 7])
def test_an_answer_is_calls_or_what_else_the_grammar_has(
    engine: EngineProcess, read: Callable[[Answer], str], token: int | None
) -> None:
    rules = 'calls: tag_0 "[1]"'
    source = GrammarSource("json", json.dumps(SCHEMAS["person"]), "", calls=rules, tags=(("<", token),))
    asked: dict[str, Any] = {"max_tokens": 300, "ignore_eos": False, "grammar": library_form(source)}
    free = engine.wait([engine.add(PROMPT, **asked, **drawn) for drawn in draws(16)])
    calls, others = (
        {answer.token_ids[0]: read(answer) for answer in free if read(answer).endswith("[1]") == is_call}
        for is_call in (True, False)
    )
    assert calls, "no draw is a call"
    assert others, "every draw is a call"
    assert all(jsonschema_rs.is_valid(SCHEMAS["person"], json.loads(text)) for text in others.values())
    assert not calls.keys() & others.keys()
    assert token is None or calls.keys() == {token}


def test_neighbours_of_a_grammar_get_the_tokens_that_they_get_alone(engine: EngineProcess) -> None:
    asked: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": 30, "temperature": 1.2, "seed": 3, "top_p": 0.9},
        {"max_tokens": 30, "logprobs": 2, "frequency_penalty": 0.5},
    ]
    alone = [engine.generate([PROMPT], **each)[0] for each in asked]
    grammars = [held("json", json.dumps(SCHEMAS[name]), "") for name in ("person", "invoice", "uuid")]
    alone += [engine.generate([PROMPT], **each)[0] for each in grammars]
    together = engine.wait([engine.add(PROMPT, **each) for each in (*asked, *grammars)])
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert together[2].logprobs == alone[2].logprobs


def test_a_grammar_goes_with_everything_that_edits_logits(engine: EngineProcess, read: Callable[[Answer], str]) -> None:
    digits = r"[0-9]{1,40}"
    sampling = {"presence_penalty": 1.5, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "logprobs": 3}
    penalised, biased, long = engine.wait(
        [
            engine.add(PROMPT, **held("regex", digits, **sampling, top_k=5, temperature=0.9, seed=1, min_p=0.01)),
            engine.add(PROMPT, **held("regex", digits, logit_bias={EOS: 100.0})),
            engine.add(PROMPT, **held("regex", digits, logit_bias={EOS: 100.0}, min_tokens=5)),
        ]
    )
    for answer in (penalised, biased, long):
        assert re.fullmatch(digits, read(answer))
    assert len(penalised.logprobs) == len(penalised.token_ids)
    assert any(entry.rank > 3 for entry in penalised.logprobs)  # of all tokens, not of those that the grammar has
    assert len(biased.token_ids) == 2
    assert len(long.token_ids) == 5 + 1


def test_a_grammar_that_is_at_its_end_is_padded_up_to_min_tokens(
    engine: EngineProcess, read: Callable[[Answer], str]
) -> None:
    [answer] = engine.generate([PROMPT], **held("choice", '["ab"]', min_tokens=12))
    assert read(answer) == "ab"
    assert (len(answer.token_ids), answer.finish_reason) == (12, FINISH_STOP)


def test_lengths_and_stop_tokens_end_an_answer_inside_its_grammar(engine: EngineProcess) -> None:
    schema = json.dumps(SCHEMAS["invoice"])
    [whole] = engine.generate([PROMPT], **held("json", schema, ""))
    [short] = engine.generate([PROMPT], **held("json", schema, "", max_tokens=7))
    assert (short.token_ids, short.finish_reason) == (whole.token_ids[:7], FINISH_LENGTH)
    stop = whole.token_ids[9]
    [stopped] = engine.generate([PROMPT], **held("json", schema, "", stop_token_ids=[stop]))
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason == FINISH_STOP


@pytest.mark.parametrize("grammar", ["{", '{"grammars": []}', "start: x", library_form(GrammarSource("regex", "("))])
def test_a_grammar_that_does_not_compile_is_an_error_of_its_request_alone(engine: EngineProcess, grammar: str) -> None:
    bystander = engine.add(PROMPT, max_tokens=40)
    wrong = engine.add(PROMPT, **{**held("regex", "a"), "grammar": grammar})
    right = engine.add(PROMPT, **held("regex", "ab"))
    answers = engine.wait([bystander, wrong, right])
    assert len(answers[0].token_ids) == 40
    assert answers[1].error is not None
    assert (answers[1].error.status, bool(answers[1].error.message)) == (400, True)
    assert answers[2].finish_reason == FINISH_STOP


def test_a_grammar_too_complex_to_follow_ends_its_request_alone(engine: EngineProcess) -> None:
    bystander = engine.add(PROMPT, max_tokens=100)
    heavy = engine.add(PROMPT, **held(*ENDLESS["a regex with a memory"], temperature=2.0, seed=5, max_tokens=400))
    answers = engine.wait([bystander, heavy])
    assert len(answers[0].token_ids) == 100
    error = answers[1].error
    assert error is None or error.status == 400


def test_requests_are_given_up_while_their_grammars_are_compiled(engine: EngineProcess) -> None:
    schema = {"type": "object", "properties": {f"key{i}": SCHEMAS["invoice"] for i in range(60)}}
    ids = [engine.add(PROMPT, **held("json", json.dumps(schema), "")) for _ in range(3)]
    engine.abort(*ids)
    [answer] = engine.generate([PROMPT], max_tokens=5)
    assert len(answer.token_ids) == 5


def test_preempted_answers_go_on_where_their_grammars_were(checkpoint: Path, engine: EngineProcess) -> None:
    asked = [
        held("regex", "[a-z ]{60,90}", temperature=1.3, seed=seed, presence_penalty=0.5, logprobs=1)
        for seed in range(6)
    ]
    expected = engine.wait([engine.add(PROMPT * 6, **each) for each in asked])
    block_bytes = engine.config.memory.num_bytes // engine.ready.num_blocks  # type: ignore[union-attr]
    options = {**OPTIONS, "max_model_len": 192, "kv_bytes": 14 * block_bytes}
    with EngineProcess(checkpoint, async_scheduling=engine.config.async_scheduling, **options) as crowded:
        with crowded.at_once():
            request_ids = [crowded.add(PROMPT * 6, **each) for each in asked]
        answers = crowded.wait(request_ids)
        assert crowded.wait_for_rest().num_preemptions_total > 0
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("length", [1, 2])
def test_a_grammar_begins_where_the_reasoning_ends(
    engine: EngineProcess, read: Callable[[Answer], str], length: int
) -> None:
    """The reasoning is the beginning of an answer without a grammar."""
    free = engine.generate([PROMPT], max_tokens=12)[0].token_ids
    end = free[6 : 6 + length]
    for begin, num_begun in ((None, 0), (free[0], 1)):
        first = next(i for i in range(num_begun, 7) if free[i : i + length] == end) + length
        asked = held("regex", DATE, reasoning=ReasoningMarks(end, begin))
        answer, neighbour = engine.wait([engine.add(PROMPT, **asked), engine.add(PROMPT, max_tokens=12)])
        assert answer.token_ids[:first] == free[:first]
        assert re.fullmatch(DATE, read(Answer(answer.token_ids[first:])))
        assert (answer.finish_reason, neighbour.token_ids) == (FINISH_STOP, free)


def test_an_answer_that_does_not_reason_is_held_from_its_first_token(
    engine: EngineProcess, read: Callable[[Answer], str]
) -> None:
    begin, end = 300, 301
    marks = ReasoningMarks([end], begin)
    at_once, reasons = engine.wait(
        [
            engine.add(PROMPT, **held("regex", DATE, logit_bias={begin: -100.0}), reasoning=marks),
            engine.add(PROMPT, **held("regex", DATE, logit_bias={begin: 100.0, end: 50.0}), reasoning=marks),
        ]
    )
    assert re.fullmatch(DATE, read(at_once))
    assert reasons.token_ids[0] == begin
    assert end in reasons.token_ids or reasons.finish_reason == FINISH_LENGTH


def test_an_answer_does_not_end_in_its_reasoning(engine: EngineProcess, read: Callable[[Answer], str]) -> None:
    """It may where a call of a tool takes the place of what the grammar holds."""
    eager, end = {EOS: 100.0, 301: 50.0}, 301
    ended, called = engine.wait(
        [
            engine.add(PROMPT, **held("choice", '["ab"]', logit_bias=eager), reasoning=ReasoningMarks([end])),
            engine.add(
                PROMPT, **held("choice", '["ab"]', logit_bias=eager), reasoning=ReasoningMarks([end], is_last=True)
            ),
        ]
    )
    assert ended.token_ids[0] == end
    assert read(Answer(ended.token_ids[1:])) == "ab"
    assert called.token_ids == [EOS]


def test_marks_outside_the_vocabulary_are_refused(engine: EngineProcess) -> None:
    for marks in (ReasoningMarks([]), ReasoningMarks([10**6]), ReasoningMarks([1], -1)):
        [answer] = engine.wait([engine.add(PROMPT, **held("regex", DATE), reasoning=marks)])
        assert answer.error is not None
        assert "reasoning" in answer.error.message


def test_an_engine_without_a_tokenizer_says_so(engine: EngineProcess, tmp_path: Path) -> None:
    bare = msgspec.structs.replace(engine.config, path=str(tmp_path))
    grammars = Grammars(bare, SHAPE["vocab_size"], (EOS,), wake=lambda: None)
    request = make_request(1, PROMPT, grammar='start: "a"')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        grammars.hold(request)
    grammars.close()
