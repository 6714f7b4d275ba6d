"""Service tiers, OpenAI's word for how urgent a request is, as priorities of the scheduler."""

from __future__ import annotations

from typing import Literal

Tier = Literal["priority", "default", "flex", "batch"]
WantedTier = Literal["auto", "default", "priority", "flex", "batch"]

_CLASSES: dict[Tier, int] = {"priority": -1, "default": 0, "flex": 1, "batch": 2}  # lower goes first
_PRIORITIES_PER_CLASS = 1 << 32


def tier_of(wanted: WantedTier | None, allow_priority: bool) -> Tier:
    """Return the tier that serves a request: `priority` only where clients may go before others."""
    if wanted is None or wanted == "auto" or (wanted == "priority" and not allow_priority):
        return "default"
    return wanted


def priority_in(tier: Tier, priority: int) -> int:
    """Return the scheduler's priority of a request whose `priority`, of 32 bits, orders it within its tier."""
    return _CLASSES[tier] * _PRIORITIES_PER_CLASS + priority
