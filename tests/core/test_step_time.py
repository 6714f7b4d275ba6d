"""The predictor of a step's time: on steps of a known law, on noise, and inside the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from naive_scheduler import Setup

from swiftkv import _core

NO_STOP = np.array([], np.int32)
LAW = (1.2e-3, 1.2e-7, 4e-7, 1.1e-3, 2e-4, 0.02)  # of a small model on two cores: token, pair, context, row, copy, step


def work_of(*rows: tuple[int, int], num_copies: int = 0) -> _core.StepWork:
    """`rows`: tokens before, tokens computed."""
    work = _core.StepWork()
    for begin, num_tokens in rows:
        work.add_row(begin, num_tokens)
    work.num_copies = num_copies
    return work


def time_of(work: _core.StepWork, law: tuple[float, ...] = LAW) -> float:
    sizes = (work.num_tokens, work.prompt_pairs, work.decode_context, work.num_rows, work.num_copies, 1.0)
    return sum(c * x for c, x in zip(law, sizes, strict=True))


def random_work(rng: np.random.Generator) -> _core.StepWork:
    decodes = [(int(rng.integers(1, 4000)), 1) for _ in range(rng.integers(0, 16))]
    prompts = [(int(rng.integers(0, 4000)), int(rng.integers(2, 1000))) for _ in range(rng.integers(0, 3))]
    return work_of(*decodes, *prompts, (7, 1), num_copies=int(rng.integers(0, 40)))


def decode_work(rng: np.random.Generator) -> _core.StepWork:
    return work_of(*((int(rng.integers(1, 4000)), 1) for _ in range(rng.integers(1, 16))))


def prompt_work(rng: np.random.Generator) -> _core.StepWork:
    return work_of((int(rng.integers(0, 400)), int(rng.integers(16, 1000))))


def mean_error(step_time: _core.StepTime, works: list[_core.StepWork], law: tuple[float, ...] = LAW) -> float:
    return float(np.mean([abs(step_time.predict(w) - time_of(w, law)) / time_of(w, law) for w in works]))


def test_the_sizes_of_a_step() -> None:
    work = work_of((10, 1), (20, 1), (100, 8))
    assert (work.num_tokens, work.num_rows, work.decode_context) == (10, 3, 32)
    # Token i of the chunk looks back on about 100 + i.
    assert work.prompt_pairs == 8 * 104


def fill_steps(time_of_tokens: Callable[[float], float], counts: Sequence[int], num_steps: int) -> _core.StepTime:
    """Return a predictor after steps of prompts and decodes. They take what their tokens say, and `LAW` for pairs."""
    rng = np.random.default_rng(0)
    step_time = _core.StepTime()
    for i in range(num_steps):
        prompt = prompt_work(rng)
        step_time.observe(prompt, time_of_tokens(prompt.num_tokens) + LAW[1] * prompt.prompt_pairs)
        decodes = work_of(*[(9, 1)] * counts[i % len(counts)])
        step_time.observe(decodes, time_of_tokens(decodes.num_tokens))
    return step_time


def errors(step_time: _core.StepTime, works: list[_core.StepWork], times_s: Sequence[float]) -> list[float]:
    return [abs(step_time.predict(work) / time_s - 1) for work, time_s in zip(works, times_s, strict=True)]


def test_steps_follow_a_curve() -> None:
    def tokens_s(num_tokens: float) -> float:
        """Return the time of a machine that has better kernels for some numbers of tokens."""
        return (0.02 + 0.001 * num_tokens) * (0.75 if 12 < num_tokens < 100 else 1.0)

    step_time = fill_steps(tokens_s, (1, 2, 4, 8, 12, 16, 32, 64), 800)
    line = _core.StepTime(step_time.coefficients)
    rng = np.random.default_rng(1)
    decodes = [work_of(*[(9, 1)] * n) for n in range(1, 65)]
    prompts = [prompt_work(rng) for _ in range(200)]
    for works in decodes, prompts:
        times_s = [tokens_s(work.num_tokens) + LAW[1] * work.prompt_pairs for work in works]
        by_curve, by_line = errors(step_time, works, times_s), errors(line, works, times_s)
        assert np.mean(by_curve) < 0.75 * np.mean(by_line)
        assert sum(map(step_time.predict, works)) == pytest.approx(sum(times_s), rel=0.03)
    again = _core.StepTime(step_time.coefficients, step_time.token_ratios)
    assert again.predict(prompts[5]) == step_time.predict(prompts[5])
    # A step with prompts goes by all its tokens.
    mixed = work_of(*[(9, 1)] * 16, (200, 240))
    assert step_time.predict(mixed) == pytest.approx(tokens_s(256) + LAW[1] * mixed.prompt_pairs, rel=0.1)
    length = step_time.longest_chunk(decodes[15], 0, 0.5)
    assert step_time.predict(work_of(*[(9, 1)] * 16, (0, length))) <= 0.5
    assert step_time.predict(work_of(*[(9, 1)] * 16, (0, length + 1))) > 0.5


def test_where_no_step_had_so_many_tokens_the_nearest_decide() -> None:
    step_time = _core.StepTime()
    for i in range(800):
        prompt = work_of((0, 1000))
        step_time.observe(prompt, 1.2)
        decodes = work_of(*[(9, 1)] * (1, 8, 16)[i % 3])
        step_time.observe(decodes, 0.03 if decodes.num_rows < 16 else 0.06)
    line = _core.StepTime(step_time.coefficients)
    for num_rows in 16, 24, 32:
        decodes = work_of(*[(9, 1)] * num_rows)
        assert step_time.predict(decodes) > 1.1 * line.predict(decodes)


def test_the_latest_steps_of_decodes_set_the_pace() -> None:
    rng = np.random.default_rng(0)
    step_time = _core.StepTime()
    for _ in range(300):
        for work in random_work(rng), decode_work(rng):
            step_time.observe(work, time_of(work))
    decodes, prompt = work_of(*[(9, 1)] * 4), work_of((0, 300))
    usual_s = step_time.predict(prompt)
    for _ in range(12):
        work = decode_work(rng)
        step_time.observe(work, 1.3 * time_of(work))
    assert step_time.predict(decodes) == pytest.approx(1.3 * time_of(decodes), rel=0.04)
    assert step_time.predict(prompt) == pytest.approx(usual_s, rel=0.02)
    step_time.observe(decodes, 1000 * time_of(decodes))  # held up
    assert step_time.predict(decodes) < 1.6 * time_of(decodes)


def test_a_step_of_copies_alone_is_on_no_curve() -> None:
    step_time = fill_steps(lambda n: 0.02 + 0.005 * n, (1, 4, 16), 300)
    before = step_time.token_ratios
    for _ in range(64):
        step_time.observe(work_of(num_copies=1), 0.5)
    assert step_time.token_ratios == pytest.approx(before, rel=0.01)


def test_a_curve_forgets() -> None:
    counts = (1, 8, 16)
    step_time = fill_steps(lambda n: 0.04 if n <= 8 else 0.08 + 0.001 * n, counts, 1000)
    eight = work_of(*[(9, 1)] * 8)
    assert step_time.predict(eight) == pytest.approx(0.04, rel=0.05)
    for i in range(1500):
        num_rows = counts[i % len(counts)]
        step_time.observe(work_of(*[(9, 1)] * num_rows), 0.04 if num_rows < 8 else 0.08 + 0.001 * num_rows)
    assert step_time.predict(eight) == pytest.approx(0.088, rel=0.05)


def test_a_law_is_found() -> None:
    rng = np.random.default_rng(0)
    step_time = _core.StepTime()
    assert not step_time.is_known
    for _ in range(200):
        work = random_work(rng)
        step_time.observe(work, time_of(work))
    assert step_time.is_known
    assert step_time.coefficients == pytest.approx(LAW, rel=0.02)
    assert mean_error(step_time, [random_work(rng) for _ in range(100)]) < 0.005
    assert step_time.error_ratio < 0.05  # of the first predictions as well


def test_noise_and_steps_that_the_machine_interrupted_do_little_harm() -> None:
    rng = np.random.default_rng(1)
    step_time = _core.StepTime()
    for i in range(600):
        work = random_work(rng)
        interrupted = 20.0 if i % 40 == 5 else 1.0
        step_time.observe(work, time_of(work) * rng.lognormal(0, 0.05) * interrupted)
    assert mean_error(step_time, [random_work(rng) for _ in range(100)]) < 0.05


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_predictions_are_right_on_average(noise: float) -> None:
    """Steps that take longer by chance count as much as those that take less."""
    rng = np.random.default_rng(8)
    step_time = _core.StepTime()
    predicted_s, taken_s = [], []
    for i in range(6000):
        work = random_work(rng)
        duration_s = time_of(work) * rng.lognormal(-(noise**2) / 2, noise)
        if i >= 200:
            predicted_s.append(step_time.predict(work))
            taken_s.append(duration_s)
        step_time.observe(work, duration_s)
    assert sum(predicted_s) / sum(taken_s) == pytest.approx(1.0, abs=0.01)


def test_the_error_is_that_of_late() -> None:
    rng = np.random.default_rng(10)
    step_time = _core.StepTime()
    errors = []
    for noise in (0.02, 0.4):
        for _ in range(1500):
            work = random_work(rng)
            duration_s = time_of(work) * rng.lognormal(0, noise)
            errors.append(abs(step_time.predict(work) - duration_s) / duration_s)
            step_time.observe(work, duration_s)
    assert step_time.error_ratio == pytest.approx(np.mean(errors[-500:]), rel=0.2)


def test_no_coefficient_is_negative() -> None:
    rng = np.random.default_rng(2)
    step_time = _core.StepTime()
    for _ in range(300):
        work = random_work(rng)
        step_time.observe(work, 0.05 * rng.lognormal(0, 1.0))  # no law at all
        assert min(step_time.coefficients) >= 0


def test_long_decoding_does_not_forget_what_prompts_cost() -> None:
    rng = np.random.default_rng(3)
    step_time = _core.StepTime()
    prompts = [work_of((0, n)) for n in (40, 300, 700, 1000, 60, 512, 128, 900)]
    for work in prompts:
        step_time.observe(work, time_of(work))
    for _ in range(5000):
        work = decode_work(rng)
        step_time.observe(work, time_of(work) * rng.lognormal(0, 0.03))
    assert mean_error(step_time, prompts) < 0.05
    assert mean_error(step_time, [decode_work(rng) for _ in range(100)]) < 0.03


def test_a_machine_that_slows_down_is_followed() -> None:
    rng = np.random.default_rng(4)
    step_time = _core.StepTime()
    slow = tuple(3 * c for c in LAW)
    for law in (LAW, slow):
        for _ in range(2000):
            work = random_work(rng)
            step_time.observe(work, time_of(work, law))
    assert mean_error(step_time, [random_work(rng) for _ in range(100)], slow) < 0.03


def test_steps_that_nobody_timed_teach_nothing() -> None:
    step_time = _core.StepTime()
    for _ in range(10):
        step_time.observe(work_of((0, 8), (5, 1)), 0.0)
    assert step_time.predict(work_of((0, 8))) == 0
    assert not step_time.is_known


@pytest.mark.parametrize("begin", [0, 1000, 30_000])
def test_the_longest_chunk_takes_what_is_left(begin: int) -> None:
    rng = np.random.default_rng(5)
    step_time = _core.StepTime()
    for _ in range(200):
        work = random_work(rng)
        step_time.observe(work, time_of(work))
    decodes = [(500, 1), (900, 1)]
    length = step_time.longest_chunk(work_of(*decodes), begin, 0.25)
    assert length > 16
    assert step_time.predict(work_of(*decodes, (begin, length))) <= 0.25 * (1 + 1e-9)
    assert step_time.predict(work_of(*decodes, (begin, length + 1))) > 0.25
    assert step_time.longest_chunk(work_of(*decodes), begin, 0.01) == 0


def test_a_model_without_a_cost_for_tokens_has_no_longest_chunk() -> None:
    assert _core.StepTime().longest_chunk(work_of((5, 1)), 0, 0.1) == 2**31 - 1


def test_the_scheduler_learns_from_its_steps_and_tells_how_well() -> None:
    scheduler = Setup(((1, 4096, 0),), 16, 8, 256, 4096).scheduler()
    rng = np.random.default_rng(6)
    for i in range(24):
        prompt = rng.integers(0, 1000, int(rng.integers(10, 600)), dtype=np.int32)
        scheduler.add_request(i, prompt, int(rng.integers(2, 60)), 0, NO_STOP, b"", False)
    num_steps = 0
    while (plan := scheduler.schedule()) is not None:
        lengths = np.diff(plan.query_starts)
        rows = zip((plan.context_lens - lengths).tolist(), lengths.tolist(), strict=True)
        expected = work_of(*rows)
        assert (plan.work.num_tokens, plan.work.prompt_pairs) == (expected.num_tokens, expected.prompt_pairs)
        assert (plan.work.decode_context, plan.work.num_rows) == (expected.decode_context, expected.num_rows)
        scheduler.commit(np.full(len(plan.logits_rows), 7, np.int32), duration_s=time_of(plan.work))
        num_steps += 1
    assert num_steps > 50
    assert 0 < scheduler.stats().step_time_error_ratio < 0.1
    assert mean_error(scheduler.step_time(), [work_of((300, 1), (50, 1)), work_of((0, 256))]) < 0.05


def test_what_was_learnt_elsewhere_predicts_at_once_and_goes_on() -> None:
    rng = np.random.default_rng(7)
    step_time = _core.StepTime.remembered(list(LAW))
    assert step_time.is_known
    assert mean_error(step_time, [random_work(rng) for _ in range(100)]) < 1e-6
    usual = _core.StepTime(step_time.usual_coefficients)
    assert mean_error(usual, [random_work(rng) for _ in range(100)]) < 1e-6
    for _ in range(20):
        work = random_work(rng)
        step_time.observe(work, time_of(work))
    assert mean_error(step_time, [random_work(rng) for _ in range(100)]) < 0.005
    for _ in range(20):  # few beside what was remembered
        work = random_work(rng)
        step_time.observe(work, 1.5 * time_of(work))
    usual = _core.StepTime(step_time.usual_coefficients)
    assert mean_error(usual, [random_work(rng) for _ in range(100)]) < 0.15
    slow = tuple(3 * c for c in LAW)
    for _ in range(2000):
        work = random_work(rng)
        step_time.observe(work, time_of(work, slow))
    assert mean_error(step_time, [random_work(rng) for _ in range(100)], slow) < 0.03


def test_what_is_usual_is_known_better_and_followed_later() -> None:
    rng = np.random.default_rng(9)
    step_time = _core.StepTime()
    for _ in range(6000):
        work = random_work(rng) if rng.random() < 0.1 else work_of((int(rng.integers(1, 4000)), 1))
        step_time.observe(work, time_of(work) * rng.lognormal(0, 0.2))
    many = [work_of(*[(1000, 1)] * 16)] * 2
    usual = _core.StepTime(step_time.usual_coefficients)
    assert mean_error(usual, many) < 0.1
    slow = tuple(3 * c for c in LAW)
    for _ in range(1000):
        work = random_work(rng)
        step_time.observe(work, time_of(work, slow))
    latest, usual = (_core.StepTime(c) for c in (step_time.coefficients, step_time.usual_coefficients))
    assert mean_error(latest, many, slow) < 0.1 < mean_error(usual, many, slow)


@pytest.mark.parametrize(
    "coefficients", [[0.0] * 6, [-1e-3, 0, 0, 0, 0, 1], [float("nan"), 0, 0, 0, 0, 1], [float("inf"), 0, 0, 0, 0, 1]]
)
def test_what_cannot_have_been_learnt_is_refused(coefficients: list[float]) -> None:
    with pytest.raises(ValueError, match="a step takes some time"):
        _core.StepTime.remembered(coefficients)


def test_a_scheduler_begins_with_what_another_learnt() -> None:
    scheduler = Setup(((1, 256, 0),), 16, 8, 256, 1024).scheduler()
    assert scheduler.stats().prefill_tokens_per_s is None
    scheduler.remember_step_time(list(LAW))
    assert scheduler.step_time().coefficients == pytest.approx(LAW)
    assert scheduler.stats().prefill_tokens_per_s is not None
