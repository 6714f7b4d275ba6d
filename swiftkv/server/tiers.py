"""Service tiers, OpenAI's word for how urgent a request is, as priorities of the scheduler."""

from __future__ import annotations

from typing import Literal

from swiftkv._core import PRIORITIES_PER_CLASS
from swiftkv.policies import ServiceTier

WantedTier = Literal["auto", "default", "priority", "flex", "batch"]

_CLASSES: dict[ServiceTier, int] = {"priority": -1, "default": 0, "flex": 1, "batch": 2}  # lower goes first


def tier_of(wanted: WantedTier | None, highest: ServiceTier) -> ServiceTier:
    """Return the tier that serves a request: `highest` if it asks for more, as with OpenAI."""
    asked: ServiceTier = "default" if wanted is None or wanted == "auto" else wanted
    return max(asked, highest, key=_CLASSES.__getitem__)


def priority_in(tier: ServiceTier, priority: int) -> int:
    """Return the scheduler's priority of a request whose `priority`, of 32 bits, orders it within its tier."""
    return _CLASSES[tier] * PRIORITIES_PER_CLASS + priority
