"""Targets that clients and routers put into a request's headers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swiftkv.server.errors import ApiError

_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")  # llm-d's name, and its older one


def target_ttft_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds within which the first token is wanted, `None` if no header says so.

    Raises:
        ApiError: 400 unless it is a number of milliseconds above 0.
    """
    for name in _TTFT_HEADERS:
        if (text := headers.get(name)) is not None:
            return _milliseconds(name, text) / 1000
    return None


def _milliseconds(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ApiError(400, f"header {name}: {text[:40]!r} is not a number of milliseconds above 0", param=name)
    return number
