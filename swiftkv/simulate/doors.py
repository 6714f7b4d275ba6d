"""Doors decide which of the requests that arrive at a simulated engine are let in."""

from __future__ import annotations

from collections.abc import Callable

from swiftkv.bench.traces import Arrival

Target = Callable[[Arrival], float]
"""Returns the seconds within which the first token of a request is due."""


def same_for_all(target_s: float) -> Target:
    return lambda _: target_s


class OpenDoor:
    """Lets every request in. It is told what a gateway hears of its engine, with times of the simulation."""

    def __init__(self, target_ttft_s: Target | None = None) -> None:
        self.target_ttft_s = target_ttft_s or same_for_all(10.0)

    def lets_in(self, request_id: int, arrival: Arrival, now_s: float) -> bool:
        """Return whether an arriving request is let in."""
        return True

    def begun(self, request_id: int, num_cached: int, now_s: float) -> None:
        """Note that the engine has begun with a request."""

    def token(self, request_id: int, now_s: float) -> None:
        """Note that a request has got a token."""

    def ended(self, request_id: int, now_s: float) -> None:
        """Note that a request has its whole answer."""

    def dropped(self, now_s: float) -> list[int]:
        """Return requests that are given up now, without an answer."""
        return []
