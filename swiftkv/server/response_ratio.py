"""The order of `hrrn`, as a gateway expects it: when a new prompt will have a higher response ratio than others.

The response ratio is the time since a prompt arrived over the tokens that are left of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The prompts without a token, [rows].

    Attributes:
        left: The tokens of each that are still to be computed.
        waited_s: The time since each arrived.
        service_s: The time that computing the rest of each takes.
    """

    left: Floats
    waited_s: Floats
    service_s: Floats


def part_before(waiting: Waiting, own_left: int, ahead: Bools, is_equal: Bools, step_s: float) -> Floats:
    """Return the part of each prompt that is computed before one that arrives now, of `own_left` tokens, [rows].

    Prompts `ahead` are computed whole, whatever their ratio; among those that are `is_equal` the ratio decides. A step
    takes `step_s`.
    """
    before = ahead.astype(np.float64)
    overtaken_s = np.where(is_equal, _overtaken_s(waiting, own_left), -math.inf)
    order = np.argsort(-overtaken_s)
    lasting_s = waiting.service_s[order]
    begins_s = waiting.service_s[ahead].sum() + np.cumsum(lasting_s) - lasting_s
    # The new prompt begins when all that still have a higher ratio by then have been computed. A step may go by before
    # anybody notices.
    is_late = overtaken_s[order] < begins_s + step_s
    count = int(np.argmax(is_late)) if is_late.any() else len(order)
    order = order[:count]
    order, begins_s = order[is_equal[order]], begins_s[:count][is_equal[order]]
    before[order] = 1.0
    computed = _part_computed(waiting, order, begins_s, own_left, step_s)
    interrupted = np.flatnonzero(computed < 1)
    if len(interrupted):
        before[order[interrupted[0]]] = computed[interrupted[0]]
        before[order[interrupted[0] + 1 :]] = 0.0
    return before


def part_overtaken(*, own: float, others: Floats) -> Floats:
    """Return the part of its wait during which a prompt of length `own` can be overtaken by later ones."""
    is_shorter = np.frexp(np.maximum(others, 1))[1] < math.frexp(own)[1]
    return np.where(is_shorter, 1 - others / own, 0.0)


def _overtaken_s(waiting: Waiting, own_left: int) -> Floats:
    """Return in how many seconds a prompt that arrives now has a higher ratio than others: inf for never.

    Those of one lane, whose lengths are within a factor of two, keep the order in which they came.
    """
    left = waiting.left
    is_longer = np.frexp(np.maximum(left, 1))[1] > math.frexp(own_left)[1]
    return np.where(is_longer, waiting.waited_s * own_left / np.maximum(left - own_left, 1), math.inf)


def _part_computed(
    waiting: Waiting, rows: npt.NDArray[np.intp], begins_s: Floats, own_left: int, step_s: float
) -> Floats:
    """Return the part of each of `rows` that is computed before a prompt that arrives now interrupts it.

    While a prompt is computed, from `begins_s` on, ever less of it is left, so its ratio rises ever faster: it is
    interrupted soon, or not at all. That happens after the first `t` seconds for which the new prompt's ratio,
    `(begins_s + t) / own_left`, is as high as its own, `(waited_s + begins_s + t) / (left - speed * t)`. It must stay
    so for a whole step, since ratios are compared between steps only.
    """
    left, service_s = np.maximum(waiting.left[rows], 1e-9), np.maximum(waiting.service_s[rows], 1e-9)
    speed = left / service_s
    linear = left - own_left - begins_s * speed
    constant = own_left * (waiting.waited_s[rows] + begins_s) - begins_s * left
    discriminant = linear**2 - 4 * speed * constant
    meets = (discriminant > (step_s * speed) ** 2) & (linear > 0)
    after_s = (linear - np.sqrt(np.where(meets, discriminant, 0.0))) / (2 * speed)
    return np.where(meets, np.minimum(1.0, (np.maximum(after_s, 0.0) + step_s) / service_s), 1.0)
