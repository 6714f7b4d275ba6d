"""The figures of one sequence that has ended, for metrics, the log of requests and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv.engine.messages import StepTrace


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The figures of one sequence that has ended. Times in seconds; `None` if it ended before that point."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    max_tokens: int
    e2e_s: float
    queue_s: float | None
    first_token_s: float | None
    arrived_s: float  # of `time.perf_counter`; the times above count from it
    chunks: Sequence[StepTrace] = ()  # of its prompt, if it was traced
    tenant: str | None = None  # whose key it had, where there are tenants
    decode_exposed_s: float = 0.0  # that its other steps waited for copies, likewise
