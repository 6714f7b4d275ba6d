"""A simulated engine: what can be computed by hand, and what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv._core import PRIORITIES_PER_CLASS, GroupSpec, Scheduler, StepPlan
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival
from swiftkv.simulate.report import Targets, figures
from swiftkv.simulate.simulator import Outcome, simulate

MAX_MODEL_LEN = 4096


def scheduler(num_blocks: int = 1024, max_num_batched_tokens: int = 1024) -> Scheduler:
    return Scheduler(
        [GroupSpec(2, num_blocks)],
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
    )


def run(arrivals: Sequence[Arrival], num_blocks: int = 1024) -> Outcome:
    """A step takes a millisecond per token."""
    return simulate(scheduler(num_blocks), MAX_MODEL_LEN, lambda plan: 1e-3 * len(plan.token_ids), arrivals)


def test_one_request_by_hand() -> None:
    outcome = run([Arrival(2.0, 1000, 3, (0, 1))])
    assert outcome.ttft_s == pytest.approx([1.0])
    assert outcome.tpot_s == pytest.approx([0.001])
    assert outcome.e2e_s == pytest.approx([1.002])
    assert (outcome.num_steps, outcome.busy_s) == (3, pytest.approx(1.002))


def test_an_equal_beginning_is_in_the_cache() -> None:
    outcome = run([Arrival(0.0, 1000, 1, (0, 1)), Arrival(5.0, 1500, 1, (0, 1, 2))])
    assert outcome.cached_tokens.tolist() == [0, 992]  # whole blocks of 16
    assert outcome.ttft_s == pytest.approx([1.0, 0.508])


def test_two_that_come_together_share_steps() -> None:
    outcome = run([Arrival(0.0, 300, 2, (0,)), Arrival(0.0, 400, 2, (1,))])
    assert outcome.ttft_s == pytest.approx([0.7, 0.7])
    assert outcome.e2e_s == pytest.approx([0.702, 0.702])


def test_what_is_too_long_is_refused_and_counted() -> None:
    outcome = run(
        [Arrival(0.0, MAX_MODEL_LEN, 1, tuple(range(8))), Arrival(0.0, 10, 0, (9,)), Arrival(0.0, 10, 1, (9,))]
    )
    assert (outcome.num_refused, len(outcome.arrival_s)) == (2, 1)


ARRIVALS = st.lists(
    st.builds(
        lambda time_s, length, answer, first: Arrival(
            time_s, length, answer, tuple(range(first, first + -(-length // BLOCK_TOKENS)))
        ),
        st.floats(0, 2),
        st.integers(1, 1500),
        st.integers(1, 40),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=20,
).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.time_s))


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([257, 320, 1024]))
def test_whatever_comes_is_served_in_an_order_that_can_be(arrivals: list[Arrival], num_blocks: int) -> None:
    outcome = run(arrivals, num_blocks)
    assert not np.isnan(outcome.end_s).any()
    assert (outcome.first_token_s > outcome.arrival_s).all()
    assert (outcome.end_s >= outcome.first_token_s).all()
    assert (outcome.cached_tokens < outcome.input_tokens).all()
    assert outcome.busy_s <= outcome.end_s.max() + 1e-9
    alone = outcome.input_tokens + outcome.output_tokens - 1 - outcome.cached_tokens
    assert outcome.busy_s >= 1e-3 * alone.sum() - 1e-6  # every token is computed, preempted ones again
    if not outcome.num_preemptions:
        assert outcome.busy_s == pytest.approx(1e-3 * alone.sum())


def test_a_request_of_a_higher_class_displaces_work_of_a_lower_one() -> None:
    batch = [Arrival(0.0, 100, 900, (i,), priority=2 * PRIORITIES_PER_CLASS) for i in range(8)]
    outcome = run([*batch, Arrival(2.0, 100, 1, (9,))])
    assert outcome.ttft_s[8] < 0.12
    assert outcome.num_preemptions == 1


def test_targets_of_first_tokens_and_of_the_others() -> None:
    outcome = run([Arrival(0.0, 1000, 1, (0, 1)), Arrival(10.0, 2000, 5, (2, 3, 4, 5))])
    assert figures(outcome, Targets(ttft_s=1.5))["targets_met"] == 0.5
    assert figures(outcome, Targets(tpot_s=0.0005))["targets_met"] == 0.5  # an answer of one token has no other
    of_both = figures(outcome, Targets(ttft_s=1.5, tpot_s=0.0005))
    assert of_both["goodput_requests_per_s"] == pytest.approx(1 / outcome.end_s.max())
    assert of_both["goodput_tokens_per_s"] == pytest.approx(1001 / outcome.end_s.max())
    assert of_both["targets_met_tokens"] == pytest.approx(1001 / (1001 + 2005))


def test_plans_do_not_depend_on_the_run() -> None:
    """The same trace gives the same plans, token for token."""

    def plans() -> list[tuple[bytes, bytes]]:
        seen: list[tuple[bytes, bytes]] = []

        def step_time(plan: StepPlan) -> float:
            seen.append((plan.token_ids.tobytes(), plan.context_lens.tobytes()))
            return 1e-3 * len(plan.token_ids)

        arrivals = [Arrival(0.05 * i, 200 + 37 * i, 9, (i % 3, 10 + i)) for i in range(20)]
        simulate(scheduler(300), MAX_MODEL_LEN, step_time, arrivals)
        return seen

    assert plans() == plans()


def test_clients_send_their_next_request_when_they_have_an_answer() -> None:
    arrivals = [Arrival(100.0 * i, 500, 1, (i,)) for i in range(4)]
    outcome = simulate(scheduler(), MAX_MODEL_LEN, lambda plan: 1e-3 * len(plan.token_ids), arrivals, num_clients=1)
    assert outcome.arrival_s == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert outcome.ttft_s == pytest.approx([0.5] * 4)
    together = simulate(scheduler(), MAX_MODEL_LEN, lambda plan: 1e-3 * len(plan.token_ids), arrivals, num_clients=2)
    assert together.arrival_s == pytest.approx([0.0, 0.0, 1.0, 1.0])


def test_a_client_sends_the_turns_of_a_conversation_before_it_begins_another() -> None:
    conversations = [7, None, 8, 7, 8, 7]
    arrivals = [Arrival(0.0, 500, 1, (i,), conversation=of) for i, of in enumerate(conversations)]
    outcome = simulate(scheduler(), MAX_MODEL_LEN, lambda plan: 1e-3 * len(plan.token_ids), arrivals, num_clients=1)
    assert np.argsort(outcome.arrival_s).tolist() == [0, 3, 5, 1, 2, 4]
    both = simulate(scheduler(), MAX_MODEL_LEN, lambda plan: 1e-3 * len(plan.token_ids), arrivals, num_clients=2)
    assert both.arrival_s == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
