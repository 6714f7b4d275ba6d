"""The step loop of one engine process.

Read `Engine.step`, `_launch`, `_finish_steps` and `_publish` in this order to follow a step. The file has more than 400
lines to keep them together.

A plan (`StepPlan`) has the arrays of a step:

- for each request `request_ids`, `row_slots`, `context_lens` and `query_starts`. A *slot* is a row of the sampler's
  state; each running request has one;
- for each token to compute `token_ids` and `positions`;
- for each token to sample `logits_rows`, the computed token that it follows, and `logits_seqs`, its request's place in
  the plan.

It also names three kinds of requests:

- requests that it admits (`new_*`);
- requests that it preempts (`preempted_request_ids`);
- requests that skip the rest of their prompts, because storage has loaded it meanwhile (`met_*`).

`Scheduler.commit` returns a `StepResult`. For each sampled token, in the plan's order, it has `request_ids`,
`token_ids` and `finish_reasons`. The client gets a token only if its reason is below FINISH_ABORTED;
`engine/messages.py` lists the reasons. For each request of the plan, `counts` says whether the step's results for it
are kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from swiftkv._core import StepPlan, StepResult
from swiftkv.engine.attachable_tier import AttachableTier
from swiftkv.engine.cache_records import CacheRecords
from swiftkv.engine.grammars import Grammars
from swiftkv.engine.hits import hits_elsewhere
from swiftkv.engine.kv_events import open_kv_events
from swiftkv.engine.lending import Lending, make_scheduler
from swiftkv.engine.logprobs import PromptLogprobs, PromptPart
from swiftkv.engine.mask_thread import PendingMasks
from swiftkv.engine.messages import (
    FINISH_ABORTED,
    FINISH_BROKEN,
    FINISH_DROPPED,
    FINISH_REJECTED,
    FINISH_RUNNING,
    NO_KV_CACHE,
    Abort,
    AddRequest,
    Admitted,
    AttachStorage,
    CacheCall,
    CacheCommand,
    CacheReport,
    DetachStorage,
    EngineConfig,
    EngineStats,
    FromEngine,
    Pin,
    PinPrompt,
    PinView,
    RequestError,
    Shutdown,
    Sleep,
    Slept,
    StepOutput,
    StepTrace,
    ToEngine,
    TokenLogprobs,
    Unpin,
    Wake,
    Woken,
    pack_prompt_logprobs,
)
from swiftkv.engine.pins import Pins
from swiftkv.engine.pooler import Pooler, pooled_by_request
from swiftkv.engine.request import Request
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.sampler import open_sampler
from swiftkv.engine.seats import Seats
from swiftkv.engine.statistics import EngineStatistics
from swiftkv.engine.token_rules import TokenRules
from swiftkv.engine.token_sampler import LogitRows, PendingSample, Sampled, TokenSampler
from swiftkv.engine.tracing import StepTracer
from swiftkv.engine.turns import open_turns
from swiftkv.engine.weights import EngineWeights
from swiftkv.errors import TransferError
from swiftkv.progress import PROGRESS
from swiftkv.transport.fence import Fence

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_STEP = 256
MAX_MESSAGE_BYTES_PER_STEP = 8 << 20
"""The engine reads no more messages before the next step once it has read this many bytes."""

_STATS_INTERVAL_S = 0.1
_STARVED_POLL_MS = 100
_STARVED_INTERVAL_S = 0.05
_IDLE_POLL_MS = 1000  # each wake-up shows the supervisor that an idle engine is alive


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was launched and is not finished."""

    plan: StepPlan
    fence: Fence
    prompt_parts: list[PromptPart]
    sample: PendingSample
    launched_s: float  # monotonic: when the runner began
    preparing_s: float  # the seconds before `launched_s` for which the device had nothing to do


class Engine:
    """Schedules, runs and samples until `Shutdown`.

    Per step, Python handles arrays. It handles single requests only when they arrive, take a slot, ask for
    log-probabilities, or end.

    With asynchronous scheduling, the engine launches a step before it finishes the previous one (xLLM Technical Report,
    section 4.1). The device then always has work, but the engine notices the end of a request one step late: the device
    has computed one more token for it, which is discarded.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        requests: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._config = config
        self._runner = runner
        self._requests_socket = requests
        self._outputs_socket = outputs
        self._scheduler = make_scheduler(config, runner.group_specs)
        self._tier = AttachableTier(config, runner, self._scheduler)
        groups = [region.group for region in runner.pool.regions]
        # Before lending: if an endpoint cannot be bound, the caller destroys `context`, whose sockets the coordinator's
        # thread would still be using.
        self._kv_events = open_kv_events(config.kv_events, self._scheduler, groups, config.device, context)
        self._lending = Lending(config, runner, self._scheduler, context)
        self._turns = open_turns(config, runner.kernels)
        self._cache_records = CacheRecords(self._scheduler, groups)
        self._pins = Pins(
            self._scheduler, self._cache_records, block_size=config.block_size, max_share=config.max_pinned_share
        )
        self._poller = zmq.Poller()
        self._poller.register(requests, zmq.POLLIN)
        self._poller.register(self._lending.wakeup.fd, zmq.POLLIN)
        self._poller.register(self._tier.wakeup.fd, zmq.POLLIN)
        self._sampler: TokenSampler = (
            open_sampler(runner.kernels, runner.vocab_size, runner.last_token_ids)
            if config.task == "generate"
            else Pooler(config.max_num_seqs)
        )
        wake = self._lending.wakeup.wake  # ends `_wait`
        self._grammars = Grammars(config, runner.vocab_size, runner.eos_token_ids, wake=wake)
        self._rules = TokenRules(runner.vocab_size)
        self._weights = EngineWeights(runner, wake)
        self._launched: deque[_Launched] = deque()  # launched and not finished, the oldest first
        self._previous_end_s = 0.0  # monotonic: when the newest finished step was over
        self._starved_due_s = 0.0  # monotonic: when to look for starved requests again
        self._woken_s = 0.0  # monotonic: when `_wait` last returned
        self._prompt_logprobs = PromptLogprobs(runner.vocab_size, self._sampler.token_logprobs)
        self._tracer = StepTracer(self._lending.leased_bytes)
        self._requests: dict[int, Request] = {}
        self._admitted: dict[int, Admitted] = {}  # by request id: the last `Admitted` sent to the gateway
        self._seats = Seats(self._sampler, config.max_num_seqs)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._statistics = EngineStatistics(config, runner, self._scheduler, self._tier, self._turns, self._pins)
        self._messages_taken = 0
        self._stats_due_s = 0.0  # monotonic
        self._stats_changed = True

    def run(self) -> None:
        """Serve until `Shutdown`.

        Raises `LoadError` if the weights cannot be loaded again after `Sleep`, `FilesChangedError` if their files were
        overwritten. Any other exception is a defect, and ends the process.
        """
        try:
            self._serve()
        finally:
            self._grammars.close()
            self._tier.close()
            self._kv_events.close()
            self._lending.close()

    def _serve(self) -> None:
        busy = False
        while True:
            PROGRESS.works()
            if not busy and (self._stats_changed or self._tier.has_news()):
                self._send_stats()
            self._lending.before_step(self._finish_steps)  # applies lease changes; may have to finish steps first
            self._tier.before_step()  # takes the blocks that storage has read, and gives it blocks to write
            self._stats_changed |= self._pins.before_step(time.monotonic())
            self._kv_events.collect()
            if not busy:
                PROGRESS.rests()
                self._wait()
                self._woken_s = time.monotonic()
                PROGRESS.works()
                self._tier.before_step()  # a request whose load has just ended runs in this step
            for message in self._receive():
                if isinstance(message, Shutdown):
                    self._finish_steps()  # while the other ranks are alive
                    return
                self._handle(message)
            self._take_compiled()
            if self._weights.take():  # loaded again, in a thread
                self._send(Woken(self._config.incarnation))
            for answer in self._tier.take_answers():
                self._send_stats()
                self._send(answer)
            busy = self.step()

    def step(self) -> bool:
        """Launch the next step and finish the one before it. Without asynchronous scheduling, finish both.

        Return whether another step may follow at once. If not, nothing can be scheduled until a message arrives or a
        lender lends memory.
        """
        now_s = time.monotonic()
        self._refuse_starved(now_s)
        if self._turns.is_contended():
            self._finish_steps()
        plan = self._scheduler.schedule(now_s)
        if plan is None and not self._launched:
            self._turns.rest()
            return False
        self._weights.check(now_s)
        if plan is not None:
            if now_s >= self._stats_due_s:
                self._send_stats()
            is_overlapped = bool(self._launched)
            preparing_s = 0.0 if is_overlapped else time.monotonic() - max(self._previous_end_s, self._woken_s)
            with self._turns:  # models share the cores, or a GPU
                self._launch(plan, preparing_s)
        self._finish_steps(keep=1 if plan is not None and self._config.async_scheduling else 0)
        if self._scheduler.has_work():
            return True
        self._turns.rest()
        return False

    def _launch(self, plan: StepPlan, preparing_s: float) -> None:
        launched_s = time.monotonic()
        self._seats.follow(plan, self._requests)
        self._announce_admitted(plan)
        masks = self._grammars.masks_of(plan)
        if masks is not None and not self._launched:
            masks.begin()  # in a thread, while the model computes
        try:
            hidden = self._runner.forward(plan)
        except TransferError as error:
            logger.warning("a copy of KV failed, so running requests are computed again: %s", error)
            self._finish_steps()
            self._runner.fence().wait()
            self._lending.transfer_failed(plan, error.links)
            self._previous_end_s = time.monotonic()  # the time lost here does not count for the next step
            return
        prompt_parts = self._collect_prompt_logprobs(plan, hidden)
        if masks is not None or self._rules.are_in(plan):
            # Masks depend on the previous step's tokens. The device computes this step while the engine waits for them.
            self._finish_steps()
        sample = self._sample(plan, hidden, masks)
        self._launched.append(_Launched(plan, self._runner.fence(), prompt_parts, sample, launched_s, preparing_s))

    def _finish_steps(self, keep: int = 0) -> None:
        """Wait for all launched steps but the newest `keep`, commit them and send their tokens."""
        while len(self._launched) > keep:
            step = self._launched.popleft()
            step.fence.wait()  # even if nothing was sampled: once committed, the step's blocks may be overwritten
            exposed_s = 0.0  # the time that the model waited for copies
            if self._runner.layer_stream is not None and step.plan.has_copies:
                exposed_s = self._runner.layer_stream.step_ended()
            sampled = step.sample.result()
            duration_s = self._take_duration(step.launched_s)
            self._turns.ended(duration_s)
            token_ids = np.where(sampled.broken, np.int32(-1), sampled.token_ids)  # -1 where logits are not finite
            result = self._scheduler.commit(token_ids, duration_s=duration_s + step.preparing_s)
            self._prompt_logprobs.commit(step.prompt_parts, result.counts)
            self._lending.demand_changed()
            traces = self._tracer.parts(step.plan, duration_s, exposed_s) if self._tracer else []
            self._publish(step.plan, sampled, result, traces)

    def _take_duration(self, launched_s: float) -> float:
        """Return the seconds for which the finished step kept the device busy, and note when it ended."""
        begun_s, self._previous_end_s = max(launched_s, self._previous_end_s), time.monotonic()
        return self._previous_end_s - begun_s

    def _collect_prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> list[PromptPart]:
        if not self._prompt_logprobs:
            return []
        return self._prompt_logprobs.collect(
            plan.request_ids, plan.query_starts, plan.context_lens, lambda rows: self._runner.logits(hidden, rows)
        )

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, masks: PendingMasks | None) -> PendingSample:
        rows = plan.logits_rows
        return self._sampler.sample(
            LogitRows(
                self._runner.logits(hidden, rows),
                slots=plan.row_slots[plan.logits_seqs],
                positions=plan.positions[rows] + np.int32(1),
                masks=self._rules.narrowed(None if masks is None else masks.take(), plan),
            )
        )

    def _wait(self) -> None:
        """Wait until a message comes, the coordinator or storage has news, or the poll interval is over."""
        timeout_ms = _STARVED_POLL_MS if self._scheduler.has_work() else _IDLE_POLL_MS
        self._poller.poll(self._tier.longest_rest_ms(timeout_ms))
        self._stats_changed |= self._lending.wakeup.take()  # blocks have changed hands
        self._tier.wakeup.take()

    def _receive(self) -> list[ToEngine]:
        """Return the messages that have come. Their number and size are limited, because running requests wait."""
        messages: list[ToEngine] = []
        num_bytes = 0
        while len(messages) < MAX_MESSAGES_PER_STEP and num_bytes < MAX_MESSAGE_BYTES_PER_STEP:
            try:
                frame = self._requests_socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_bytes += len(frame)
            messages.append(self._decoder.decode(frame))
        self._messages_taken += len(messages)
        return messages

    def _refuse_starved(self, now_s: float) -> None:
        """Refuse requests that have waited too long for lenders to lend memory.

        Without lending, a request that cannot fit is refused on arrival.
        """
        lending = self._config.lending
        if lending is None or now_s < self._starved_due_s:
            return
        self._starved_due_s = now_s + _STARVED_INTERVAL_S  # not in every step: `starved` visits all waiting requests
        starved = self._scheduler.starved(now_s, lending.max_wait_s)
        if not starved:
            return
        self._scheduler.abort(np.array(starved, np.uint64))
        for request_id in starved:
            self._forget(request_id)
            self._stats_changed = True
            message = (
                f"model {self._config.name} has not enough KV cache for this request at the moment, and no more was "
                f"lent to it for {lending.max_wait_s:g} s; try again later or shorten it"
            )
            self._send(RequestError(request_id, 503, message, NO_KV_CACHE, lending.retry_after_s))

    def _handle(self, message: AddRequest | Abort | CacheCall | Sleep | Wake | AttachStorage | DetachStorage) -> None:
        self._stats_changed = True
        match message:
            case AddRequest():
                self._add(message)
            case Abort(request_ids=request_ids):
                self._scheduler.abort(np.array(request_ids, np.uint64))
                for request_id in request_ids:
                    self._offer_prompt(request_id)
                    self._forget(request_id)
            case CacheCommand():
                cleared = self._clear_cache() if message.clear else 0
                explanations = self._cache_records.explain(message.explain)
                self._send(CacheReport(message.call, explanations, cleared))
            case Pin(call=call, request_ids=request_ids, ttl_s=ttl_s):
                self._answer_pin(call, self._pins.pin_request(request_ids, ttl_s, time.monotonic()))
            case PinPrompt():
                self._answer_pin(message.call, self._pins.pin_prompt(message, time.monotonic()))
            case Unpin(call=call, pin_id=pin_id):
                is_done = self._pins.unpin(pin_id)
                self._send_stats()
                self._send(CacheReport(call, why_not=None if is_done else f"there is no pin {pin_id}"))
            case Sleep():
                self._finish_steps()
                assert not self._requests, f"{len(self._requests)} requests of an engine that is to sleep"
                self._weights.give_up()
                self._send(Slept(self._config.incarnation))
            case Wake(give_way_s=give_way_s):
                self._weights.load(give_way_s)
            case AttachStorage():
                self._tier.attach(message)
            case DetachStorage():
                self._tier.detach(message)

    def _answer_pin(self, call: int, made: PinView | str) -> None:
        self._send_stats()
        self._send(CacheReport(call, why_not=made) if isinstance(made, str) else CacheReport(call, pin=made))

    def _clear_cache(self) -> int:
        """Forget every block that no running request holds, and return how many there were."""
        self._finish_steps()
        groups = self._scheduler.stats().groups
        self._scheduler.reset_prefix_cache()
        return sum(group.cached + group.borrowed_cached + group.host_cached for group in groups)

    def _add(self, message: AddRequest) -> None:
        try:
            request = Request.from_message(
                message,
                self._runner.vocab_size,
                self._config.max_model_len,
                self._runner.eos_token_ids,
                self._config.task,
            )
            may_run = self._grammars.hold(request)
        except ValueError as error:
            self._refuse(message.request_id, str(error))
            return
        if may_run:
            self._enqueue(request)

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars have been compiled. Refuse requests whose grammars cannot be compiled."""
        for request, why_not in self._grammars.take_compiled():
            if why_not is None:
                self._enqueue(request)
            else:
                self._refuse(request.request_id, why_not)

    def _enqueue(self, request: Request) -> None:
        try:
            self._scheduler.add_request(
                request.request_id,
                request.prompt,
                max_tokens=request.sampling.max_tokens,
                min_tokens=request.sampling.min_tokens,
                stop_token_ids=request.stop_token_ids,
                namespace=request.namespace,
                skip_prefix_match=request.sampling.prompt_logprobs is not None,
                priority=request.priority,
                arrival_s=request.arrived_s,
                deadline_s=request.arrived_s + (request.target_ttft_s or self._config.target_ttft_s),
                flow=request.flow,
                flow_weight=request.flow_weight,
            )
        except ValueError as error:
            self._refuse(request.request_id, str(error))
            return
        self._requests[request.request_id] = request
        self._rules.hold(request.request_id, request.sampling)
        self._tier.added(request.request_id)
        self._kv_events.added(request.namespace)
        self._prompt_logprobs.add(request)
        self._tracer.add(request)
        self._lending.demand_changed()

    def _refuse(self, request_id: int, why: str) -> None:
        self._forget(request_id)
        self._send(RequestError(request_id, 400, why))

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._admitted.pop(request_id, None)
        self._tier.forget(request_id)
        self._sampler.release(request_id)
        self._grammars.release(request_id)
        self._rules.release(request_id)
        self._prompt_logprobs.discard(request_id)
        self._tracer.discard(request_id)

    def _publish(self, plan: StepPlan, sampled: Sampled, result: StepResult, traces: list[StepTrace]) -> None:
        reasons = result.finish_reasons
        has_ended = reasons != FINISH_RUNNING
        for request_id in result.request_ids[has_ended].tolist():
            self._offer_prompt(request_id)
        is_answer = reasons < FINISH_ABORTED  # clients get these tokens
        rows = self._follow_answers(result, np.flatnonzero(is_answer))
        pooled = pooled_by_request(sampled, result.request_ids, rows)
        if pooled:
            rows = rows[:0]  # a pooled request samples no token: its row only marks its end
        self._statistics.count_step(plan.num_prompt_tokens_in_step, len(rows))
        self._stats_changed = True
        stats = None if self._scheduler.has_work() else self._stats()
        if len(rows) or pooled or traces or stats is not None:
            request_ids = result.request_ids[rows]
            self._send(
                StepOutput(
                    request_ids.tobytes(),
                    result.token_ids[rows].tobytes(),
                    reasons[rows].tobytes(),
                    logprobs=_logprobs_by_request(sampled, result.request_ids, is_answer) or None,
                    prompt_logprobs=self._finished_prompt_logprobs(request_ids) or None,
                    stats=stats,
                    messages_taken=self._messages_taken,
                    pooled=pooled or None,
                    traces=traces or None,
                    ended_s=time.perf_counter(),
                )
            )
        if has_ended.any():
            self._drop_finished(plan, sampled, result)

    def _follow_answers(self, result: StepResult, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Have grammars and rules take the tokens of `rows`. Return the rows of the requests that can go on."""
        if self._grammars:
            rows = self._follow_grammars(result, rows)
        if self._rules:
            self._rules.advance(result.request_ids[rows].tolist(), result.token_ids[rows].tolist())
        return rows

    def _offer_prompt(self, request_id: int) -> None:
        """Offer storage the prompt of a request that is ending, if the client asked for it to be stored."""
        request, keys = self._requests.get(request_id), self._cache_records.keys_of(request_id)
        if request is not None and request.is_to_last and keys is not None:
            self._scheduler.offer_prefix(keys)

    def _drop_finished(self, plan: StepPlan, sampled: Sampled, result: StepResult) -> None:
        """Have the sampler retract the tokens that do not count, and forget the requests that ended."""
        reasons = result.finish_reasons
        is_retracted = (reasons == FINISH_DROPPED) | (reasons == FINISH_REJECTED)
        retracted = np.flatnonzero(is_retracted)
        self._sampler.retract(plan.row_slots[plan.logits_seqs[retracted]], sampled.token_ids[retracted])
        for request_id in result.request_ids[reasons == FINISH_BROKEN].tolist():
            self._send(RequestError(request_id, 500, "the logits for the next token are not finite"))
        for request_id in result.request_ids[(reasons != FINISH_RUNNING) & ~is_retracted].tolist():
            self._forget(request_id)

    def _follow_grammars(self, result: StepResult, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Give the matchers the tokens of `rows`, and refuse requests whose matchers cannot go on.

        Return the rows of the other requests.
        """
        request_ids = result.request_ids[rows]
        token_ids, reasons = (array[rows].tolist() for array in (result.token_ids, result.finish_reasons))
        failed = self._grammars.advance(request_ids.tolist(), token_ids, reasons)
        if not failed:
            return rows
        self._scheduler.abort(np.array(list(failed), np.uint64))
        for request_id, why in failed.items():
            self._refuse(request_id, why)
        return rows[~np.isin(request_ids, list(failed))]

    def _announce_admitted(self, plan: StepPlan) -> None:
        """Tell the gateway which requests have left the queue.

        Call it before the step runs, because a prefill may take seconds.
        """
        admitted = self._newly_admitted(plan) if len(plan.new_request_ids) else []
        for request_id, (first, end) in zip(plan.met_request_ids.tolist(), plan.met_blocks.tolist(), strict=True):
            if request_id in self._admitted:
                admitted.append(self._found_more(request_id, first, end))
        if admitted:
            self._admitted.update((each.request_id, each) for each in admitted)
            self._send(StepOutput(b"", b"", b"", admitted, messages_taken=self._messages_taken))

    def _newly_admitted(self, plan: StepPlan) -> list[Admitted]:
        admitted = []
        borrowed = np.split(plan.new_borrowed_blocks, plan.new_borrowed_starts[1:-1])
        in_host = np.split(plan.new_host_blocks, plan.new_host_starts[1:-1])
        found = zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), borrowed, in_host, strict=True)
        for request_id, cached_tokens, borrowed_blocks, host_blocks in found:
            outcome = self._tier.why_less(request_id)
            self._cache_records.admitted(self._requests[request_id], cached_tokens, outcome)
            loaded = self._tier.attended(self._tier.admitted(request_id, cached_tokens), host_blocks)
            elsewhere = hits_elsewhere(loaded, borrowed_blocks, self._config.block_size)
            self._statistics.count_hits(cached_tokens, in_peers=elsewhere.get("peer", 0))
            admitted.append(Admitted(request_id, cached_tokens, elsewhere))
        return admitted

    def _found_more(self, request_id: int, first: int, end: int) -> Admitted:
        """Return all cached tokens of a request, now with blocks `first` to `end`, which storage has loaded."""
        before, block_size = self._admitted[request_id], self._config.block_size
        loaded = hits_elsewhere(self._tier.met(request_id, first, end), np.empty(0, np.int32), block_size)
        num_more = (end - first) * block_size
        self._statistics.count_hits(num_more, in_peers=0)
        cached_tokens = before.cached_tokens + num_more
        self._cache_records.found_more(request_id, cached_tokens)
        return Admitted(request_id, cached_tokens, dict(Counter(before.elsewhere) + Counter(loaded)))

    def _finished_prompt_logprobs(self, request_ids: npt.NDArray[np.uint64]) -> dict[int, list[bytes]]:
        if not self._prompt_logprobs:
            return {}
        each_once = dict.fromkeys(request_ids.tolist())
        found = {request_id: self._prompt_logprobs.pop(request_id) for request_id in each_once}
        return {
            request_id: pack_prompt_logprobs(logprobs) for request_id, logprobs in found.items() if logprobs is not None
        }

    def _send_stats(self) -> None:
        self._send(StepOutput(b"", b"", b"", stats=self._stats(), messages_taken=self._messages_taken))

    def _stats(self) -> EngineStats:
        self._stats_due_s = time.monotonic() + _STATS_INTERVAL_S
        self._stats_changed = False
        return self._statistics.now()

    def _send(self, message: FromEngine) -> None:
        """Send a message. Block while the gateway is behind."""
        self._outputs_socket.send(self._encoder.encode(message))


def _logprobs_by_request(
    sampled: Sampled, request_ids: npt.NDArray[np.uint64], is_answer: npt.NDArray[np.bool_]
) -> dict[int, list[TokenLogprobs]]:
    """Return the log-probabilities of the tokens that clients get, in the order of rows."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for row, entry in sampled.logprobs.items():
        if is_answer[row]:
            logprobs.setdefault(int(request_ids[row]), []).append(entry)
    return logprobs
