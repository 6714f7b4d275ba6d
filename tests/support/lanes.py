"""Pools on the host that are reached as if they were on a device, whose copies end as late as they may."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swiftkv.engine.runner import ModelRunner
from swiftkv.tier.reach import CopyLane, DeviceReach, Direction
from swiftkv.transport.fence import Fence
from tests.support.storage import TIMEOUT_S

CPU = torch.device("cpu")


class LateLane(CopyLane):
    """A lane whose copies are made only when somebody waits for their end, and the test lets them.

    Bytes that are read from a target before that are old ones; and what is written to a source before that is copied.
    """

    def __init__(self, device: torch.device = CPU, direction: Direction = "up") -> None:
        super().__init__(device, direction)
        self.is_asked = threading.Event()
        self.may_copy = threading.Event()
        self.may_copy.set()

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Fence:
        fence = _LateFence(self, list(copies))
        self.is_asked.set()
        return fence


class _LateFence(Fence):
    def __init__(self, lane: LateLane, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(CPU)
        self._lane = lane
        self._copies = copies

    def wait(self) -> None:
        assert self._lane.may_copy.wait(TIMEOUT_S)
        CopyLane(CPU, "up").copy(self._copies)
        self._copies = ()


class StepFence(Fence):
    """The end of a step that the test decides, and whether somebody has waited for it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.is_waited_for = threading.Event()
        self.may_end = threading.Event()

    def wait(self) -> None:
        self.is_waited_for.set()
        assert self.may_end.wait(TIMEOUT_S)


def late_reach(pools: Sequence[Tensor], max_block_bytes: int) -> DeviceReach:
    """Return the way to pools on the host as if they were on a device with late copies."""
    return DeviceReach(pools, max_block_bytes, open_lane=LateLane)


class LateRunner(ModelRunner):
    """A runner whose pool storage reaches as one on a device."""

    def reach_pools(self) -> DeviceReach:
        return late_reach(self.rank_pools(), max(region.group.block_bytes for region in self.pool.regions))
