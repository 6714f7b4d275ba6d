"""A model's states: which event leads where, checked against a table with events at random. No engine is started."""

from __future__ import annotations

import asyncio
import time

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from swiftkv.server.engine_state import EngineState, EngineStatus, Observation

S = EngineState
SEEN = (S.READY, S.SLOW, S.NOT_RESPONDING, S.STOPPED)
AWAKE = (*SEEN, S.STARTING, S.RESTARTING, S.DOWN)
GONE = (S.RESTARTING, S.DOWN)


class States(RuleBasedStateMachine):
    """`shown` is what the rules below say the state is, and `awake` what it is once nobody's decision hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.status = EngineStatus()
        self.shown = self.awake = S.STARTING

    def is_in(self, *states: EngineState) -> bool:
        return self.shown in states

    @rule()
    def a_process_comes_up(self) -> None:
        self.status.came_up()
        self.awake = S.READY
        if self.is_in(*AWAKE, S.WAKING):
            self.shown = S.READY

    @rule(state=st.sampled_from(SEEN))
    def it_is_looked_at(self, state: EngineState) -> None:
        self.status.observe(Observation(state, None, time.monotonic()))
        self.awake = state
        if self.is_in(*AWAKE):
            self.shown = state

    @rule(state=st.sampled_from(GONE))
    def its_process_is_killed(self, state: EngineState) -> None:
        self.status.went_down("was killed by SIGKILL", state, 1.0)
        self.awake = state
        if self.is_in(S.SLEEPING):
            self.shown = S.ASLEEP
        elif self.is_in(*AWAKE, S.WAKING):
            self.shown = state
        assert self.status.observed is None

    @rule()
    def somebody_puts_it_to_sleep(self) -> None:
        could = self.is_in(*SEEN)
        assert self.status.go_to_sleep() == could
        if could:
            self.shown = S.SLEEPING

    @rule()
    def its_requests_do_not_end(self) -> None:
        could = self.is_in(S.SLEEPING)
        assert self.status.stay_awake() == could
        if could:
            self.shown = self.awake

    @rule()
    def the_engine_says_that_it_sleeps(self) -> None:
        self.status.fell_asleep()
        if self.is_in(S.SLEEPING):
            self.shown = S.ASLEEP

    @rule()
    def somebody_wakes_it(self) -> None:
        could = self.is_in(S.ASLEEP)
        assert self.status.wake_up() == could
        if could:
            self.shown = S.WAKING

    @rule()
    def the_engine_says_that_it_is_awake(self) -> None:
        self.status.woke_up()
        if self.is_in(S.WAKING):
            self.shown = self.awake

    @rule(really=st.integers(0, 9))
    def the_node_stops(self, really: int) -> None:
        if really == 0:
            self.status.drain()
            self.shown = S.DRAINING

    @invariant()
    def the_state_is_as_the_table_says(self) -> None:
        status = self.status
        assert status.state is self.shown
        assert status.rests == self.is_in(S.SLEEPING, S.ASLEEP)
        assert status.is_draining == self.is_in(S.DRAINING)
        assert not (status.state.is_there and (status.rests or self.is_in(S.WAKING, *GONE)))
        assert status.refusal("chat").status == 503


def test_every_event_leads_where_the_table_says() -> None:
    async def run() -> None:
        run_state_machine_as_test(States)  # type: ignore[no-untyped-call]

    asyncio.run(run())


@given(st.lists(st.sampled_from(("sleep", "killed", "fell asleep", "wake", "came up", "stay")), max_size=12))
def test_who_waits_for_a_state_is_told_of_each(events: list[str]) -> None:
    """Nothing is missed, however quickly states follow each other."""

    async def run() -> None:
        status = EngineStatus()
        seen = []

        async def follow() -> None:
            while True:
                seen.append(status.state)
                await status.until_not(status.state)

        follower = asyncio.create_task(follow())
        expected = [status.state]
        await asyncio.sleep(0)
        for event in events:
            {
                "sleep": status.go_to_sleep,
                "killed": lambda: status.went_down("was killed", S.RESTARTING, 1.0),
                "fell asleep": status.fell_asleep,
                "wake": status.wake_up,
                "came up": status.came_up,
                "stay": status.stay_awake,
            }[event]()
            for _ in range(3):
                await asyncio.sleep(0)
            if status.state is not expected[-1]:
                expected.append(status.state)
        follower.cancel()
        assert seen == expected

    asyncio.run(run())
