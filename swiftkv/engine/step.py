"""One step of an engine, as its model runner takes it."""

from __future__ import annotations

from typing import Protocol

from swiftkv.master.layer_stream import StepCopies
from swiftkv.models.batch import Int32Array, StepArrays


class EngineStep(StepArrays, StepCopies, Protocol):
    """The scheduler's plan, or the arrays that rank 0 sent: tokens to compute, and KV to copy around them."""

    @property
    def local_moves(self) -> Int32Array:
        """[M, 3] as in `_core.StepPlan`."""
