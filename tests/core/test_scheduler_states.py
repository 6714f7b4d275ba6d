"""Random histories against the oracle: results stay right in any order of adding, aborting and committing."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_oracle import Engine
from naive_lookup import Lookup
from naive_scheduler import PRIORITIES_PER_CLASS, Setup

# Few different tokens and block-wise repetition: prefixes are shared often, and diverge often.
TOKENS = st.integers(0, 2)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    block_size = draw(st.sampled_from([2, 4]))
    max_model_len = draw(st.integers(4, 40))
    max_num_batched_tokens = draw(st.integers(1, 32))
    chunked = draw(st.booleans())
    whole = -(-max_model_len // block_size)

    def group(window: int) -> tuple[int, int, int]:
        needed = whole
        if window and chunked:
            needed = min(whole, -(-(window - 1) // block_size) + 2)
        return draw(st.integers(1, 3)), needed + draw(st.integers(0, 4)), window

    windows = draw(st.sampled_from([(0,), (0, 5), (3,), (0, 1), (0, 0), (4, 0, 9)]))
    return Setup(
        tuple(group(window) for window in windows),
        block_size,
        draw(st.integers(1, 9)),
        max_num_batched_tokens,
        max_model_len,
        draw(st.booleans()),
        chunked,
        draw(st.none() | st.integers(block_size, 16)),
        long_prefill_token_threshold=draw(st.none() | st.integers(1, 16)),
        max_num_partial_prefills=draw(st.none() | st.integers(1, 3)),
        max_long_partial_prefills=draw(st.integers(1, 2)),
        scheduling_policy=draw(st.sampled_from(["hrrn", "hrrn", "spf", "turns", "deadline", "priority", "fcfs"])),
        lookup=draw(st.none() | st.sampled_from([Lookup(3, 1, 2), Lookup(6, 2, 5)])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(setup=setups(), writes_back=st.booleans())
    def start(self, setup: Setup, writes_back: bool) -> None:
        self.engine = Engine(setup)
        self.writes_back = writes_back
        if writes_back:
            self.engine.write_back()
        self.next_id = 0
        self.history: list[list[int]] = [[0, 1] * 20]

    @rule(
        source=st.integers(0, 1 << 16),
        keep=st.integers(0, 24),
        tail=st.lists(TOKENS, min_size=1, max_size=12),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 4),
        stop=st.lists(TOKENS, max_size=1),
        namespace=st.sampled_from([b"a", b"a", b"b"]),
        skip_prefix_match=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 0, 1, *(i * PRIORITIES_PER_CLASS for i in (-1, 1, 2, 2))]),
        deadline_s=st.sampled_from([math.inf, math.inf, 1.0, 2.0, 3.5]),
        flow=st.sampled_from([0, 0, 1, 2]),
        flow_weight=st.sampled_from([1.0, 1.0, 3.0, 0.3]),
    )
    def add(self, source: int, keep: int, tail: list[int], **params: object) -> None:
        prompt = self.history[source % len(self.history)][:keep] + tail
        prompt = prompt[: self.engine.setup.max_model_len - 1]
        self.engine.add(self.next_id, prompt, **params)
        self.history.append(prompt)
        self.next_id += 1

    @rule(copies=st.integers(2, 4), prompt=st.lists(TOKENS, min_size=1, max_size=16), max_tokens=st.integers(1, 40))
    def add_equal(self, copies: int, prompt: list[int], max_tokens: int) -> None:
        for _ in range(copies):
            self.add(source=0, keep=0, tail=prompt, max_tokens=max_tokens)

    @precondition(lambda self: len(self.engine.plans) < 2)
    @rule()
    def schedule(self) -> None:
        is_ahead, had_work = bool(self.engine.plans), self.engine.scheduler.has_work()
        planned = self.engine.schedule() is not None
        assert is_ahead or self.engine.loads or self.engine.away or planned == had_work

    @precondition(lambda self: self.engine.plans)
    @rule(broken=st.integers(0, 20))
    def commit(self, broken: int) -> None:
        # Sampled tokens become a prefix of later prompts: the next turn of a conversation.
        self.history.extend(list(r.tokens) for r in self.engine.requests.values())
        self.engine.commit(broken=broken)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 1 << 16), num_right=st.integers(0, 6), wrong=st.lists(TOKENS, max_size=6))
    def set_draft(self, pick: int, num_right: int, wrong: list[int]) -> None:
        ids = sorted(self.engine.requests)
        self.engine.set_draft(ids[pick % len(ids)], num_right, wrong)

    @precondition(lambda self: not self.engine.plans)
    @rule(steps=st.integers(1, 16), num_right=st.integers(0, 5), wrong=st.lists(TOKENS, max_size=3))
    def run_drafted(self, steps: int, num_right: int, wrong: list[int]) -> None:
        for _ in range(steps):
            for request_id in self.engine.requests:
                self.engine.set_draft(request_id, num_right, wrong)
            self.engine.step()

    @precondition(lambda self: not self.engine.plans)
    @rule(steps=st.integers(1, 16))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: len(self.engine.plans) < 2)
    @rule(steps=st.integers(1, 16))
    def run_ahead(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step_ahead()

    @rule(source=st.integers(0, 1 << 16), num_blocks=st.integers(1, 4), namespace=st.sampled_from([b"a", b"a", b"b"]))
    def begin_loading(self, source: int, num_blocks: int, namespace: bytes) -> None:
        """Something else has a block of a prompt that came once."""
        size, prompt = self.engine.setup.block_size, self.history[source % len(self.history)]
        if num_blocks := min(num_blocks, len(prompt) // size):
            self.engine.begin_loading(namespace, prompt[: num_blocks * size])

    @precondition(lambda self: self.engine.loads)
    @rule(pick=st.integers(0, 1 << 16), is_loaded=st.booleans())
    def end_loading(self, pick: int, is_loaded: bool) -> None:
        loads = sorted(self.engine.loads)
        self.engine.end_loading(loads[pick % len(loads)], is_loaded)

    @rule(
        source=st.integers(0, 1 << 16),
        num_blocks=st.integers(1, 8),
        namespace=st.sampled_from([b"a", b"a", b"b"]),
        max_share=st.sampled_from([0.25, 0.5, 1.0]),
    )
    def pin(self, source: int, num_blocks: int, namespace: bytes, max_share: float) -> None:
        prompt = self.history[source % len(self.history)]
        self.engine.pin(namespace, prompt[: num_blocks * self.engine.setup.block_size], max_share)

    @precondition(lambda self: self.engine.num_pins)
    @rule(pick=st.integers(0, 1 << 16))
    def unpin(self, pick: int) -> None:
        self.engine.unpin(pick % self.engine.num_pins)

    @precondition(lambda self: self.writes_back)
    @rule(max_blocks=st.integers(0, 12))
    def take_offers(self, max_blocks: int) -> None:
        self.engine.take_offers(max_blocks)

    @precondition(lambda self: self.engine.requests)
    @rule(which=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=3))
    def abort(self, which: list[int]) -> None:
        ids = sorted(self.engine.requests)
        self.engine.abort(*(ids[i % len(ids)] for i in which), 1 << 40)

    @rule(waited_s=st.sampled_from([0.01, 0.3, 1.0, 2.0, 5.0]))
    def wait(self, waited_s: float) -> None:
        self.engine.now_s += waited_s

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        assert all(group.cached == 0 for group in self.engine.scheduler.stats().groups)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongMachine(SchedulerMachine):
    """A million steps of the same."""


TestSchedulerForLong = pytest.mark.slow(pytest.mark.timeout(0)(LongMachine.TestCase))
TestSchedulerForLong.settings = settings(
    max_examples=10_000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
