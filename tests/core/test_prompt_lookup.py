"""Drafts by prompt lookup: they are those of a plain search, and change no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kv_oracle import Engine
from naive_lookup import Lookup
from naive_scheduler import Setup

LOOKUP = Lookup(num_speculative_tokens=4, shortest=2, longest=4)
PLAIN = Setup(((2, 64, 0),), 4, 16, 64, 96)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, length).tolist()


def run(setup: Setup, *, is_ahead: bool = False) -> Engine:
    """Run three requests to their ends; with `is_ahead` each step is planned before the one before it is over."""
    e = Engine(setup)
    for i, length in enumerate((6, 30, 11)):
        e.add(i, prompt(length, i), max_tokens=40)
    while is_ahead and e.step_ahead():
        pass
    e.drain()
    return e


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in step", "a step ahead"])
@pytest.mark.parametrize("num_blocks", [64, 26], ids=["with room", "with preemptions"])
@pytest.mark.parametrize("window", [0, 9])
def test_answers_are_those_without_guesses(window: int, num_blocks: int, is_ahead: bool) -> None:
    setup = replace(PLAIN, groups=((2, num_blocks, 0), (1, num_blocks, window)))
    alone, e = run(setup), run(replace(setup, lookup=LOOKUP), is_ahead=is_ahead)
    assert all(e.finished[i].outputs == each.outputs for i, each in alone.finished.items())
    assert (e.scheduler.stats().num_preemptions_total > 0) == (num_blocks < 64)
    stats = e.scheduler.stats()
    assert 0 <= stats.accepted_draft_tokens_total <= stats.draft_tokens_total
    if not is_ahead:
        assert stats.accepted_draft_tokens_total > 10
        assert len(e.computed_tokens) < len(alone.computed_tokens)


def test_drafts_are_those_of_a_plain_search() -> None:
    e = Engine(replace(PLAIN, lookup=LOOKUP))
    e.add(1, prompt(20, 5), max_tokens=60)
    e.step()
    num_drafts = num_guesses = 0
    while e.requests:
        [tokens] = [list(request.tokens) for request in e.requests.values()]
        plan = e.schedule()
        assert plan is not None
        expected = LOOKUP.guess_next(tokens)[: 60 + 20 - len(tokens) - 1]
        assert plan.token_ids.tolist() == [tokens[-1], *expected]
        num_drafts += bool(expected)
        num_guesses += len(expected)
        e.commit()
    stats = e.scheduler.stats()
    assert (stats.drafts_total, stats.draft_tokens_total) == (num_drafts, num_guesses)


def test_a_guess_replaces_any_other_draft() -> None:
    """The naive scheduler expects so, also of requests that are computed again, chunk by chunk."""
    setup = replace(PLAIN, groups=((2, 24, 0),), max_num_batched_tokens=12, enable_prefix_caching=False)
    e = Engine(replace(setup, lookup=replace(LOOKUP, shortest=3)))
    for i, length in enumerate((20, 30, 25, 3)):
        e.add(i, prompt(length, i), max_tokens=40)
    while e.requests:
        for request_id in e.requests:
            e.set_draft(request_id, num_right=1, wrong=[])
        for _ in range(5):
            e.step()
    assert e.scheduler.stats().num_preemptions_total > 0


def test_a_draft_counts_as_rows_whose_keys_are_read_once() -> None:
    e = Engine(replace(PLAIN, lookup=LOOKUP))
    e.add(1, [0, 1, 2] * 4, max_tokens=30)
    e.step()
    plan = e.schedule()
    assert plan is not None
    assert len(plan.token_ids) > 1
    assert (plan.work.num_rows, plan.work.prompt_pairs) == (len(plan.token_ids), 0)
    assert plan.work.decode_context == plan.context_lens[0]


@pytest.mark.parametrize("lookup", [Lookup(0, 1, 2), Lookup(3, 0, 2), Lookup(3, 3, 2)])
def test_a_lookup_that_makes_no_sense_is_refused(lookup: Lookup) -> None:
    with pytest.raises(ValueError, match="prompt_lookup"):
        replace(PLAIN, lookup=lookup).scheduler()
