"""The work ahead of a prompt that arrives: against a naive model, and interruptions against a simulation in ticks."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from naive_prompt_queue import NaivePromptQueue, Pace, Prompt

from swiftkv._core import PRIORITIES_PER_CLASS, PromptPace, PromptQueue, QueuedPrompt, WorkAhead
from swiftkv.policies import SchedulingPolicy

TICK_S = 1e-3
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


def queued(prompt: Prompt) -> QueuedPrompt:
    return QueuedPrompt(
        prompt.num_tokens,
        prompt.num_left,
        prompt.arrived_s,
        priority=prompt.priority,
        deadline_s=prompt.deadline_s,
        flow=prompt.flow,
        flow_weight=prompt.flow_weight,
        num_coming=prompt.num_coming,
    )


def fields_of(ahead: WorkAhead) -> tuple[float, ...]:
    behind = ahead.steps_behind, ahead.work_behind_s
    return ahead.steps, ahead.work_s, *behind, ahead.num_waiting, ahead.tokens_waiting, ahead.num_begun


def pace_of(rng: np.random.Generator) -> tuple[PromptPace, Pace]:
    spare_s = math.inf if rng.random() < 0.3 else float(rng.uniform(0.01, 0.4))
    terms = {
        "token_s": 1e-3,
        "pair_s": 2e-7,
        "overhead_s": 0.02,
        "spare_s": spare_s,
        "budget": float(rng.integers(50, 2048)),
    }
    return PromptPace(**terms), Pace(**terms)


class Histories:
    """The same events for the queue and for the model, one at a time."""

    def __init__(self, policy: SchedulingPolicy, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.queue, self.naive = PromptQueue(policy), NaivePromptQueue(policy)
        self.now_s = 0.0
        self.num_flows = int(self.rng.integers(1, 4))
        self.priorities = (
            [0] if self.rng.random() < 0.5 else [-3, 0, 2, PRIORITIES_PER_CLASS // 2, PRIORITIES_PER_CLASS]
        )

    def prompt(self) -> Prompt:
        num_tokens = int(np.exp(self.rng.uniform(0, 9)))
        num_left, num_coming = self.left_of(num_tokens)
        return Prompt(
            num_tokens,
            num_left,
            self.now_s,
            priority=int(self.rng.choice(self.priorities)),
            deadline_s=self.now_s + float(self.rng.uniform(0.1, 20)),
            flow=int(self.rng.integers(self.num_flows)),
            flow_weight=float(self.rng.choice([0.5, 1.0, 3.0])),
            num_coming=num_coming,
        )

    def left_of(self, num_tokens: int) -> tuple[int, int]:
        """Return how many tokens are left of a prompt, and how many of these others will leave in the cache."""
        num_left = int(self.rng.integers(1, num_tokens + 1))
        return num_left, int(self.rng.integers(num_left)) if self.rng.random() < 0.3 else 0

    def event(self, request_id: int, most: int) -> None:
        self.now_s += float(self.rng.exponential(0.2))
        if self.rng.random() < 0.7:
            pace, naive_pace = pace_of(self.rng) if self.rng.random() < 0.9 else (None, None)
            self.queue.advance(self.now_s, pace)
            self.naive.advance(self.now_s, naive_pace)
        if not self.naive.prompts or (len(self.naive.prompts) < most and self.rng.random() < 0.6):
            prompt = self.prompt()
            self.queue.add(request_id, queued(prompt))
            self.naive.add(request_id, prompt)
            return
        chosen = int(self.rng.choice(list(self.naive.prompts)))
        kind = self.rng.random()
        num_left, num_coming = self.left_of(self.naive.prompts[chosen].num_tokens)
        if kind < 0.4:
            self.queue.begin(chosen, num_left)
            self.naive.begin(chosen, num_left)
        elif kind < 0.6:
            self.queue.expect(chosen, num_left, num_coming)
            self.naive.expect(chosen, num_left, num_coming)
        else:
            self.queue.remove(chosen)
            self.naive.remove(chosen)

    def compare(self) -> None:
        pace, naive_pace = pace_of(self.rng)
        new = self.prompt()
        wait_s = float(self.rng.uniform(0, 30))
        found = fields_of(self.queue.ahead_of(queued(new), pace))
        assert found == pytest.approx(self.naive.ahead_of(new, naive_pace), rel=1e-9, abs=1e-9)
        overtaking = self.naive.overtaking_part(new, naive_pace, wait_s)
        assert self.queue.overtaking_part(queued(new), pace, wait_s) == pytest.approx(overtaking, rel=1e-9)
        assert self.queue.end_of_class(new.priority) == self.naive.end_of_class(new.priority)
        assert self.queue.is_empty == (not self.naive.prompts)
        assert self.queue.has_begun == bool(self.naive.begun)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_the_model(policy: SchedulingPolicy, seed: int) -> None:
    both = Histories(policy, seed)
    most = 5 if seed % 2 else 60
    for request_id in both.rng.permutation(300).tolist():
        both.event(request_id, most)
        both.compare()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_latest_prompts_replace_what_came_long_ago(policy: SchedulingPolicy) -> None:
    both = Histories(policy, 99)
    for request_id in range(1500):
        both.event(request_id, 20)
    for _ in range(20):
        both.compare()


def test_ids_that_are_gone_are_ignored_and_none_comes_twice() -> None:
    queue = PromptQueue("hrrn")
    prompt = QueuedPrompt(10, 10, 0.0)
    queue.add(3, prompt)
    with pytest.raises(ValueError, match="there already"):
        queue.add(3, prompt)
    queue.remove(3)
    queue.remove(3)
    queue.begin(3, 5)
    queue.expect(3, 5, 0)
    assert queue.find(3) is None
    assert queue.is_empty
    assert not queue.has_begun


def naive_part(left: float, waited_s: float, speed: float, own_left: int) -> float:
    """Return the part of a single prompt that is computed until the newcomer's ratio is as high."""
    time_s = 0.0
    while left - speed * time_s > 0:
        if time_s / own_left >= (waited_s + time_s) / (left - speed * time_s):
            return time_s * speed / left
        time_s += TICK_S
    return 1.0


@pytest.mark.parametrize("seed", range(20))
def test_a_long_prompt_is_computed_until_it_is_interrupted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, waited_s, speed = int(rng.integers(500, 8000)), float(rng.uniform(0.1, 30)), float(rng.uniform(300, 900))
    own_left = int(rng.integers(10, left // 4))
    pace = PromptPace(token_s=1 / speed, pair_s=0.0, overhead_s=0.0, spare_s=0.0 + 1e-12, budget=1e12)
    queue = PromptQueue("hrrn")
    queue.add(1, QueuedPrompt(left, left, 0.0))
    ahead = queue.ahead_of(QueuedPrompt(own_left, own_left, waited_s), pace)
    expected = naive_part(left, waited_s, speed, own_left)
    assert ahead.work_s * speed / left == pytest.approx(expected, abs=2 * TICK_S * speed / left + 1e-6)


@pytest.mark.parametrize(("step_s", "ahead_s"), [(1.5, 4.5), (2.25, 4.5), (3.0, 10.0)])
def test_ratios_are_compared_between_steps_only(step_s: float, ahead_s: float) -> None:
    pace = PromptPace(token_s=0.01, pair_s=0.0, overhead_s=0.0, spare_s=step_s, budget=1e12)
    queue = PromptQueue("hrrn")
    queue.add(1, QueuedPrompt(1000, 1000, 0.0))
    # The newcomer's ratio is the higher one from 4 to 5 seconds on.
    assert queue.ahead_of(QueuedPrompt(100, 100, 20.0), pace).work_s == pytest.approx(ahead_s)


def test_of_those_that_came_the_latest_512_tell_who_comes_later() -> None:
    pace = PromptPace(token_s=0.01, pair_s=0.0, overhead_s=0.0, spare_s=1.0, budget=1e12)
    queue = PromptQueue("hrrn")
    queue.add(0, QueuedPrompt(10, 10, 0.0))
    parts = []
    for i in range(1, 513):
        queue.add(i, QueuedPrompt(5000, 5000, 1.0))
        parts.append(queue.overtaking_part(QueuedPrompt(5000, 5000, 2.0), pace, 1.0))
    assert min(parts[:511]) > 0  # the short one
    assert parts[511] == 0
