"""The figures of one sequence that has ended, for metrics, the log of requests and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swiftkv.engine.messages import StepTrace
from swiftkv.lease.messages import LeasedBytes


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
    arrived_s: float  # on the clock of `time.perf_counter`; the times above count from it
    chunks: Sequence[StepTrace] = ()  # the chunks of its prompt, if it was traced
    tenant: str | None = None  # the tenant whose key it had, where there are tenants
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)  # `cached_tokens` by where their KV lay
    decode_exposed_s: float = 0.0  # time that its other steps waited for copies, if it was traced
    leased: LeasedBytes = field(default_factory=LeasedBytes)
    """The bytes that its model lent, borrowed or gave back meanwhile, if it was traced."""

    @property
    def exposed_s(self) -> float:
        """The time that all its steps waited for copies from and to lenders, if it was traced."""
        return self.decode_exposed_s + sum(chunk.exposed_s for chunk in self.chunks)
