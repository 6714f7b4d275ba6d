"""With drafts, right or wrong, an engine says what it says without them, in fewer steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

import swiftkv.grammars
from swiftkv._core import Scheduler, StepPlan, StepResult
from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import FINISH_ABORTED, FINISH_REJECTED, PromptLookup, ReasoningMarks
from swiftkv.engine.runner import ModelRunner
from swiftkv.grammars import GrammarSource, library_form
from tests.engine.engine_process import Answer, EngineProcess
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64}
LIST = library_form(GrammarSource("regex", r"[0-9]{1,3}(, [0-9]{1,3}){2,12}"))
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 40, "presence_penalty": 1.2, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "logprobs": 2},
    {"max_tokens": 37, "temperature": 1.3, "seed": 3, "logprobs": 0, "prompt_logprobs": 1},
    {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4, "frequency_penalty": 0.9},
    {"max_tokens": 40, "temperature": 0.9, "seed": 5, "min_tokens": 20, "stop_token_ids": list(range(40, 80))},
    {"max_tokens": 3, "logit_bias": {11: 4.0}},
    {"max_tokens": 60, "temperature": 0.9, "seed": 6, "grammar": LIST, "ignore_eos": False, "min_tokens": 30},
    {"max_tokens": 40, "bad_words": [[40], [11, 12], *([t, u] for t in range(3, 60) for u in range(60, 90))]},
    {"max_tokens": 40, "temperature": 0.7, "seed": 7, "reasoning": ReasoningMarks([50, 51, 50]), "thinking_budget": 9},
    {"max_tokens": 40, "temperature": 0.7, "seed": 8, "allowed_token_ids": [3, 9, 27, 81, 243]},
]


def ask(engine: EngineProcess | EngineThread[ModelRunner]) -> list[Answer]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 320, n).tolist() for n in (5, 90, 33, 17, 2, 48, 11, 6, 20, 9)]
    with engine.at_once():
        request_ids = [engine.add(prompt, **asked) for prompt, asked in zip(prompts, ASKED, strict=True)]
    return engine.wait(request_ids)


class Drafting:
    """The scheduler of an engine, and somebody who guesses before most of its steps: the first tokens are right."""

    def __init__(self, scheduler: Scheduler, known: dict[int, list[int]]) -> None:
        self._scheduler = scheduler
        self._known = known
        self._rng = random.Random(0)
        self._outputs: dict[int, list[int]] = {}
        self._num_open = 0
        self.num_rejected = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self, now_s: float) -> StepPlan | None:
        if self._num_open and self._rng.random() < 0.5:  # an engine that runs ahead finishes its step first
            return None
        for request_id, outputs in self._outputs.items():
            right = self._known[request_id][len(outputs) :][: self._rng.randint(0, 5)]
            wrong = [self._rng.randrange(3, 320) for _ in range(self._rng.randint(0, 3))]
            self._scheduler.set_draft(request_id, np.array(right + wrong, np.int32))
        plan = self._scheduler.schedule(now_s)
        self._num_open += plan is not None
        return plan

    def commit(self, sampled: Any, duration_s: float) -> StepResult:
        result = self._scheduler.commit(sampled, duration_s)
        self._num_open -= 1
        rows = zip(result.request_ids.tolist(), result.token_ids.tolist(), result.finish_reasons.tolist(), strict=True)
        for request_id, token, reason in rows:
            self.num_rejected += reason == FINISH_REJECTED
            if reason < FINISH_ABORTED:
                self._outputs.setdefault(request_id, []).append(token)
        return result


class DraftingEngine(EngineThread[ModelRunner]):
    """An engine whose scheduler gets drafts of answers that are known."""

    def __init__(self, checkpoint: Path, known: list[Answer], **options: object) -> None:
        super().__init__(checkpoint, ModelRunner, **options)
        self._known = {number: answer.token_ids for number, answer in enumerate(known, 1)}
        self.drafting: Drafting

    def prepare(self, engine: Engine) -> None:
        self.drafting = Drafting(engine._scheduler, self._known)
        engine._scheduler = self.drafting  # type: ignore[assignment]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in step", "a step ahead"])
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["with room", "with preemptions"])
def test_drafts_change_nothing_but_the_number_of_steps(num_blocks: int, is_ahead: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    with EngineProcess(tmp_path, **OPTIONS) as alone:
        expected = ask(alone)
        block_bytes = alone.config.memory.num_bytes // alone.ready.num_blocks
        num_steps = alone.wait_for_rest().steps_total
    options = {**OPTIONS, "kv_bytes": num_blocks * block_bytes, "max_model_len": 192, "async_scheduling": is_ahead}
    engine = DraftingEngine(tmp_path, expected, **options)
    with engine.running():
        assert ask(engine) == expected
        stats = engine.wait_for_rest()
    assert engine.drafting.num_rejected > 20
    assert (stats.num_preemptions_total > 0) == (num_blocks < 64)
    assert is_ahead or num_blocks < 64 or stats.steps_total < num_steps
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize("step_time_s", [[], [1e-3, 0.0, 0.0, 0.0, 0.0, 4e-3]], ids=["for nothing", "at their price"])
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["with room", "with preemptions"])
def test_prompt_lookup_changes_no_answer(num_blocks: int, step_time_s: list[float], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    with EngineProcess(tmp_path, **OPTIONS) as alone:
        expected = ask(alone)
        block_bytes = alone.config.memory.num_bytes // alone.ready.num_blocks
    options = {**OPTIONS, "kv_bytes": num_blocks * block_bytes, "max_model_len": 192, "step_time_s": step_time_s}
    with EngineProcess(tmp_path, **options, prompt_lookup=PromptLookup(6, 1, 3)) as engine:
        assert ask(engine) == expected
        stats = engine.wait_for_rest()
    # How many guesses pay depends on how long steps take here.
    assert stats.accepted_draft_tokens_total <= stats.draft_tokens_total
    assert stats.draft_tokens_total > 0
    assert stats.num_used_blocks == 0


def test_an_answer_that_repeats_itself_takes_few_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    with EngineProcess(tmp_path, **OPTIONS, prompt_lookup=PromptLookup(6, 2, 3)) as engine:
        [answer] = engine.wait([engine.add([5, 6, 7], max_tokens=60, logit_bias={11: 100.0})])
        stats = engine.wait_for_rest()
    assert answer.token_ids == [11] * 60
    # The first three tokens come one by one, and then seven at a time.
    assert stats.steps_total <= 3 + 60 // 7 + 1
    assert stats.accepted_draft_tokens_total == stats.draft_tokens_total


@pytest.mark.parametrize("logit_bias", [{2: 50.0}, {5: 50.0}, {}], ids=["the first", "the second", "both"])
def test_guesses_after_the_end_of_a_grammar_change_no_answer(logit_bias: dict[int, float], tmp_path: Path) -> None:
    """Before `min_tokens` an answer goes on after its grammar has ended, with ends of sequence alone."""
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    (tmp_path / "generation_config.json").unlink()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 5]}))
    grammar = library_form(GrammarSource("choice", json.dumps(["yes", "no"])))
    asked: dict[str, Any] = {"max_tokens": 40, "min_tokens": 30, "grammar": grammar, "logit_bias": logit_bias}
    asked |= {"temperature": 0.9, "seed": 3, "ignore_eos": False}

    def answers(**options: Any) -> tuple[list[Answer], int]:
        with EngineProcess(tmp_path, **OPTIONS, **options) as engine:
            found = engine.wait([engine.add([9, 40, 41, 7], **asked)])
            for copied in found[0].token_ids, [5, 2, 5, 5, 2, 2]:
                found += engine.wait([engine.add([9, *copied, 9], **asked)])
            return found, engine.wait_for_rest().accepted_draft_tokens_total

    expected, _ = answers()
    found, num_accepted = answers(prompt_lookup=PromptLookup(6, 1, 3), step_time_s=[1e-6, 0.0, 0.0, 0.0, 0.0, 1e-2])
    assert found == expected
    assert num_accepted > 0


def test_a_grammar_that_names_tokens_holds_through_guesses(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    rules = 'start: (tag_0 "\\n" /[a-f]/ "\\n" tag_1){12}'
    grammar = library_form(GrammarSource("lark", rules, tags=(("<call>", 300), ("</call>", 301))))
    asked: dict[str, Any] = {"grammar": grammar, "ignore_eos": False, "temperature": 1.0, "seed": 1, "max_tokens": 100}
    with EngineProcess(tmp_path, **OPTIONS) as alone:
        expected = alone.generate([[5, 6, 7]], **asked)
    with EngineProcess(tmp_path, **OPTIONS, prompt_lookup=PromptLookup(6, 1, 3)) as engine:
        assert engine.generate([[5, 6, 7]], **asked) == expected
        stats = engine.wait_for_rest()
    assert stats.accepted_draft_tokens_total > 0
    assert (expected[0].error, expected[0].token_ids.count(300), expected[0].token_ids.count(301)) == (None, 12, 12)


@pytest.mark.parametrize("lookup", [None, PromptLookup(6, 1, 3)], ids=["without", "with"])
def test_a_full_automaton_ends_only_answers_that_need_more_states(
    lookup: PromptLookup | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to one grammar share the states of its automaton, and each takes eight for every letter."""
    monkeypatch.setattr(swiftkv.grammars, "PARSER_LIMITS", LLParserLimits(max_lexer_states=700, verbose_errors=False))
    make_checkpoint(tmp_path, "llama", tokenizer=True, max_position_embeddings=2048)
    letters = {ord(letter): 71 + i for i, letter in enumerate("abcdefgh")}  # their tokens
    branches = "|".join(f"{chr(code)}[^{chr(code).upper()}]{{150}}" for code in letters)
    long, complex_ = (library_form(GrammarSource("regex", regex)) for regex in (branches, "(.*a.{20})&"))
    asked: dict[str, Any] = {"ignore_eos": False, "temperature": 1.0, "max_tokens": 500}
    engine = EngineThread(tmp_path, ModelRunner, **{**OPTIONS, "max_model_len": 1024, "prompt_lookup": lookup})
    with engine.running():
        request_ids = [
            engine.add([5, 6, 7], **asked, grammar=long, logit_bias={token: 60.0}, seed=token)
            for token in letters.values()
        ]
        request_ids.append(engine.add([5, 6, 7], **asked, grammar=complex_, logit_bias={71: 40.0, 72: 40.0}, seed=1))
        *answers, too_complex = engine.wait(request_ids)
        answers += engine.wait([engine.add([5, 6, 7], **asked, grammar=long, logit_bias={71: 60.0}, seed=9)])
        engine.wait_for_rest()
    assert [(answer.error, len(answer.token_ids)) for answer in answers] == [(None, 152)] * 9
    assert too_complex.error is not None
    assert "too many states" in too_complex.error.message
