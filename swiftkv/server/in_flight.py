"""One sequence on its way through an engine, with the times of its life."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv.server.generation import Generation, SequenceRequest
from swiftkv.server.metrics import FinishedRequest


@dataclass(slots=True)
class InFlight:
    """A sequence in the engine. Times are of ``time.perf_counter``, in seconds."""

    generation: Generation
    index: int
    request: SequenceRequest
    arrived_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0

    def finished(self, reason: str, now_s: float) -> FinishedRequest:
        return FinishedRequest(
            reason=reason,
            prompt_tokens=self.request.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.num_tokens,
            max_tokens=self.request.sampling.max_tokens,
            e2e_s=now_s - self.arrived_s,
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - self.arrived_s,
        )
