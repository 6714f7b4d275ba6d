"""Targets: how soon a request wants its tokens, by its headers or by its model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from swiftkv.server.errors import ApiError

_TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")  # llm-d's name, and its older one
_TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Targets:
    """The seconds within which the first token, and each further one, must come; `None`: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def or_else(self, usual: Targets) -> Targets:
        """Return these targets, with the `usual` ones in place of those that are `None`."""
        return Targets(
            usual.ttft_s if self.ttft_s is None else self.ttft_s, usual.tpot_s if self.tpot_s is None else self.tpot_s
        )


NO_TARGETS = Targets()


def asked_targets(headers: Mapping[str, str]) -> Targets:
    """Return the targets that a request's headers name.

    Raises:
        ApiError: 400 for one that is no number of milliseconds above 0.
    """
    return Targets(target_ttft_s(headers), target_tpot_s(headers))


def target_ttft_s(headers: Mapping[str, str]) -> float | None:
    """Return the target for the first token, in seconds; `None` if no header names one.

    Raises:
        ApiError: 400 unless it is a number of milliseconds above 0.
    """
    return _seconds(headers, _TTFT_HEADERS)


def target_tpot_s(headers: Mapping[str, str]) -> float | None:
    """Return the target for each token after the first, in seconds; `None` if no header names one.

    Raises:
        ApiError: 400 unless it is a number of milliseconds above 0.
    """
    return _seconds(headers, _TPOT_HEADERS)


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        if (text := headers.get(name)) is not None:
            return _milliseconds(name, text) / 1000
    return None


def _milliseconds(name: str, text: str) -> float:
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < number < math.inf:
        raise ApiError(400, f"header {name}: {text[:40]!r} is not a number of milliseconds above 0", param=name)
    return number
