"""The cores of a machine in virtual time, and the parts of them that engines have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NS_PER_S = 1e9


@dataclass(frozen=True)
class CoreShare:
    """An engine's share of the cores, from `models[].compute`."""

    weight: float
    max_share: float
    is_whole: bool = False  # the engine computes on all of its cores at once or on none


@dataclass(frozen=True)
class CoreUser:
    """An engine as a user of the cores. Without a share it computes when the operating system lets it."""

    threads: int
    share: CoreShare | None = None


@dataclass(slots=True)
class _Step:
    """A step in progress. At `seen_s` it would have taken `left_s` more at full speed."""

    begun_s: float
    work_s: float
    left_s: float
    seen_s: float
    speed: float = 0.0
    cores: int = 0
    asks_s: float = math.inf
    stood_s: float | None = None  # when it began to wait for its turn; `None`: it does not wait
    charged_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.seen_s + self.left_s / self.speed if self.speed else math.inf

    def set_speed(self, speed: float, now_s: float) -> None:
        if speed != self.speed:
            self.left_s -= (now_s - self.seen_s) * self.speed
            self.seen_s = now_s
            self.speed = speed

    def duration_s(self, now_s: float) -> float:
        """Return the seconds that the step, which ends now, took: exactly `work_s` if it had the cores to itself."""
        return self.work_s if now_s == self.begun_s + self.work_s else now_s - self.begun_s


class Cores:
    """Divides cores between the steps of engines.

    If engines compute on more threads than there are cores, all of them slow down alike, as under an operating system.
    The real accounts of `cpp_ext/cpu/shares.h` say how many cores an engine with a share has; the engine asks them as
    often as `cpp_ext/cpu/turns.cpp` does, and computes half as fast on half as many.

    Attributes:
        core_s: The core time of each engine.
        waited_s: The time that steps of each engine waited for the turns of others.
    """

    def __init__(self, num_cores: int, users: Sequence[CoreUser]) -> None:
        self._num_cores = num_cores
        self._users = users
        self._steps: dict[int, _Step] = {}
        self.core_s = [0.0] * len(users)
        self.waited_s = [0.0] * len(users)
        if any(user.share for user in users):
            from swiftkv import _cpu  # not there on every platform

            self._shares = _cpu.Shares(num_cores)
            self._ask_contended_s = _cpu.ASK_CONTENDED_NS / _NS_PER_S
            self._ask_alone_s = _cpu.ASK_ALONE_NS / _NS_PER_S
            self._longest_wait_s = _cpu.LONGEST_WAIT_NS / _NS_PER_S
            for number, user in enumerate(users):
                if share := user.share:
                    self._shares.open(number, user.threads, share.weight, share.max_share, share.is_whole)

    @property
    def next_s(self) -> float:
        """The time of the next change: a step ends, or an engine asks whether it may compute."""
        return min((min(step.end_s, step.asks_s) for step in self._steps.values()), default=math.inf)

    def begin(self, user: int, work_s: float, now_s: float) -> None:
        """Begin a step of an engine, which would take `work_s` with the cores to itself."""
        step = self._steps[user] = _Step(now_s, work_s, work_s, now_s, charged_s=now_s)
        if self._users[user].share:
            self._shares.begin(user, _ns(now_s))
            step.asks_s = now_s
        else:
            step.cores = self._users[user].threads
        self._divide(now_s)

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        """Go on to a time up to `next_s`; return the engines whose steps end then, and how long these took."""
        ended = [(user, step) for user, step in self._steps.items() if step.end_s <= now_s]
        for user, step in ended:
            self._charge(user, step, now_s)
            del self._steps[user]
            if self._users[user].share:
                self._shares.end(user)
                self._wake_others(now_s)
        self._divide(now_s)
        return [(user, step.duration_s(now_s)) for user, step in ended]

    def _divide(self, now_s: float) -> None:
        """Have the engines that are due ask for cores, and set how fast each one computes."""
        while due := [user for user, step in self._steps.items() if step.asks_s <= now_s]:
            self._ask(due[0], now_s)
        threads = sum(step.cores for step in self._steps.values())
        part = min(1.0, self._num_cores / threads) if threads else 0.0
        for user, step in self._steps.items():
            self._charge(user, step, now_s)
            step.set_speed(part * step.cores / self._users[user].threads, now_s)

    def _ask(self, user: int, now_s: float) -> None:
        step = self._steps[user]
        self._charge(user, step, now_s)
        had = step.cores
        step.cores, wait_ns = self._shares.ask(user, _ns(now_s))
        if not step.cores and step.stood_s is not None and now_s - step.stood_s >= self._longest_wait_s:
            step.cores = self._shares.forgive(user)
        if step.cores < had:
            self._wake_others(now_s)
        if not step.cores:
            step.asks_s = now_s + wait_ns / _NS_PER_S
            step.stood_s = now_s if step.stood_s is None else step.stood_s
            return
        if step.stood_s is not None:
            self.waited_s[user] += now_s - step.stood_s
            step.stood_s = None
        step.asks_s = now_s + (self._ask_contended_s if self._is_contended(user) else self._ask_alone_s)

    def _is_contended(self, user: int) -> bool:
        share = self._users[user].share
        assert share is not None
        return share.max_share < 1 or any(self._users[other].share for other in self._steps if other != user)

    def _wake_others(self, now_s: float) -> None:
        for step in self._steps.values():
            if step.stood_s is not None and step.stood_s < now_s:
                step.asks_s = now_s

    def _charge(self, user: int, step: _Step, now_s: float) -> None:
        core_s = (now_s - step.charged_s) * step.speed * self._users[user].threads
        step.charged_s = now_s
        self.core_s[user] += core_s
        if self._users[user].share and core_s:
            self._shares.charge(user, round(core_s * _NS_PER_S))


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
