"""A medium with random faults, by a seed, to test a node: it is slow, delays, fails, flips, truncates or hangs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Literal

from swiftkv.storage.backend import Capabilities, Medium, Parts, Status, Usage
from swiftkv.storage_options import FaultOptions


class FaultMedium:
    """Puts faults between an inner medium and the envelope, which has to notice all of them.

    A call is hit by at most one of fail, delay and hang; after that each object by at most one of flip and truncate.
    With one thread the faults of a seed are always the same.
    """

    def __init__(self, inner: Medium, options: FaultOptions) -> None:
        self._inner = inner
        self._options = options
        self._random = random.Random(options.seed)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._free_s = 0.0  # monotonic: when all transfers so far have passed, at `bandwidth`

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self._hit_call()
        return self._inner.exists(keys, deadline_s)

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Read, and spoil some of the objects silently."""
        self._hit_call()
        count, end_s = self._pass(into, deadline_s)
        statuses = list(self._inner.read(keys[:count], into[:count], deadline_s))
        self._closed.wait(end_s - time.monotonic())
        statuses += [Status.LATE] * (len(keys) - count)
        for (header, block), status in zip(into, statuses, strict=True):
            fault = self._draw_fault() if status is Status.OK else None
            if fault == "flip":
                self._flip(header, block)
            elif fault == "truncate":
                end = self._below(len(block))
                block[end:] = bytes(len(block) - end)
        return statuses

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write, some objects spoiled; the sources stay as they are."""
        self._hit_call()
        count, end_s = self._pass(sources, deadline_s)
        spoiled = [self._maybe_spoiled(*parts) for parts in sources[:count]]
        statuses = self._inner.write(keys[:count], spoiled, deadline_s)
        self._closed.wait(end_s - time.monotonic())
        return statuses + [Status.LATE] * (len(keys) - count)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._inner.drop(keys)

    def usage(self) -> Usage | None:
        return self._inner.usage()

    def close(self) -> None:
        """End calls that hang, without calling the inner medium for them, and close the inner medium."""
        self._closed.set()
        self._inner.close()

    def _hit_call(self) -> None:
        """Delay some calls, or raise `OSError` for them, at random as the options say."""
        options = self._options
        with self._lock:
            drawn = self._random.random()
        if drawn < options.fail:
            raise OSError("a failure from the fault backend")
        drawn -= options.fail
        if drawn < options.delay:
            self._closed.wait(options.delay_time)
        elif drawn < options.delay + options.hang:
            self._closed.wait(options.hang_time)
            raise TimeoutError("a call that the fault backend let hang")

    def _pass(self, objects: Sequence[Parts], deadline_s: float) -> tuple[int, float]:
        """Return how many objects can be transferred before the deadline, and when the last of them is.

        Calls share the bandwidth: the transfer of a call begins when that of the call before has ended.
        """
        if self._options.bandwidth is None:
            return len(objects), 0.0
        with self._lock:
            count, end_s = 0, max(self._free_s, time.monotonic())
            for parts in objects:
                passed_s = end_s + sum(map(len, parts)) / self._options.bandwidth
                if passed_s > deadline_s:
                    break
                count, end_s = count + 1, passed_s
            self._free_s = end_s
            return count, end_s

    def _draw_fault(self) -> Literal["flip", "truncate"] | None:
        with self._lock:
            drawn = self._random.random()
        if drawn < self._options.flip:
            return "flip"
        return "truncate" if drawn < self._options.flip + self._options.truncate else None

    def _maybe_spoiled(self, header: memoryview, block: memoryview) -> Parts:
        fault = self._draw_fault()
        if fault == "truncate":
            return header, block[: self._below(len(block))]
        if fault == "flip":
            header, block = memoryview(bytearray(header)), memoryview(bytearray(block))
            self._flip(header, block)
        return header, block

    def _flip(self, header: memoryview, block: memoryview) -> None:
        """Turn over one bit of the object."""
        byte, bit = divmod(self._below(8 * (len(header) + len(block))), 8)
        part, place = (header, byte) if byte < len(header) else (block, byte - len(header))
        part[place] ^= 1 << bit

    def _below(self, end: int) -> int:
        with self._lock:
            return self._random.randrange(max(end, 1))
