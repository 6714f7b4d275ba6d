"""The progress of an engine, in one page of memory that it shares with its supervisor.

The page can be read at any time and needs no answer, so it also shows the state of an engine that is stuck. Except for
the bytes of loaded weights, only the engine's own thread writes it: while a device computes and that thread waits,
nothing counts as progress.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Self

from swiftkv.shared_memory import make_memory

_NUM_BYTES = mmap.PAGESIZE
_TICKS, _BEGAN_NS, _LONGEST_NS, _LOADED_BYTES = range(4)


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """One look at the page."""

    ticks: int
    """Changes whenever the engine has done anything."""
    working_s: float | None
    """The time of the current round of the step loop so far; `None` while the loop waits for messages."""
    longest_s: float
    """The longest round so far."""
    loaded_bytes: int
    """The bytes of weights that are loaded, in the form in which they are computed with."""


class Progress:
    """The page, as the engine writes it. Before `share` no other process sees it."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, _NUM_BYTES)).cast("Q")

    def share(self, fd: int) -> None:
        """Write to the page behind `fd`, a `ProgressPage` of the supervisor, from now on."""
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("Q")

    def tick(self) -> None:
        """Count a unit of work, such as a layer or a round of the loop. Takes well under a microsecond."""
        self._words[_TICKS] += 1

    def works(self) -> None:
        """Note that a round of the step loop begins, and that the one before it has ended."""
        self._end_round(time.monotonic_ns())

    def rests(self) -> None:
        """Note that the loop waits for messages, and that the round before has ended."""
        self._end_round(0)

    def forget_weights(self) -> None:
        """Count loaded weights from 0 again: they are, or will soon be, given up."""
        self._words[_LOADED_BYTES] = 0

    def loads(self, num_bytes: int) -> None:
        """Count `num_bytes` more of the weights as loaded."""
        self._words[_LOADED_BYTES] += num_bytes

    def _end_round(self, next_began_ns: int) -> None:
        words = self._words
        words[_TICKS] += 1
        if began_ns := words[_BEGAN_NS]:
            took_ns = (next_began_ns or time.monotonic_ns()) - began_ns
            if took_ns > words[_LONGEST_NS]:
                words[_LONGEST_NS] = took_ns
        words[_BEGAN_NS] = next_began_ns


class ProgressPage:
    """The page, as the supervisor makes and reads it: one for each engine process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The descriptor that is passed on to the engine."""
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("Q")
        self._words[_TICKS] = 0  # a page that exists cannot be missing later, when memory is short

    @classmethod
    def create(cls) -> Self:
        return cls(make_memory("progress", _NUM_BYTES))

    def read(self) -> ProgressSample:
        began_ns = self._words[_BEGAN_NS]
        working_s = (time.monotonic_ns() - began_ns) / 1e9 if began_ns else None
        return ProgressSample(
            self._words[_TICKS], working_s, self._words[_LONGEST_NS] / 1e9, self._words[_LOADED_BYTES]
        )

    def close(self) -> None:
        """Close the descriptor. The mapping ends with this object."""
        os.close(self.fd)


PROGRESS = Progress()
"""The page of this process, which runs at most one engine."""
