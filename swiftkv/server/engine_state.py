"""The states of an engine, as `/ready`, `swiftkv status` and metrics show them, and the transitions between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from swiftkv.server.errors import ApiError

DOWN_RETRY_S = 5.0

EndCause = Literal["killed", "exited", "load_failed", "load_timeout", "hung", "coordinator_hung", "bad_message"]
"""The reason why an engine process ended without being told to, as metrics name it."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SLOW = "slow"  # computing something long
    NOT_RESPONDING = "not responding"
    STOPPED = "stopped"  # by a signal or a debugger
    RESTARTING = "restarting"
    DOWN = "down"  # down for good: it is not started again
    SLEEPING = "going to sleep"  # once its requests have ended
    ASLEEP = "asleep"  # without weights, and perhaps without a process
    WAKING = "waking up"
    DRAINING = "draining"

    @property
    def serves(self) -> bool:
        """Whether requests are being answered."""
        return self in (EngineState.READY, EngineState.SLOW)

    @property
    def is_as_wanted(self) -> bool:
        """Whether requests are being answered, or the model was put to sleep."""
        return self.serves or self is EngineState.ASLEEP

    @property
    def is_there(self) -> bool:
        """Whether requests are accepted: an engine that does not respond may recover before it is ended."""
        return self.serves or self in (EngineState.NOT_RESPONDING, EngineState.STOPPED)


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of an engine that exists, as its supervisor sees it."""

    state: EngineState
    why: str | None
    """The rest of a sentence that begins "the engine …"; `None` if it is ready."""
    progress_s: float
    """The time of its last progress, on the monotonic clock."""


class EngineStatus:
    """The state of one engine: what was decided about its model, such as its sleep, or else what its process does.

    A process that ends while its model sleeps, or is about to, leaves the model asleep. One that ends while its model
    wakes up has died like any other. Methods that report an event may be called at any time, and are ignored if it
    makes no sense in the current state; methods that decide return whether they could.
    """

    def __init__(self) -> None:
        """Begin as an engine that is being started. Needs a running event loop."""
        self.observed: Observation | None = None
        self.why_gone: str | None = None
        self.retry_after_s = DOWN_RETRY_S
        self.since_s = time.monotonic()
        self._seen = EngineState.STARTING
        self._decided: EngineState | None = None
        self._changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self._decided or self._seen

    @property
    def is_draining(self) -> bool:
        return self._decided is EngineState.DRAINING

    @property
    def rests(self) -> bool:
        """Whether the model is asleep or falling asleep, so that a process that ends is not started again."""
        return self._decided in (EngineState.SLEEPING, EngineState.ASLEEP)

    @property
    def why(self) -> str | None:
        """The rest of a sentence that begins "the engine …", about its state."""
        if self.state is EngineState.ASLEEP:
            return "was put to sleep"
        return self.why_gone if self.observed is None else self.observed.why

    def refusal(self, name: str) -> ApiError:
        """Return the error that says why the engine takes no requests. `name` is the model's."""
        code = "engine_unavailable"
        match self.state:
            case EngineState.DRAINING:
                reason = "is shutting down"
            case EngineState.STARTING:
                reason = "is starting"
            case EngineState.RESTARTING:
                reason = f"stopped and is being restarted: its engine {self.why_gone}"
            case EngineState.DOWN:
                reason = f"is down until you start it (swiftkv models start {name}): its engine {self.why_gone}"
            case EngineState.ASLEEP:
                reason, code = f"is asleep; wake it with: swiftkv models wake {name}", "model_asleep"
            case EngineState.SLEEPING | EngineState.WAKING:
                reason, code = f"is {self.state}", "model_asleep"
            case _:
                reason = "does not answer"
        return ApiError(503, f"model '{name}' {reason}", code=code, retry_after_s=self.retry_after_s)

    async def until(self, states: Container[EngineState]) -> EngineState:
        """Wait for one of `states`, or for the node to shut down; return the state by then."""
        while self.state not in states and not self.is_draining:
            await self._changed.wait()
        return self.state

    async def until_not(self, state: EngineState) -> None:
        """Wait until the state is not `state` any more."""
        await self.until(frozenset(EngineState) - {state})

    # These methods report events.

    def came_up(self) -> None:
        """Note that a process has loaded the model and takes requests."""
        self.why_gone = None
        self.woke_up()
        self.observe(Observation(EngineState.READY, None, time.monotonic()))

    def observe(self, observation: Observation) -> None:
        """Note what the supervisor sees of the process."""
        self.observed = observation
        self._become(observation.state, self._decided)

    def went_down(self, why: str, state: EngineState, retry_after_s: float) -> None:
        """Note that the process has ended, and whether it is started again. `why` completes "the engine …"."""
        self.why_gone, self.retry_after_s = why, retry_after_s
        self.observed = None
        decided = self._decided
        if self.rests:
            decided = EngineState.ASLEEP
        elif decided is EngineState.WAKING:
            decided = None
        self._become(state, decided)

    def fell_asleep(self) -> None:
        """Note that the engine has given up its weights."""
        if self._decided is EngineState.SLEEPING:
            self._become(self._seen, EngineState.ASLEEP)

    def woke_up(self) -> None:
        """Note that the engine has its weights again."""
        if self._decided is EngineState.WAKING:
            self._become(self._seen, None)

    # These methods decide.

    def go_to_sleep(self) -> bool:
        """Take no more requests, and sleep once those in flight have ended. Only an engine that is there can."""
        return self._decide(self.state.is_there, EngineState.SLEEPING)

    def stay_awake(self) -> bool:
        """Take requests again, if the engine has not fallen asleep yet."""
        return self._decide(self._decided is EngineState.SLEEPING, None)

    def wake_up(self) -> bool:
        """Have an engine that is asleep come back."""
        return self._decide(self._decided is EngineState.ASLEEP, EngineState.WAKING)

    def drain(self) -> None:
        """Take no more requests for good."""
        self._become(self._seen, EngineState.DRAINING)

    def _decide(self, can_be: bool, decided: EngineState | None) -> bool:
        if can_be:
            self._become(self._seen, decided)
        return can_be

    def _become(self, seen: EngineState, decided: EngineState | None) -> None:
        before = self.state
        self._seen, self._decided = seen, decided
        if self.state is not before:
            self.since_s = time.monotonic()
            self._changed.set()
            self._changed = asyncio.Event()
