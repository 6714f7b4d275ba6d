"""The sequences of one HTTP request, on their way from an engine to the reader of the answer.

A reader gets at once everything that has arrived since it last asked, so a slow reader costs no more than a fast one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from swiftkv.engine.messages import AddRequest, Admitted, Pooling, SamplingParams, TokenLogprobs
from swiftkv.server.errors import ApiError
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.targets import NO_TARGETS, Targets
from swiftkv.server.tenants import ANYBODY, Sender


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which the sequences of one request are served.

    Attributes:
        cache_salt: Prompts share cached prefixes only with prompts of an equal salt.
        priority: The priority, that of the service tier included; lower runs first.
        target_ttft_s: Seconds until the first token is due, by which the engine may order requests.
        targets: The targets; a request that would miss them is refused.
        sender: The sender of the request.
        is_traced: Whether the engine reports the steps of the request.
        is_to_last: Whether the prompt is written to storage, if there is any, even where the write policy would wait.
    """

    cache_salt: str = ""
    priority: int = 0
    target_ttft_s: float | None = None
    targets: Targets = NO_TARGETS
    sender: Sender = ANYBODY
    is_traced: bool = False
    is_to_last: bool = False


USUAL_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate. `prompt` is int32, little-endian."""

    prompt: bytes
    sampling: SamplingParams
    pooling: Pooling | None = None  # None: it wants tokens

    def message(self, request_id: int, terms: Terms, arrived_s: float) -> AddRequest:
        """Return the message to the engine. `arrived_s` is by `time.perf_counter`, as everywhere in the gateway."""
        return AddRequest(
            request_id,
            self.prompt,
            self.sampling,
            terms.cache_salt,
            terms.priority,
            terms.target_ttft_s,
            pooling=self.pooling,
            is_traced=terms.is_traced,
            flow=terms.sender.flow,
            flow_weight=terms.sender.weight,
            is_to_last=terms.is_to_last,
            arrived_s=arrived_s,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_bytes(self) -> int:
        """The approximate size of its message."""
        return len(self.prompt) + len(self.sampling.grammar or "")


@dataclass(slots=True)
class SequenceOutput:
    """The part of one sequence that arrived since the reader last asked."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[bytes] | None = None  # packed
    pooled: bytes | None = None  # float32, of a sequence that wants no tokens
    finish_reason: str | None = None


class Generation:
    """The sequences of one HTTP request: iterate for their output, leave the `with` block to abort what still runs.

    `admitted` gets an entry for each sequence that the engine begins: its index, and the prompt tokens that it found in
    the cache. If the sequence finds more, another entry follows, which replaces the first. `finished` gets an entry for
    each sequence that has ended, however it did. `first_step_ended_s` is when the engine's step with the first token
    ended, by `time.perf_counter`.
    """

    def __init__(
        self, request_ids: range, abort: Callable[[Sequence[int], str], None], sender: Sender = ANYBODY
    ) -> None:
        """`abort` ends the sequences of the given ids, for the given reason."""
        self.sender = sender
        self.request_ids = request_ids
        self.admitted: list[tuple[int, Admitted]] = []
        self.finished: list[FinishedRequest] = []
        self.first_step_ended_s: float | None = None
        self._abort = abort
        self._unfinished = dict(enumerate(request_ids))
        self._outputs: dict[int, SequenceOutput] = {}
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    @property
    def num_unfinished(self) -> int:
        """The number of sequences that wait or run."""
        return len(self._unfinished)

    async def __anext__(self) -> list[SequenceOutput]:
        """Return everything new, at least one output.

        Raises:
            ApiError: the engine refused a sequence (its status), or is gone (503).
        """
        if not self._outputs and not self._error and self._unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._outputs:
            outputs = list(self._outputs.values())
            self._outputs = {}
            return outputs
        if self._error:
            raise self._error
        raise StopAsyncIteration

    def finish(self, index: int, reason: str) -> None:
        """End one sequence early, and forget what came of it since the reader last asked.

        `reason` is for the metrics (`stop`: a stop string, `abort`: nobody waits).
        """
        self._outputs.pop(index, None)
        request_id = self._unfinished.pop(index, None)
        if request_id is not None:
            self._abort([request_id], reason)

    def close(self) -> None:
        """Abort every sequence that still runs."""
        request_ids = list(self._unfinished.values())
        self._unfinished.clear()
        if request_ids:
            self._abort(request_ids, "abort")

    def keep(self, count: int) -> None:
        """Forget all sequences but the first `count`: the others were never sent to the engine."""
        self._unfinished = {index: request_id for index, request_id in self._unfinished.items() if index < count}

    def output(self, index: int) -> SequenceOutput:
        """Return the output of a sequence that the reader has not taken yet, to add to it; call `wake` afterwards."""
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = SequenceOutput(index)
        return output

    def end(self, index: int) -> None:
        """Note that a sequence will have no more output."""
        self._unfinished.pop(index, None)

    def fail(self, index: int, error: ApiError) -> None:
        """End one sequence, and the generation once the reader has taken its earlier output."""
        self._unfinished.pop(index, None)
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader: something has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
