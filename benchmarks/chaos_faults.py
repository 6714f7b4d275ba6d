"""The faults of chaos.py, and the times at which each model had one."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from lending_node import say
from private_mounts import Filled
from watched_node import WatchedNode, wait_until

_GRACE_S = 3.0
"""A request that begins within this time after a fault may still meet it."""
_POLL_S = 0.2
_REAL_TIME_SIGNAL = 40
_FULL_S = (2.0, 8.0)


@dataclass
class Outage:
    """A fault of one model, or of the machine if `model` is `None`."""

    kind: str
    model: str | None
    begin_s: float
    end_s: float = math.inf
    """The time at which the model served again."""

    def touches(self, model: str, begin_s: float, end_s: float) -> bool:
        """Return whether a request to `model` within these times may have met the fault."""
        return model == self.model and self.begin_s <= end_s and begin_s <= self.end_s + _GRACE_S


class Faults:
    """Injects faults, undoes those that last, and notes when each model had one."""

    def __init__(
        self,
        node: WatchedNode,
        workers: Sequence[str],
        watchdog_s: float,
        directories: Mapping[str, Path],
        rng: random.Random,
    ) -> None:
        """`directories`: file systems that may be filled, by the name of the fault."""
        self._node = node
        self._workers = workers
        self._watchdog_s = watchdog_s
        self._directories = directories
        self._rng = rng
        self._threads: list[threading.Thread] = []
        self._full: set[str] = set()
        self._ceased = threading.Event()
        self.outages: list[Outage] = []
        self.refused: list[str] = []
        """Budget changes that were refused while nothing else was wrong."""

    def inject(self) -> None:
        """Inject one fault at random."""
        self._ceased.clear()
        kinds: list[Callable[[], None]] = [self._kill, self._signal, self._stop, self._set_budget]
        kinds += [partial(self._fill, kind) for kind in self._directories if kind not in self._full]
        self._rng.choice(kinds)()

    def cease(self, timeout_s: float) -> bool:
        """Undo lasting faults, wait until the models that had one serve again, and return whether all do."""
        self._ceased.set()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads and wait_until(self._node.is_ready, deadline_s - time.monotonic())

    def _kill(self) -> None:
        self._end("SIGKILL", signal.SIGKILL)

    def _signal(self) -> None:
        self._end("a real-time signal", _REAL_TIME_SIGNAL)

    def _end(self, kind: str, number: int) -> None:
        if engine := self._choose():
            outage = self._begin(kind, engine[0])
            engine[1].send_signal(number)
            self._start(lambda: self._wait_for_successor(outage, engine[1].pid))

    def _stop(self) -> None:
        if engine := self._choose():
            longest_s = self._rng.choice((0.5, 2.0, 0.8 * self._watchdog_s, 2 * self._watchdog_s))
            outage = self._begin(f"stopped for {longest_s:g} s", engine[0])
            engine[1].suspend()
            self._start(lambda: self._resume(outage, engine[1], longest_s))

    def _fill(self, kind: str) -> None:
        seconds = self._rng.uniform(*_FULL_S)
        outage = self._begin(kind, None)
        filled = Filled(self._directories[kind])
        self._full.add(kind)

        def wait() -> None:
            self._ceased.wait(seconds)
            filled.empty()
            self._full.remove(kind)
            outage.end_s = time.monotonic()

        self._start(wait)

    def _set_budget(self) -> None:
        worker = self._rng.choice(self._workers)
        budget = self._rng.choice((0, "25%", "50%", "75%", "100%"))
        outage = self._begin("a budget change", None)

        def change() -> None:
            try:
                answer = self._node.admin("PATCH", f"lending/{worker}", json={"budget": budget})
                refused = "" if answer.status_code == httpx.codes.OK else answer.text
            except httpx.TransportError as error:
                refused = f"{type(error).__name__}: {error}"
            outage.end_s = time.monotonic()
            if refused and not self._anybody_had_a_fault(outage):  # it needs the worker and its borrowers
                say(f"the budget of {worker} could not be set: {refused}")
                self.refused.append(refused)

        self._start(change)

    def _anybody_had_a_fault(self, within: Outage) -> bool:
        engines = [outage for outage in self.outages if outage.model is not None]
        return any(outage.touches(outage.model or "", within.begin_s, within.end_s) for outage in engines)

    def _choose(self) -> tuple[str, psutil.Process] | None:
        """Choose an engine that exists; `None` if there is none at the moment."""
        engines = sorted(self._node.engines().items())
        return self._rng.choice(engines) if engines else None

    def _begin(self, kind: str, model: str | None) -> Outage:
        outage = Outage(kind, model, time.monotonic())
        self.outages.append(outage)
        say(f"{time.strftime('%H:%M:%S')}  {kind}{f': {model}' if model else ''}")
        return outage

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _wait_for_successor(self, outage: Outage, pid: int) -> None:
        assert outage.model is not None
        while self._node.is_alive():
            engine = self._node.engines().get(outage.model)
            if engine and engine.pid != pid and self._serves(outage.model):
                outage.end_s = time.monotonic()
                return
            time.sleep(_POLL_S)

    def _resume(self, outage: Outage, engine: psutil.Process, seconds: float) -> None:
        assert outage.model is not None
        self._ceased.wait(seconds)
        try:
            engine.resume()
        except psutil.NoSuchProcess:  # it was killed while it was stopped
            self._wait_for_successor(outage, engine.pid)
            return
        time.sleep(1)
        while self._node.is_alive() and not self._serves(outage.model):
            time.sleep(_POLL_S)
        outage.end_s = time.monotonic()

    def _serves(self, model: str) -> bool:
        return self._node.ready().get(model) in ("ready", "slow")
