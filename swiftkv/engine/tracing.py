"""The steps of requests that are traced: which chunks of their prompts were computed when, and what copies cost."""

from __future__ import annotations

import time

import numpy as np

from swiftkv._core import StepPlan
from swiftkv.engine.messages import StepTrace
from swiftkv.engine.request import Request


class StepTracer:
    """Notes the parts that traced requests had in steps; a step without one costs nothing."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}  # by request id

    def __bool__(self) -> bool:
        """Return whether any request is traced."""
        return bool(self._prompt_tokens)

    def add(self, request: Request) -> None:
        if request.is_traced:
            self._prompt_tokens[request.request_id] = len(request.prompt)

    def discard(self, request_id: int) -> None:
        self._prompt_tokens.pop(request_id, None)

    def parts(self, plan: StepPlan, duration_s: float, exposed_s: float) -> list[StepTrace]:
        """Return what traced requests had of a step that has just ended, which waited `exposed_s` for copies.

        Steps that only decode say nothing unless they waited.
        """
        ended_ns = time.time_ns()
        began_ns = ended_ns - int(duration_s * 1e9)
        parts = []
        nums_tokens = np.diff(plan.query_starts).tolist()
        rows = zip(plan.request_ids.tolist(), plan.context_lens.tolist(), nums_tokens, strict=True)
        for request_id, end, num_tokens in rows:
            num_prompt = self._prompt_tokens.get(request_id)
            if num_prompt is None:
                continue
            first = end - num_tokens
            num_computed = max(0, min(end, num_prompt) - first)
            if num_computed or exposed_s:
                parts.append(StepTrace(request_id, began_ns, ended_ns, num_computed, exposed_s))
        return parts
