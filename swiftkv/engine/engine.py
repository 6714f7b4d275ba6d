"""The step loop of one engine process."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from swiftkv._core import Scheduler, StepPlan, StepResult
from swiftkv.engine.logprobs import PromptLogprobs
from swiftkv.engine.messages import (
    FINISH_ABORTED,
    Abort,
    AddRequest,
    EngineConfig,
    EngineStats,
    FromEngine,
    RequestError,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenLogprobs,
)
from swiftkv.engine.request import Request
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.sampler import Sampled, Sampler

_STATS_INTERVAL_S = 0.1


class Engine:
    """Schedules, runs and samples until it is told to shut down.

    Per step, Python touches arrays, not sequences; per request, it acts when one arrives, takes a row slot, asks for
    log-probabilities, or ends.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]
    ) -> None:
        self._config = config
        self._runner = runner
        self._requests_socket = requests
        self._outputs_socket = outputs
        self._scheduler = Scheduler(
            runner.group_specs,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.enable_prefix_caching,
            config.enable_chunked_prefill,
        )
        self._sampler = Sampler(config.max_num_seqs, runner.vocab_size, runner.device)
        self._prompt_logprobs = PromptLogprobs(runner.vocab_size)
        self._requests: dict[int, Request] = {}
        self._slot_request_ids = np.zeros(config.max_num_seqs, np.uint64)  # the last that had the slot
        self._slot_taken = np.zeros(config.max_num_seqs, np.bool_)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._stats_due_s = 0.0  # monotonic
        self._stats_changed = True

    def run(self) -> None:
        """Serve until `Shutdown`. What goes wrong here is a defect and ends the process: nothing is swallowed."""
        busy = False
        while True:
            if not busy and self._stats_changed:
                self._send_stats()
            for message in self._receive(wait=not busy):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            busy = self.step()

    def step(self) -> bool:
        """schedule, prepare, run, commit. False: there is nothing to do before another message comes."""
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        if time.monotonic() >= self._stats_due_s:
            self._send_stats()
        self._seat(plan)
        hidden = self._runner.forward(plan)
        if self._prompt_logprobs:
            self._prompt_logprobs.collect(
                plan.request_ids, plan.query_starts, plan.context_lens, lambda rows: self._runner.logits(hidden, rows)
            )
        rows, sequences = plan.logits_rows, plan.logits_seqs
        sampled = self._sampler.sample(
            self._runner.logits(hidden, rows), plan.row_slots[sequences], plan.positions[rows] + np.int32(1)
        )
        if sampled.broken.any():
            self._fail(plan.request_ids[sequences[sampled.broken]])
        result = self._scheduler.commit(sampled.token_ids)
        self._publish(plan, sampled, result)
        return self._scheduler.has_work()

    def _receive(self, wait: bool) -> list[ToEngine]:
        """All messages that have come; if `wait`, at least one."""
        messages: list[ToEngine] = []
        while True:
            try:
                frame = self._requests_socket.recv(0 if wait and not messages else zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def _handle(self, message: AddRequest | Abort) -> None:
        self._stats_changed = True
        if isinstance(message, AddRequest):
            self._add(message)
            return
        self._scheduler.abort(np.array(message.request_ids, np.uint64))
        for request_id in message.request_ids:
            self._forget(request_id)

    def _add(self, message: AddRequest) -> None:
        try:
            request = Request.from_message(
                message,
                self._config.name,
                self._runner.vocab_size,
                self._config.max_model_len,
                self._runner.eos_token_ids,
            )
            self._scheduler.add_request(
                request.request_id,
                request.prompt,
                request.sampling.max_tokens,
                request.sampling.min_tokens,
                request.stop_token_ids,
                request.namespace,
                request.sampling.prompt_logprobs is not None,
                request.priority,
            )
        except ValueError as error:
            self._send(RequestError(message.request_id, 400, str(error)))
            return
        self._requests[request.request_id] = request
        self._prompt_logprobs.add(request)

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._sampler.release(request_id)
        self._prompt_logprobs.discard(request_id)

    def _seat(self, plan: StepPlan) -> None:
        """Give row slots to the requests that came or came back, after those that were preempted left theirs."""
        for request_id in plan.preempted_request_ids.tolist():
            for slot in np.flatnonzero(self._slot_taken & (self._slot_request_ids == request_id)).tolist():
                self._slot_taken[slot] = False
                self._sampler.park(slot, self._requests[request_id])
        slots, request_ids = plan.row_slots, plan.request_ids
        for sequence in np.flatnonzero(~self._slot_taken[slots] | (self._slot_request_ids[slots] != request_ids)):
            self._sampler.seat(int(slots[sequence]), self._requests[int(request_ids[sequence])])
        self._slot_request_ids[slots] = request_ids
        self._slot_taken[slots] = True

    def _fail(self, request_ids: npt.NDArray[np.uint64]) -> None:
        """End requests for which there is no token, and only those; before the commit, so that the cache does not keep
        the KV that led there."""
        self._scheduler.abort(request_ids)
        for request_id in request_ids.tolist():
            self._forget(request_id)
            self._send(RequestError(request_id, 500, "the logits for the next token are not finite"))

    def _publish(self, plan: StepPlan, sampled: Sampled, result: StepResult) -> None:
        self._steps_total += 1
        self._prompt_tokens_total += plan.num_prompt_tokens_in_step
        rows = np.flatnonzero(result.finish_reasons != FINISH_ABORTED)
        self._generation_tokens_total += len(rows)
        self._stats_changed = True
        stats = None if self._scheduler.has_work() else self._stats()
        admitted = list(zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True))
        if len(rows) or admitted or stats:
            self._send(
                StepOutput(
                    result.request_ids[rows].tobytes(),
                    result.token_ids[rows].tobytes(),
                    result.finish_reasons[rows].tobytes(),
                    admitted,
                    {int(result.request_ids[row]): entry for row, entry in sampled.logprobs.items()} or None,
                    self._finished_prompt_logprobs(result) if self._prompt_logprobs else None,
                    stats,
                )
            )
        for request_id in result.request_ids[result.finish_reasons != 0].tolist():
            self._forget(request_id)

    def _finished_prompt_logprobs(self, result: StepResult) -> dict[int, list[TokenLogprobs]] | None:
        found = {request_id: self._prompt_logprobs.pop(request_id) for request_id in result.request_ids.tolist()}
        return {request_id: logprobs for request_id, logprobs in found.items() if logprobs is not None} or None

    def _send_stats(self) -> None:
        self._send(StepOutput(b"", b"", b"", stats=self._stats()))

    def _stats(self) -> EngineStats:
        self._stats_due_s = time.monotonic() + _STATS_INTERVAL_S
        self._stats_changed = False
        stats = self._scheduler.stats()
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=sum(group.total for group in stats.groups),
            num_free_blocks=sum(group.free for group in stats.groups),
            num_used_blocks=sum(group.used for group in stats.groups),
            num_cached_blocks=sum(group.cached for group in stats.groups),
            num_preemptions_total=stats.num_preemptions_total,
            prefix_query_tokens_total=stats.prefix_query_tokens_total,
            prefix_hit_tokens_total=stats.prefix_hit_tokens_total,
            steps_total=self._steps_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
        )

    def _send(self, message: FromEngine) -> None:
        """Blocks while the gateway does not keep up: then the engine has nothing better to do."""
        self._outputs_socket.send(self._encoder.encode(message))
