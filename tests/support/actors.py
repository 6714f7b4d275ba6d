"""Threads of which one runs at a time, until it pauses: a seed decides which goes on, so a history happens again."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

_WEIGHTS = (0.02, 0.3, 1.0, 1.0, 4.0)
_SLICES_PER_CHANGE = 40  # a change of one actor's weight
TIMEOUT_S = 120.0


class _Killed(BaseException):
    """Unwinds the stack of an actor that was killed."""


class Actor:
    """One thread. It runs from one pause to the next, and goes on once `until` holds or the clock reaches `due_s`."""

    def __init__(self, name: str, rank: int, run: Callable[[], None]) -> None:
        """`rank` is the number of the process that the thread belongs to, among those of its engine."""
        self.name = name
        self.rank = rank
        self.weight = 1.0
        self.error: BaseException | None = None
        self.is_over = False
        self.is_killed = False
        self.until: Callable[[], bool] = lambda: True
        self.due_s = math.inf
        self.go = threading.Semaphore(0)
        self.has_paused = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)

    def _run(self, run: Callable[[], None]) -> None:
        _current.actor = self
        self.go.acquire()
        try:
            if not self.is_killed:
                run()
        except _Killed:
            pass
        except BaseException as error:  # noqa: BLE001  (`run_one` raises it)
            self.error = error
        self.is_over = True
        self.has_paused.release()


class _Current(threading.local):
    actor: Actor | None = None


_current = _Current()


class Actors:
    """All actors of one history, and its clock, which goes on when no actor can."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._actors: list[Actor] = []
        self.now_s = 0.0
        self.num_slices = 0

    @property
    def current(self) -> Actor:
        """The actor whose thread calls."""
        assert _current.actor is not None
        return _current.actor

    def spawn(self, name: str, run: Callable[[], None], rank: int = 0) -> Actor:
        actor = Actor(name, rank, run)
        actor.weight = self._rng.choice(_WEIGHTS)
        self._actors.append(actor)
        actor.thread.start()
        return actor

    def pause(self, until: Callable[[], bool] | None = None, due_s: float = math.inf) -> None:
        """Let others run; return when `until` holds, or the clock has reached `due_s`. The driver runs them itself."""
        actor = _current.actor
        until = until or (lambda: True)
        if actor is None:
            while not until():
                self.run_one()
            return
        if actor.is_killed:
            raise _Killed
        actor.until, actor.due_s = until, due_s
        actor.has_paused.release()
        actor.go.acquire()
        if actor.is_killed:
            raise _Killed

    def kill(self, actor: Actor) -> None:
        """End an actor where it stands; called by the driver."""
        actor.is_killed = True
        if not actor.is_over:
            self._resume(actor)
            assert actor.is_over, f"{actor.name} goes on after its death"
        if actor in self._actors:
            self._actors.remove(actor)

    def run_one(self) -> Actor | None:
        """Let one actor run until it pauses, and return it; if none can go on, advance the clock."""
        if self._rng.randrange(_SLICES_PER_CHANGE) == 0 and self._actors:
            self._rng.choice(self._actors).weight = self._rng.choice(_WEIGHTS)
        ready = [actor for actor in self._actors if actor.due_s <= self.now_s or actor.until()]
        if not ready:
            due_s = min((actor.due_s for actor in self._actors), default=math.inf)
            assert due_s < math.inf, f"nobody can go on: {[actor.name for actor in self._actors]}"
            self.now_s = max(self.now_s, due_s)
            return None
        actor = self._rng.choices(ready, [actor.weight for actor in ready])[0]
        self.num_slices += 1
        self._resume(actor)
        if actor.is_over:
            self._actors.remove(actor)
            if actor.error is not None:
                raise actor.error
        return actor

    def close(self) -> None:
        for actor in [*self._actors]:
            self.kill(actor)

    def _resume(self, actor: Actor) -> None:
        actor.go.release()
        assert actor.has_paused.acquire(timeout=TIMEOUT_S), f"{actor.name} waits for something outside of the history"
