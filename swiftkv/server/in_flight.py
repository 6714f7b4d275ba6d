"""One sequence in an engine, with its times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swiftkv.engine.messages import StepTrace
from swiftkv.lease.messages import LeasedBytes
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.generation import Generation, SequenceRequest
from swiftkv.server.metrics import ModelMetrics

_MAX_CHUNKS = 512  # the most that are kept of one traced prompt


@dataclass(slots=True)
class InFlight:
    """A sequence in the engine. Times are by `time.perf_counter`, in seconds."""

    generation: Generation
    index: int
    request: SequenceRequest
    arrived_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    chunks: list[StepTrace] = field(default_factory=list)
    decode_exposed_s: float = 0.0
    leased: LeasedBytes = field(default_factory=LeasedBytes)

    def note_token(self, now_s: float, metrics: ModelMetrics) -> None:
        """Count a token that has come."""
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.note_prompt(metrics)
            metrics.observe_first_token(now_s - self.arrived_s)
        else:
            metrics.observe_inter_token_latency(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.num_tokens += 1

    def note_prompt(self, metrics: ModelMetrics) -> None:
        """Count the prompt, all of which has been computed."""
        metrics.count_prompt_tokens(self.request.num_prompt_tokens, self.cached_by_tier)

    def note_step(self, part: StepTrace) -> None:
        """Keep the figures of one step of the sequence, which is traced."""
        if part.leased is not None:
            self.leased += part.leased
        if not part.num_prompt_tokens:
            self.decode_exposed_s += part.exposed_s
        elif len(self.chunks) < _MAX_CHUNKS:
            self.chunks.append(part)

    def finished(self, reason: str, now_s: float) -> FinishedRequest:
        return FinishedRequest(
            reason=reason,
            prompt_tokens=self.request.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            cached_by_tier=self.cached_by_tier,
            generation_tokens=self.num_tokens,
            max_tokens=self.request.sampling.max_tokens,
            e2e_s=now_s - self.arrived_s,
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            arrived_s=self.arrived_s,
            chunks=self.chunks,
            decode_exposed_s=self.decode_exposed_s,
            leased=self.leased,
            tenant=self.generation.sender.name,
        )
