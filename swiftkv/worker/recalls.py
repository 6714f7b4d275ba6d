"""Keeps track of recalled extents, until the last of each batch is home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swiftkv.histogram import Histogram

if TYPE_CHECKING:
    from swiftkv._lease import Int32Array

RECALL_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class RecallBatch:
    """The extents of one decision to recall."""

    begun_s: float
    num_bytes: int = 0
    missing: int = 0  # extents that are not home yet


class Recalls:
    """Counts the extents of each batch that are not home yet, in O(1) per extent."""

    def __init__(self, num_extents: Sequence[int]) -> None:
        """`num_extents` has an entry for each link."""
        self._serial_of = [np.zeros(n, np.int64) for n in num_extents]  # the batch of each extent; 0: not recalled
        self._last_serial = 0
        self._open: dict[int, RecallBatch] = {}
        self.seconds = Histogram(RECALL_SECONDS_BOUNDS)  # from a recall until the last extent of its batch is home
        self.total: dict[str, int] = {}  # batches by reason

    def begin(self, reason: str, now_s: float) -> tuple[int, RecallBatch]:
        """Begin a batch, and return its number and the batch; `add` adds its extents."""
        self._last_serial += 1
        self._open[self._last_serial] = RecallBatch(now_s)
        self.total[reason] = self.total.get(reason, 0) + 1
        return self._last_serial, self._open[self._last_serial]

    def add(self, serial: int, link: int, extents: Int32Array, extent_bytes: int) -> None:
        self._serial_of[link][extents] = serial
        self._open[serial].missing += len(extents)
        self._open[serial].num_bytes += len(extents) * extent_bytes

    def came_home(self, link: int, extents: Int32Array, now_s: float) -> None:
        """Count extents that were returned, whether they were recalled or not."""
        serials, counts = np.unique(self._serial_of[link][extents], return_counts=True)
        self._serial_of[link][extents] = 0
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            if serial == 0:
                continue
            batch = self._open[serial]
            batch.missing -= count
            if batch.missing == 0:
                del self._open[serial]
                self.seconds.add(now_s - batch.begun_s)
