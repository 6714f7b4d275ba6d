"""An engine process handles requests that are unusual, wrong or given up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from swiftkv.engine.engine import MAX_MESSAGES_PER_STEP
from swiftkv.engine.messages import FINISH_LENGTH, FINISH_STOP, AddRequest, SamplingParams
from tests.engine.engine_process import Answer, EngineProcess
from tests.support.checkpoints import SHAPE, make_checkpoint

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return make_checkpoint(checkpoint, "llama")


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "a step ahead"])
def engine(checkpoint: Path, model: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "scheduling_policy": "hrrn"}
    with EngineProcess(checkpoint, max_model_len=MAX_MODEL_LEN, async_scheduling=request.param, **options) as process:
        yield process


@pytest.fixture(autouse=True)
def every_block_comes_back(engine: EngineProcess) -> Iterator[None]:
    yield
    stats = engine.wait_for_rest()
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.step_tokens.count == stats.steps_total
    assert stats.step_tokens.total == stats.prompt_tokens_total + stats.generation_tokens_total


def test_ready_says_what_the_engine_is(engine: EngineProcess) -> None:
    assert engine.ready.model == "tiny"
    assert engine.ready.pid == engine.process.pid
    assert engine.ready.max_model_len == MAX_MODEL_LEN
    assert engine.ready.vocab_size == SHAPE["vocab_size"]
    assert engine.ready.eos_token_ids == [SHAPE["eos_token_id"]]
    layer_block_bytes = 2 * 16 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    assert engine.ready.num_blocks == engine.config.memory.num_bytes // (layer_block_bytes * SHAPE["num_hidden_layers"])


def test_an_answer_ends_at_its_length_and_at_that_of_the_model(engine: EngineProcess) -> None:
    short, long = engine.wait([engine.add([3, 4], max_tokens=5), engine.add([3] * 500, max_tokens=100)])
    assert (len(short.token_ids), short.finish_reason) == (5, FINISH_LENGTH)
    assert (len(long.token_ids), long.finish_reason) == (MAX_MODEL_LEN - 500, FINISH_LENGTH)


def test_stop_tokens_end_an_answer_and_belong_to_it(engine: EngineProcess) -> None:
    [free] = engine.generate([[9, 8, 7]], max_tokens=20)
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    [stopped] = engine.generate([[9, 8, 7]], max_tokens=20, stop_token_ids=[stop])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == FINISH_STOP
    [later] = engine.generate([[9, 8, 7]], max_tokens=20, stop_token_ids=[stop], min_tokens=first + 3)
    assert len(later.token_ids) >= first + 3
    assert stop not in later.token_ids[: first + 2]


def test_the_models_own_end_counts_unless_it_is_ignored(engine: EngineProcess) -> None:
    bias = {SHAPE["eos_token_id"]: 1000.0}
    ended, ignored, late = engine.wait(
        [
            engine.add([5], max_tokens=4, ignore_eos=False, logit_bias=bias),
            engine.add([5], max_tokens=4, ignore_eos=True, logit_bias=bias),
            engine.add([5], max_tokens=4, ignore_eos=True, logit_bias=bias, min_tokens=3),
        ]
    )
    assert (ended.token_ids, ended.finish_reason) == ([SHAPE["eos_token_id"]], FINISH_STOP)
    assert (ignored.token_ids, ignored.finish_reason) == ([SHAPE["eos_token_id"]] * 4, FINISH_LENGTH)
    is_end = [token == SHAPE["eos_token_id"] for token in late.token_ids]
    assert (is_end, late.finish_reason) == ([False, False, False, True], FINISH_LENGTH)  # as in vLLM


def test_repetition_penalty_is_that_of_transformers(engine: EngineProcess, model: PreTrainedModel) -> None:
    prompt = [7, 40, 41, 42, 7, 40]
    expected = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=60,
        do_sample=False,
        repetition_penalty=1.4,
        eos_token_id=None,
        pad_token_id=0,
    )
    [answer] = engine.generate([prompt], max_tokens=60, repetition_penalty=1.4)
    assert answer.token_ids == expected[0, len(prompt) :].tolist()


def test_seeded_draws_do_not_depend_on_what_else_runs(engine: EngineProcess) -> None:
    wanted = {"max_tokens": 40, "temperature": 1.5, "top_p": 0.95, "seed": 11}
    [alone] = engine.generate([[3, 4, 5]], **wanted)
    crowd = [engine.add([i + 3] * 30, max_tokens=50, temperature=1.0) for i in range(5)]
    same = engine.add([3, 4, 5], **wanted)
    other = engine.add([3, 4, 5], **{**wanted, "seed": 12})
    answers = engine.wait([*crowd, same, other])
    assert answers[-2].token_ids == alone.token_ids
    assert answers[-1].token_ids != alone.token_ids


def test_requests_without_a_seed_differ(engine: EngineProcess) -> None:
    first, second = engine.generate([[3, 4, 5]] * 2, max_tokens=40, temperature=1.5)
    assert first.token_ids != second.token_ids


def test_cached_tokens_are_counted_and_salts_kept_apart(engine: EngineProcess) -> None:
    prompt = [11 + i % 50 for i in range(70)]
    cold = engine.wait([engine.add(prompt, cache_salt="a")])[0]
    warm = engine.wait([engine.add(prompt, cache_salt="a")])[0]
    apart = engine.wait([engine.add(prompt, cache_salt="b")])[0]
    assert [answer.cached_tokens for answer in (cold, warm, apart)] == [0, 64, 0]
    assert cold.token_ids == warm.token_ids == apart.token_ids


def test_aborted_requests_give_back_their_blocks(engine: EngineProcess) -> None:
    """Some of them run, some still wait; the last goes on undisturbed."""
    engine.stats = None
    ids = [engine.add([i + 3] * 200, max_tokens=300) for i in range(12)]
    survivor = engine.add([100, 101, 102], max_tokens=10)
    while not engine.answers[ids[0]].token_ids:
        engine.take_one()
    engine.abort(*ids, 10**6)
    assert len(engine.wait([survivor])[0].token_ids) == 10


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "empty"),
        ([3, SHAPE["vocab_size"]], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([3] * MAX_MODEL_LEN, {}, "511"),
        ([3], {"temperature": float("nan")}, "temperature"),
        ([3], {"logit_bias": {10**9: 1.0}}, "logit_bias"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"max_tokens": 2**40}, "max_tokens"),
    ],
)
def test_what_is_wrong_with_a_request_is_answered(
    engine: EngineProcess, prompt: list[int], sampling: dict[str, object], says: str
) -> None:
    [answer] = engine.generate([prompt], **sampling)
    assert answer.error is not None
    assert answer.error.status == 400
    assert says in answer.error.message
    assert len(engine.generate([[3]], max_tokens=2)[0].token_ids) == 2


def test_a_request_without_a_next_token_ends_alone(engine: EngineProcess) -> None:
    steady = engine.add([3, 4, 5], max_tokens=30)
    nothing_is_left = {"stop_token_ids": list(range(SHAPE["vocab_size"])), "min_tokens": 1, "temperature": 1.0}
    answers = engine.wait([engine.add([9] * 40, logprobs=1, prompt_logprobs=1, **nothing_is_left), steady])
    assert answers[0].error is not None
    assert answers[0].error.status == 500
    assert not answers[0].token_ids
    assert len(answers[1].token_ids) == 30


def test_requests_have_waited_since_they_came_to_the_gateway(engine: EngineProcess) -> None:
    """The engine takes messages between two steps; by then one that came at the step's begin has waited for a while."""
    now_s = time.monotonic()
    with engine.at_once():
        short = engine.add([4] * 60, "its own cache", arrived_s=now_s)
        long = engine.add([3] * 120, "its own cache", arrived_s=now_s - 100)
    while not (engine.answers[long].token_ids or engine.answers[short].token_ids):
        engine.take_one()
    assert not engine.answers[short].token_ids
    engine.wait([long, short])


def test_a_priority_that_is_no_int32_is_answered(engine: EngineProcess) -> None:
    engine.answers[10**10] = Answer()
    engine.send(AddRequest(10**10, np.ones(1, np.int32).tobytes(), SamplingParams(4), priority=2**40))
    [answer] = engine.wait([10**10])
    assert answer.error is not None
    assert "priority" in answer.error.message


def test_a_prompt_that_is_no_whole_number_of_tokens_is_answered(engine: EngineProcess) -> None:
    engine.answers[10**9] = Answer()
    engine.send(AddRequest(10**9, b"abc", SamplingParams(4)))
    [answer] = engine.wait([10**9])
    assert answer.error is not None


def test_between_two_steps_an_engine_takes_a_bounded_number_of_messages(engine: EngineProcess) -> None:
    """Hundreds wait when it comes to look: who is being answered goes on meanwhile."""
    steady = engine.add([3] * 10, max_tokens=400)
    while not engine.answers[steady].token_ids:
        engine.take_one()
    engine.process.send_signal(signal.SIGSTOP)
    waiting = [engine.add([3, 4], max_tokens=1) for _ in range(900)]  # beneath the high-water mark
    engine.abort(*waiting[:850])
    engine.process.send_signal(signal.SIGCONT)
    del engine.taken[:-1]
    engine.wait([steady, *waiting[850:]])
    engine.wait_for_rest()
    assert engine.taken[-1] - engine.taken[0] > 3 * MAX_MESSAGES_PER_STEP
    assert max(later - earlier for earlier, later in pairwise(engine.taken)) <= MAX_MESSAGES_PER_STEP
