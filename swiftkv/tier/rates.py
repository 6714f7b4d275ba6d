"""The measured speed of storage, and the choice of the blocks that are worth loading."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from swiftkv.arithmetic import ceil_div

_DECAY = 0.8  # the weight of earlier measurements with each new one
_TRIAL_INTERVAL_S = 30.0
_WORTH = 0.8
"""The most time that loading and computing at once may take to be worth it, as a part of the faster one's alone."""
_DIVISION_COST = 0.07
"""The most extra time that computing a front in two parts may take, as a part of the time in one part."""


def num_not_loaded(num_to_compute: int, compute_s: Callable[[int, int], float]) -> int:
    """Return how many blocks, from the first on, a request only computes: storage does not load them.

    It is half of the blocks that the request is expected to compute. Computing and loading approach each other in the
    other half, from opposite ends, and their real speeds decide where they meet. If computing in two parts would cost
    too much, it is all of them.

    Args:
        num_to_compute: The blocks that are expected to be computed while the rest is loaded.
        compute_s: Returns the seconds to compute the blocks from one index to another.
    """
    half = ceil_div(num_to_compute, 2)
    whole_s = compute_s(0, num_to_compute)
    extra_s = compute_s(0, half) + compute_s(half, num_to_compute) - whole_s
    return half if extra_s <= _DIVISION_COST * whole_s else num_to_compute


class Rate:
    """An amount per second. Older measurements count less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        """Return the time that an amount takes; `None` before the first measurement."""
        if self._seconds == 0:
            return None
        return amount * self._seconds / self._amount if self._amount > 0 else math.inf


class LoadPlanner:
    """Decides whether to load a prefix or to compute it, whichever is expected to end sooner.

    Storage that has not been measured yet is used. Storage that was too slow is tried now and then, in case it has
    become faster.
    """

    def __init__(self) -> None:
        self._read = Rate()  # bytes
        self._measured_s: float | None = None  # when something was read

    def note_read(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """Note that storage read `num_bytes` in `seconds`: 0 bytes if not even the first block came in time."""
        self._read.add(num_bytes, seconds)
        self._measured_s = now_s

    def is_worth_loading(self, num_bytes: int, queued_bytes: int, compute_s: float | None) -> bool:
        """Return whether loading, after `queued_bytes` for others, is expected to take less than `compute_s`.

        `compute_s` is `None` if the time to compute is not known yet.
        """
        load_s = self._read.seconds_for(num_bytes + queued_bytes)
        return load_s is None or compute_s is None or load_s < compute_s

    def num_to_compute(
        self,
        num_blocks: int,
        load_bytes: Callable[[int], int],
        queued_bytes: int,
        compute_s: Callable[[int], float | None],
    ) -> int | None:
        """Return how many of the missing blocks, from the first on, should be computed while the rest is loaded.

        Args:
            num_blocks: The number of missing blocks.
            load_bytes: Returns the bytes to load if the first so many blocks are computed.
            queued_bytes: The bytes that are loaded first, for other requests.
            compute_s: Returns the seconds to compute the first so many blocks.

        Returns:
            `None` if loading all of them or computing all of them is about as fast, or if a speed is not known yet.
        """

        def load_s(num_computed: int) -> float | None:
            return self._read.seconds_for(load_bytes(num_computed) + queued_bytes)

        load_all_s, compute_all_s = load_s(0), compute_s(num_blocks)
        if load_all_s is None or compute_all_s is None or math.isinf(load_all_s):
            return None

        def is_loaded_meanwhile(num_computed: int) -> bool:
            return (compute_s(num_computed) or 0.0) >= (load_s(num_computed) or 0.0)

        num_computed = bisect_left(range(num_blocks), True, key=is_loaded_meanwhile)
        both_s = compute_s(num_computed) or 0.0
        is_worth_it = 0 < num_computed < num_blocks and both_s <= _WORTH * min(load_all_s, compute_all_s)
        return num_computed if is_worth_it else None

    def begins_trial(self, now_s: float) -> bool:
        """Return whether one load should now measure storage again, because nothing has been read for long."""
        if self._measured_s is not None and now_s - self._measured_s < _TRIAL_INTERVAL_S:
            return False
        self._measured_s = now_s
        return True
