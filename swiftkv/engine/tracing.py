"""Traces of requests: the part of the prompt that each step computed, and the bytes lent and borrowed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swiftkv._core import StepPlan
from swiftkv.engine.messages import StepTrace
from swiftkv.engine.request import Request
from swiftkv.lease.messages import LeasedBytes


@dataclass(slots=True)
class _Traced:
    num_prompt_tokens: int
    leased: LeasedBytes  # as of its last part


class StepTracer:
    """Records the parts that traced requests had in steps."""

    def __init__(self, leased_bytes: Callable[[], LeasedBytes]) -> None:
        """`leased_bytes` returns the bytes that changed hands since the engine started."""
        self._leased_bytes = leased_bytes
        self._traced: dict[int, _Traced] = {}  # by request id

    def __bool__(self) -> bool:
        """Return whether any request is traced."""
        return bool(self._traced)

    def add(self, request: Request) -> None:
        if request.is_traced:
            self._traced[request.request_id] = _Traced(len(request.prompt), self._leased_bytes())

    def discard(self, request_id: int) -> None:
        self._traced.pop(request_id, None)

    def parts(self, plan: StepPlan, duration_s: float, exposed_s: float) -> list[StepTrace]:
        """Return the parts that traced requests had in a step that has just ended and waited `exposed_s` for copies.

        A request that only decoded has none, unless the step waited or bytes changed hands.
        """
        ended_ns = time.time_ns()
        began_ns = ended_ns - int(duration_s * 1e9)
        leased = self._leased_bytes()
        parts = []
        nums_tokens = np.diff(plan.query_starts).tolist()
        rows = zip(plan.request_ids.tolist(), plan.context_lens.tolist(), nums_tokens, strict=True)
        for request_id, end, num_tokens in rows:
            traced = self._traced.get(request_id)
            if traced is None:
                continue
            first = end - num_tokens
            num_computed = max(0, min(end, traced.num_prompt_tokens) - first)
            news = None if leased == traced.leased else leased - traced.leased
            traced.leased = leased
            if num_computed or exposed_s or news:
                parts.append(StepTrace(request_id, began_ns, ended_ns, num_computed, exposed_s, news))
        return parts
