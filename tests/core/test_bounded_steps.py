"""Steps that are bounded in time, in virtual time: each takes as long as a law says, and the scheduler finds it out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from kv_oracle import Engine
from naive_scheduler import Setup
from test_step_time import work_of

from swiftkv import _core

BLOCK = 16
TARGET_S = 0.25
NO_STOP = np.array([], np.int32)


def time_of(work: _core.StepWork) -> float:
    """A small model on two cores: 22 ms a step, 1.2 ms a token."""
    return 0.022 + 1.2e-3 * work.num_tokens + 1.2e-7 * work.prompt_pairs + 4e-7 * work.decode_context


@dataclass
class Clock:
    """A scheduler in virtual time."""

    scheduler: _core.Scheduler
    now_s: float = 0.0
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, decodes, prompt tokens
    first_token_s: dict[int, float] = field(default_factory=dict)

    def add(self, request_id: int, length: int, max_tokens: int) -> None:
        prompt = np.random.default_rng(request_id).integers(0, 1000, length, dtype=np.int32)
        self.scheduler.add_request(request_id, prompt, max_tokens, 0, NO_STOP, b"", False, arrival_s=self.now_s)

    def step(self) -> bool:
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return False
        lengths = np.diff(plan.query_starts)
        duration_s = time_of(plan.work)
        self.now_s += duration_s
        self.steps.append((duration_s, int((lengths == 1).sum()), int(lengths[lengths > 1].sum())))
        result = self.scheduler.commit(np.full(len(plan.logits_rows), 7, np.int32), duration_s)
        for request_id in result.request_ids.tolist():
            self.first_token_s.setdefault(request_id, self.now_s)
        return True


def clock(
    target_tpot_s: float | None = TARGET_S,
    num_streams: int = 4,
    block_size: int = BLOCK,
    num_guesses: int | None = None,
) -> Clock:
    """Streams that decode, and a predictor that has seen prompts."""
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, 8192)],
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        target_tpot_s=target_tpot_s,
        num_speculative_tokens=num_guesses,
    )
    made = Clock(scheduler)
    for i, length in enumerate([30, 300, 900, 1500, 60]):
        made.add(1000 + i, length, 4)
        while made.step():
            pass
    for i in range(num_streams):
        made.add(i, 20, 4000)
    while len(made.first_token_s) < 5 + num_streams:
        made.step()
    made.steps.clear()
    return made


def test_a_prompt_leaves_time_for_guesses() -> None:
    made = clock(num_streams=2, num_guesses=7)
    made.add(99, 3000, 1)
    before = made.scheduler.stats()
    while 99 not in made.first_token_s:
        made.step()
    assert max(duration_s for duration_s, _, _ in made.steps) <= 1.02 * TARGET_S
    stats = made.scheduler.stats()
    # Both streams get one token over and over, so that every guess is right.
    assert stats.accepted_draft_tokens_total - before.accepted_draft_tokens_total > 12 * len(made.steps)


def ids_of_next_step(e: Engine) -> list[int]:
    """Do a step, and return which requests it ran, in order."""
    plan = e.schedule()
    assert plan is not None
    ids: list[int] = plan.request_ids.tolist()
    e.commit()
    return ids


def test_without_a_target_a_prompt_takes_what_is_left_of_the_step() -> None:
    c = clock(target_tpot_s=None)
    c.add(100, 2000, 1)
    c.step()
    assert c.steps[0][1:] == (4, 2000)


def test_steps_with_decodes_take_as_long_as_they_should() -> None:
    c = clock()
    for i in range(3):
        c.add(100 + i, 2000, 1)
    while not all(100 + i in c.first_token_s for i in range(3)):
        c.step()
    mixed = [duration_s for duration_s, num_decodes, num_prompt_tokens in c.steps if num_prompt_tokens]
    assert max(mixed) < 1.05 * TARGET_S
    assert np.median(mixed) > 0.9 * TARGET_S  # nothing is wasted
    assert all(num_decodes == 4 for _, num_decodes, _ in c.steps)


def test_prompts_share_the_time_of_a_step() -> None:
    c = clock()
    c.add(100, 60, 1)
    c.add(101, 60, 1)
    c.add(102, 1000, 1)
    c.step()
    duration_s, num_decodes, num_prompt_tokens = c.steps[0]
    assert num_decodes == 4
    assert 120 < num_prompt_tokens < 1120
    assert duration_s < 1.05 * TARGET_S


def test_a_prompt_gets_a_block_however_little_time_there_is() -> None:
    c = clock(target_tpot_s=0.001, num_streams=0, block_size=64)  # which takes three times as long as a decode
    c.add(0, 20, 4000)
    c.step()
    c.add(100, 2000, 1)
    c.steps.clear()
    while 100 not in c.first_token_s:
        c.step()
    assert min(num for _, _, num in c.steps[:-1]) == 64


def test_prompts_get_as_much_time_as_decodes_if_those_take_all() -> None:
    c = clock(target_tpot_s=0.02)  # a step of decodes takes 27 ms
    c.add(100, 2000, 1)
    c.step()
    assert c.steps[0][0] == pytest.approx(2 * (0.022 + 4 * 1.2e-3), rel=0.1)


def test_prompts_alone_are_not_bounded() -> None:
    c = clock(num_streams=0)
    c.add(100, 2000, 1)
    c.step()
    assert c.steps[0][1:] == (0, 2000)


def test_the_first_prompts_beside_decodes_are_short() -> None:
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, 8192)], BLOCK, 16, max_num_batched_tokens=2048, max_model_len=8192, target_tpot_s=TARGET_S
    )
    c = Clock(scheduler)
    c.add(1, 5, 4000)
    c.step()
    c.step()
    c.add(2, 2000, 1)
    c.step()
    assert c.steps[-1][1:] == (1, 4 * BLOCK)
    while 2 not in c.first_token_s:
        c.step()
    assert max(duration_s for duration_s, _, _ in c.steps) < 1.2 * TARGET_S
    assert max(num for _, _, num in c.steps) > 8 * BLOCK  # as soon as it is known how long they take


def test_a_chunk_has_at_most_the_threshold_and_others_get_the_rest() -> None:
    e = Engine(Setup(((3, 64, 0),), 4, 8, 32, 128, long_prefill_token_threshold=8, max_long_partial_prefills=3))
    for i in range(5):
        e.add(i, [i] * 40, max_tokens=1)
    plan = e.schedule()
    assert plan is not None
    assert np.diff(plan.query_starts).tolist() == [8, 8, 8]
    e.commit()
    e.drain()


def test_long_prompts_wait_for_one_another_and_short_ones_for_none() -> None:
    e = Engine(Setup(((3, 64, 0),), 4, 8, 32, 128, long_prefill_token_threshold=8))
    e.add(1, [1] * 40, max_tokens=1)
    e.add(2, [2] * 40, max_tokens=1)
    e.add(3, [3] * 8, max_tokens=1)
    assert ids_of_next_step(e) == [1, 3]
    e.drain()
    assert list(e.finished) == [3, 1, 2]


@pytest.mark.parametrize(("lengths", "planned"), [([40, 40, 40, 8], [0, 1]), ([8, 8, 8, 8], [0, 1, 2, 3])])
def test_no_more_prompts_are_computed_in_part_than_allowed(lengths: list[int], planned: list[int]) -> None:
    setup = Setup(((3, 64, 0),), 4, 8, 64, 128, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    e = Engine(replace(setup, max_long_partial_prefills=4))
    for i, length in enumerate(lengths):
        e.add(i, [i] * length, max_tokens=1)
    assert ids_of_next_step(e) == planned
    e.drain()


@pytest.mark.parametrize("limit", [{"max_num_partial_prefills": 1}, {"max_long_partial_prefills": 1}])
def test_a_prompt_in_part_holds_up_none_of_a_higher_class(limit: dict[str, int]) -> None:
    setup = Setup(((3, 64, 0),), 4, 8, 64, 128, long_prefill_token_threshold=8)
    e = Engine(replace(setup, **limit))
    e.add(1, [1] * 40, max_tokens=1, priority=_core.PRIORITIES_PER_CLASS)
    e.schedule()
    e.commit()
    e.add(2, [2] * 40, max_tokens=1)
    e.add(3, [3] * 40, max_tokens=1)
    assert ids_of_next_step(e) == [2, 1]
    e.drain()


@pytest.mark.parametrize(
    "mistake",
    [
        {"target_tpot_s": 0.0},
        {"target_tpot_s": -1.0},
        {"long_prefill_token_threshold": 0},
        {"max_num_partial_prefills": 0},
        {"max_long_partial_prefills": 0},
    ],
)
def test_limits_that_cannot_be_are_refused(mistake: dict[str, float]) -> None:
    [name] = mistake
    with pytest.raises(ValueError, match=name):
        _core.Scheduler([_core.GroupSpec(1, 64)], BLOCK, 4, 64, 128, **mistake)  # type: ignore[arg-type]


def test_how_fast_prompts_are_computed_beside_answers() -> None:
    def rate(c: Clock) -> float:
        tokens_per_s = c.scheduler.stats().prefill_tokens_per_s
        assert tokens_per_s is not None
        return tokens_per_s

    alone, beside, unbounded = clock(num_streams=0), clock(), clock(target_tpot_s=None)
    assert rate(alone) == pytest.approx(2048 / time_of(work_of((0, 2048))), rel=0.05)
    length = round((TARGET_S - 0.022 - 4 * 1.2e-3) / 1.2e-3)
    assert rate(beside) == pytest.approx(length / TARGET_S, rel=0.05)
    assert rate(beside) < rate(unbounded) < rate(alone)
    assert Setup(((1, 64, 0),), 4, 4, 32, 64).scheduler().stats().prefill_tokens_per_s is None


def test_how_long_a_prompt_takes_is_forecast_chunk_by_chunk() -> None:
    alone, beside = clock(num_streams=0), clock()
    works = [work_of((0, 2048)), work_of((2048, 2048)), work_of((4096, 100))]
    assert alone.scheduler.prefill_s(0, 4196) == pytest.approx(sum(map(time_of, works)), rel=0.05)
    assert alone.scheduler.prefill_s(2048, 4196) == pytest.approx(sum(map(time_of, works[1:])), rel=0.05)
    assert alone.scheduler.prefill_s(7, 7) == 0
    in_chunks_s = beside.scheduler.prefill_s(0, 512)
    assert in_chunks_s is not None
    assert in_chunks_s > time_of(work_of((0, 512)))
    assert Setup(((1, 64, 0),), 4, 4, 32, 64).scheduler().prefill_s(0, 64) is None
