"""Sizes, durations, budgets and the memory of a pool, as the YAML file writes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import msgspec

LARGEST_COUNT = (1 << 31) - 1
"""The largest integer that the scheduler counts with."""

LARGEST_SIZE = 1 << 60
"""The most bytes that a file may name: sums of a few such sizes still fit into 64 bits."""

_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
_DURATION_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION_PATTERN = "^[0-9]{1,6}(ms|s|m|h)$"
"""A duration in the queries of `/admin`: a whole number with a unit."""
_NUMBER_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]+)")


def _parse_unit(text: object, units: dict[str, float]) -> float:
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(text)
    number = float(match[1]) * units[match[2]]
    if math.isinf(number):
        raise ValueError(text)
    return number


def parse_size(value: object) -> int:
    """Return bytes from `256MiB`, `1.5GiB` or a plain integer. Raises `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(_parse_unit(value, dict(_SIZE_UNITS)))


def parse_duration(value: object) -> float:
    """Return seconds from `60s`, `500ms`, `2m` or `1h`. Raises `ValueError`."""
    return _parse_unit(value, _DURATION_UNITS_S)


def parse_limit(value: object) -> float | None:
    """Return seconds from a duration; `None` from `off` and 0, for no limit. Raises `ValueError`."""
    is_off = value in (False, "off", "0")  # 0 is equal to False
    return None if is_off else parse_duration(value) or None


def _parse_percentage(text: str) -> Fraction:
    """Return 3/4 from `75%`. Raises `ValueError`, also beyond 100 %."""
    # 29 % is 29/100: in binary it is a little less, and rounding down would lose an extent.
    part = Fraction(_parse_unit(text, {"%": 1.0})).limit_denominator(1_000_000) / 100
    if part > 1:
        raise ValueError(text)
    return part


def parse_part(value: object) -> float:
    """Return 0.75 from `75%`. Raises `ValueError`, also beyond 100 %."""
    if not isinstance(value, str):
        raise ValueError(value)
    return float(_parse_percentage(value))


class PoolBytes(msgspec.Struct, frozen=True, tag="bytes"):
    """A pool of a number of bytes, on each rank."""

    num_bytes: int

    def __str__(self) -> str:
        return format_size(self.num_bytes)


class DeviceShare(msgspec.Struct, frozen=True, tag="share"):
    """The part of a GPU that a whole engine takes: the pool gets what weights and activations leave of it.

    Its bytes are known only once the engine has loaded its weights.
    """

    numerator: int
    denominator: int

    @classmethod
    def of(cls, part: Fraction) -> Self:
        return cls(part.numerator, part.denominator)

    @property
    def part(self) -> Fraction:
        return Fraction(self.numerator, self.denominator)

    def __str__(self) -> str:
        return _format_part(self.part)


PoolMemory = PoolBytes | DeviceShare
"""The memory of one engine's pool, as it is configured."""


def parse_memory(value: object) -> PoolMemory:
    """Return the memory of a pool from `512MiB`, an integer, or `60%` of a GPU. Raises `ValueError`."""
    if isinstance(value, PoolBytes | DeviceShare):
        return value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        part = _parse_percentage(value)
        if part > 0:
            return DeviceShare.of(part)
    elif (num_bytes := parse_size(value)) > 0:
        return PoolBytes(num_bytes)
    raise ValueError(value)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a lender may lend: a part of its pool (0 to 1), or bytes."""

    amount: Fraction | int

    def bytes_of(self, pool_bytes: int) -> int:
        """Return the budget in bytes for a pool of `pool_bytes`; a budget in bytes may be more than the pool."""
        return self.amount if isinstance(self.amount, int) else int(self.amount * pool_bytes)

    def __str__(self) -> str:
        return format_size(self.amount) if isinstance(self.amount, int) else _format_part(self.amount)


def parse_budget(value: object) -> Budget:
    """Read `75%`, `128MiB` or 0; any other number must say its unit. Raises `ValueError`."""
    if isinstance(value, Budget):
        return value
    if value == "0" or (type(value) is int and value == 0):
        return Budget(0)
    if isinstance(value, str) and value.rstrip().endswith("%"):
        return Budget(_parse_percentage(value))
    return Budget(int(_parse_unit(value, dict(_SIZE_UNITS))))


def format_size(num_bytes: int) -> str:
    """Return `256MiB` for 268435456: the largest unit, two decimals at most, in the form that `parse_size` reads."""
    for unit, unit_bytes in reversed(_SIZE_UNITS.items()):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.2f}".rstrip("0").rstrip(".") + unit
    return f"{num_bytes}B"


def _format_part(part: Fraction) -> str:
    return f"{float(100 * part):g}%"


def format_age(seconds: float) -> str:
    """Return `4s`, `3m 20s` or `5h 1m`: two units at most."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours}h {rest_minutes}m" if hours else f"{minutes}m {rest_s}s" if minutes else f"{rest_s}s"


def loading_words(loaded_bytes: int, total_bytes: int, left_s: float | None) -> str:
    """Return words for the loaded part of an engine's weights, and for the time that the rest is expected to take."""
    left = "" if left_s is None else f", {format_age(left_s)} left"
    return f"{format_size(loaded_bytes)} of {format_size(total_bytes)} of weights loaded{left}"
