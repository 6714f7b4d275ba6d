"""The states of an engine, as `/ready`, `swiftkv status` and metrics tell them apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SLOW = "slow"  # computing something long
    NOT_RESPONDING = "not responding"
    STOPPED = "stopped"  # by a signal or a debugger
    RESTARTING = "restarting"
    DOWN = "down"  # and not started again
    DRAINING = "draining"

    @property
    def serves(self) -> bool:
        """Whether requests are being answered."""
        return self in (EngineState.READY, EngineState.SLOW)

    @property
    def is_there(self) -> bool:
        """Whether requests are accepted: one that does not respond may recover before it is ended."""
        return self.serves or self in (EngineState.NOT_RESPONDING, EngineState.STOPPED)


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of an engine that exists, as its supervisor sees it."""

    state: EngineState
    why: str | None
    """The rest of a sentence that begins "the engine …"; `None` for one that is ready."""
    progress_s: float
    """The time of its last progress, on the monotonic clock."""
