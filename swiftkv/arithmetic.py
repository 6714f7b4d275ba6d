"""Integer arithmetic that Python leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt

_Number = TypeVar("_Number", int, "npt.NDArray[Any]")


def ceil_div(numerator: _Number, denominator: int) -> _Number:
    """Return the quotient rounded up, of an integer or of each element of an array."""
    return -(-numerator // denominator)
