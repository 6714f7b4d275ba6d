"""The gateway's end of one engine: sends requests to it, and hands its answers to the generations that wait.

It is one file of more than 400 lines because it is one class: everything here adds to its table of sequences in flight,
or takes from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from swiftkv.engine.messages import (
    FINISH_LENGTH,
    FINISH_STOP,
    HIGH_WATER_MARK,
    MAX_MESSAGE_BYTES,
    Admitted,
    CacheReport,
    EngineStats,
    FromEngine,
    Ready,
    RequestError,
    Shutdown,
    Sleep,
    Slept,
    StepOutput,
    StorageChanged,
    ToEngine,
    Wake,
    Woken,
)
from swiftkv.server.cache_calls import CacheCalls
from swiftkv.server.engine_state import DOWN_RETRY_S, EndCause, EngineState, EngineStatus
from swiftkv.server.engine_storage import EngineStorage
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import USUAL_TERMS, Generation, SequenceRequest, Terms
from swiftkv.server.in_flight import InFlight
from swiftkv.server.load_meter import LoadMeter
from swiftkv.server.metrics import ModelMetrics
from swiftkv.server.node_views import EngineView
from swiftkv.server.outbox import Outbox
from swiftkv.server.outlook import Outlook
from swiftkv.server.tenant_limits import limit_met
from swiftkv.server.tenants import Sender

_ROUNDS_TO_WRITE = 5  # of the event loop, from a token that was handed on to its last write
_FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class EngineClient:
    """One engine, across restarts: an engine that is started again takes over the same sockets.

    Create it inside the event loop. The engine's supervisor runs `receive`, and reports that a process is about to
    start (`expect`), its state (`status`) and its end (`engine_down`). The engine itself reports that it is up.
    """

    def __init__(
        self,
        name: str,
        requests_address: str,
        outputs_address: str,
        metrics: ModelMetrics,
        max_in_flight: int = 1024,
        outlook: Outlook | None = None,
        weight_bytes: int = 0,
    ) -> None:
        self.name = name
        self.requests_address = requests_address
        self.outputs_address = outputs_address
        self.metrics = metrics
        self.max_in_flight = max_in_flight
        self.outlook = outlook or Outlook(name, metrics)
        self.engine: Ready | None = None
        self.stats: EngineStats | None = None
        self.num_restarts = 0
        self.status = EngineStatus()
        self.load_meter = LoadMeter(weight_bytes)
        self.storage = EngineStorage(self._send_now)
        self._in_flight: dict[int, InFlight] = {}
        self._next_request_id = 1
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._incarnation: int | None = None
        self._ready = asyncio.Event()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._falls_asleep = False
        self._context = zmq.asyncio.Context()
        self._push = zmq.Socket(self._context, zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._outbox = Outbox(self._push, self._note_idle)
        self.cache = CacheCalls(self._outbox.send, lambda: self.status.refusal(self.name))
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(HIGH_WATER_MARK)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)

    def start(self) -> None:
        """Bind both sockets. Call before the engine process starts."""
        self._push.bind(self.requests_address)
        self._pull.bind(self.outputs_address)

    def close(self) -> None:
        """Fail what is in flight and close the sockets; `receive` must have ended."""
        self.status.drain()
        self.engine_down("was shut down", state=EngineState.DOWN)
        self._push.close()
        self._pull.close()
        self._context.term()

    @property
    def state(self) -> EngineState:
        return self.status.state

    def view(self) -> EngineView:
        """Return what `/ready` and `/metrics` show of the engine."""
        now_s = time.monotonic()
        observed = self.status.observed
        return EngineView(
            state=str(self.state),
            why=self.status.why,
            since_s=now_s - self.status.since_s,
            in_flight=self.num_in_flight,
            progress_age_s=None if observed is None else now_s - observed.progress_s,
            restarts=self.num_restarts,
            pid=None if self.engine is None else self.engine.pid,
            storage=self.storage.state,
            storage_backend=self.storage.backend,
            loading=self.load_meter.view(self.state),
        )

    @property
    def num_in_flight(self) -> int:
        """The number of sequences in flight, and of aborts that wait to be sent, which count like them."""
        return len(self._in_flight) + self._outbox.num_unsent_aborts

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do: sequences in flight, or its weights to give up."""
        return self._falls_asleep or self.num_in_flight > 0

    @property
    def num_waiting(self) -> int:
        """The number of sequences that the engine has not begun."""
        return sum(sequence.admitted_s is None for sequence in self._in_flight.values())

    @property
    def max_sequences(self) -> int:
        """The most sequences that one request may have: half of `max_in_flight`, so that no request fills the queue."""
        return max(1, self.max_in_flight // 2)

    def max_sequences_of(self, sender: Sender) -> int:
        """Return the most sequences that one request of a sender may have: no more than its part of the queue."""
        return max(1, min(self.max_sequences, int(sender.part * self.max_in_flight)))

    async def wait_ready(self) -> Ready:
        """Wait until the engine says that it serves."""
        await self._ready.wait()
        assert self.engine is not None
        return self.engine

    def check_available(self) -> None:
        """Raise `ApiError` 503 unless the engine takes requests."""
        if not self.state.is_there:
            raise self.status.refusal(self.name)

    def generate(
        self,
        requests: Sequence[SequenceRequest],
        terms: Terms = USUAL_TERMS,
    ) -> Generation:
        """Hand sequences to the engine, unless they would miss the targets of their terms.

        Raises:
            ApiError: 503 if the engine is down, 429 if too much is in flight or unread, or the targets cannot be met.
        """
        self._check_room(requests, terms.sender)
        request_ids = range(self._next_request_id, self._next_request_id + len(requests))
        arrived_s = time.perf_counter()
        messages = [
            request.message(request_id, terms, arrived_s)
            for request_id, request in zip(request_ids, requests, strict=True)
        ]
        forecast_s = self.outlook.check(messages[0], terms.targets)
        self._next_request_id = request_ids.stop
        generation = Generation(request_ids, self._abort, terms.sender)
        self._idle.clear()
        for index, (message, request) in enumerate(zip(messages, requests, strict=True)):
            if not self._outbox.send(message):
                generation.keep(index)
                generation.close()
                self._note_idle()
                raise self.status.refusal(self.name)
            self._in_flight[message.request_id] = InFlight(generation, index, request, arrived_s)
            if index == 0:  # which answers for the others
                self.outlook.sent(message, arrived_s, terms.targets.ttft_s, forecast_s)
            else:
                self.outlook.sent(message, arrived_s)
        return generation

    def _check_room(self, requests: Sequence[SequenceRequest], sender: Sender) -> None:
        """Raise `ApiError`: 503 unless the engine takes requests, 429 if too much is in flight or unread."""
        self.check_available()
        limits = {"max_num_queued_reqs": self.max_in_flight, "max_num_queued_tokens": self.outlook.queued.max_tokens}
        if limit := limit_met(limits, self._in_flight.values(), sender, len(requests)):
            raise self.outlook.busy(limit, f"has no more room for tenant '{sender.name}'")
        if self.num_in_flight + len(requests) > self.max_in_flight:
            reason = f"has {self.num_in_flight} of at most {self.max_in_flight} sequences in flight"
            raise self.outlook.busy("max_num_queued_reqs", reason)
        self.outlook.check_queue()
        if not self._outbox.has_room(len(requests), sum(request.num_bytes for request in requests)):
            raise self.outlook.busy(
                "unread_messages", f"has {self._outbox.num_unread} messages that its engine has not read"
            )

    def _send_now(self, message: ToEngine) -> None:
        """Send a message. Raises `ApiError` 503 unless the engine takes requests."""
        self.check_available()
        if not self._outbox.send(message):
            raise self.status.refusal(self.name)

    def shutdown_engine(self) -> None:
        """Ask the engine to exit; if it does not, its supervisor ends the process."""
        if self.engine is not None:
            self._outbox.send(Shutdown())

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, wait for those in flight, and fail what is left after `timeout_s`."""
        self.status.drain()
        if not await self.until_idle(timeout_s):
            self._fail_all()

    async def until_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is in flight; return `False` if `timeout_s` passes before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """End everything that is in flight, in the engine too."""
        self._end_in_engine(self._fail_all())

    def sleep_engine(self) -> None:
        """Have the engine give up its weights. Nothing may be in flight."""
        assert not self.num_in_flight
        self._falls_asleep = True
        self._outbox.send(Sleep())

    def wake(self, give_way_s: float = 0.0) -> None:
        """Wake the model, which is asleep: its engine loads its weights, or is started.

        Loading gives way to the work of other models for `give_way_s` at most.
        """
        assert self.state is EngineState.ASLEEP
        self.status.wake_up()
        self._ready.clear()
        self.load_meter.forget()
        self.load_meter.give_way(give_way_s)
        if self.engine is None:
            self._wanted.set()
        else:
            self._outbox.send(Wake(give_way_s))

    def expect(self, incarnation: int) -> None:
        """Accept only the engine process that was started with this number."""
        self._incarnation = incarnation

    def engine_up(self, ready: Ready) -> None:
        """Note that the engine serves, because its `Ready` came; ignore the `Ready` of a process that is gone."""
        if ready.incarnation != self._incarnation:
            return
        self.engine = ready
        self._outbox.reset()
        self.status.came_up()
        self.metrics.engine_came_up(ready)
        self.outlook.engine_up(ready)
        self._ready.set()

    def engine_down(
        self, why: str, *, state: EngineState = EngineState.RESTARTING, retry_after_s: float = DOWN_RETRY_S
    ) -> None:
        """Fail everything in flight, and refuse new requests until the engine, whose process is gone, is back.

        `why` completes "the engine …", such as `was killed by SIGKILL`; `state` says whether it is coming back.
        """
        self._incarnation = None
        self._falls_asleep = False
        self.engine = self.stats = None
        self._outbox.reset()
        self._ready.clear()
        self.load_meter.forget()
        self.status.went_down(why, state, retry_after_s)
        self.metrics.engine_went_down()
        self.storage.engine_gone(self.status.refusal(self.name))
        self.outlook.engine_down()
        self.cache.fail()
        self._fail_all()

    def want(self) -> None:
        """Ask for an engine that is down to be started. Raises `ApiError` 409 if it is not down."""
        if self.state is not EngineState.DOWN:
            raise ApiError(409, f"model '{self.name}' is {self.state}, not down", param="model", code="not_down")
        self._wanted.set()

    async def until_wanted(self) -> None:
        """Wait until `want` or `wake` asks for the engine, which has no process."""
        self._wanted.clear()
        await self._wanted.wait()

    def engine_restarts(self, cause: EndCause) -> None:
        """Note that the engine process is about to be started again, because the one before it ended by `cause`."""
        self.num_restarts += 1
        self.metrics.engine_restarts(cause)

    async def receive(self) -> NoReturn:
        """Handle the engine's messages until cancelled. Raises on a message that makes no sense."""
        while True:
            message = self._decoder.decode(await self._pull.recv())
            await asyncio.sleep(0)  # `recv` does not yield while messages lie ready, and others use this event loop
            match message:
                case StepOutput():
                    if not message.request_ids:
                        await _let_write()
                    self._on_step(message)
                case RequestError():
                    self._on_error(message)
                case CacheReport():
                    self.cache.answered(message)
                case Ready():
                    await self._until_connected()
                    self.engine_up(message)
                case Slept(incarnation=incarnation) if incarnation == self._incarnation:
                    self._falls_asleep = False
                    self.status.fell_asleep()
                case StorageChanged():
                    self.storage.answered(message)
                case Woken(incarnation=incarnation) if incarnation == self._incarnation:
                    self.status.woke_up()
                    self._ready.set()

    async def _until_connected(self) -> None:
        """Wait until messages can reach the engine. Its two sockets connect one by one, so it may be heard first."""
        while not self._push.poll(0, zmq.POLLOUT):
            await asyncio.sleep(0.005)

    def _on_step(self, step: StepOutput) -> None:
        now_s = time.perf_counter()
        self._outbox.taken(step.messages_taken)
        for admitted in step.admitted:
            self._note_admitted(admitted, now_s)
        for part in step.traces or ():
            if sequence := self._in_flight.get(part.request_id):
                sequence.note_step(part)
        self._hand_on_tokens(step, now_s)
        for request_id, pooled in (step.pooled or {}).items():
            if sequence := self._in_flight.get(request_id):
                sequence.note_prompt(self.metrics)
                sequence.generation.output(sequence.index).pooled = pooled
                sequence.generation.end(sequence.index)
                self._forget(request_id, "stop")
                sequence.generation.wake()
        if step.stats is not None and self.engine is not None:  # not the last message of an engine that is gone
            self._observe(step.stats)
        self._refuse_late(now_s)

    def _note_admitted(self, admitted: Admitted, now_s: float) -> None:
        """Note that the engine began a sequence, or that a sequence found more in the cache."""
        sequence = self._in_flight.get(admitted.request_id)
        if sequence is None:
            return
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
        sequence.cached_tokens = admitted.cached_tokens
        sequence.cached_by_tier = admitted.hit_tokens_by_tier()
        sequence.generation.admitted.append((sequence.index, admitted))
        self.outlook.admitted(admitted.request_id, admitted.cached_tokens, now_s)

    def _hand_on_tokens(self, step: StepOutput, now_s: float) -> None:
        """Give each generation its tokens and their log-probabilities, and end the sequences that have finished."""
        for request_id, logprobs in (step.logprobs or {}).items():
            if sequence := self._in_flight.get(request_id):
                sequence.generation.output(sequence.index).logprobs += logprobs
        # Arrays arrive as bytes: two conversions per step, however large the batch.
        request_ids = np.frombuffer(step.request_ids, "<u8").tolist()
        token_ids = np.frombuffer(step.token_ids, "<i4").tolist()
        for request_id, token_id, finish in zip(request_ids, token_ids, step.finish_reasons, strict=True):
            sequence = self._in_flight.get(request_id)
            if sequence is None:  # aborted while the step ran
                continue
            generation = sequence.generation
            if generation.first_step_ended_s is None:
                generation.first_step_ended_s = step.ended_s
            output = generation.output(sequence.index)
            output.token_ids.append(token_id)
            if step.prompt_logprobs and request_id in step.prompt_logprobs:
                output.prompt_logprobs = step.prompt_logprobs[request_id]
            self.outlook.token(request_id, now_s)
            sequence.note_token(now_s, self.metrics)
            if finish:
                output.finish_reason = _FINISH_REASONS[finish]
                generation.end(sequence.index)
                self._forget(request_id, output.finish_reason)
            generation.wake()
        if request_ids:
            self.metrics.count_generated_tokens(len(request_ids))

    def _observe(self, stats: EngineStats) -> None:
        self.stats = stats
        self.metrics.observe_engine(stats)
        self.outlook.observe(stats)
        self.storage.observe(stats.tier)

    def _refuse_late(self, now_s: float) -> None:
        """Refuse the requests that wait for the engine and can no longer meet their targets."""
        for request_id in self.outlook.too_late(now_s):
            sequence = self._in_flight[request_id]
            if sequence.generation.admitted:
                continue  # another of its sequences may have sent a token
            error = self.outlook.refuse_waiting(request_id, now_s)
            self._abort([request_id], "abort")
            sequence.generation.fail(sequence.index, error)

    def _on_error(self, error: RequestError) -> None:
        if sequence := self._in_flight.get(error.request_id):
            self._forget(error.request_id, "error")
            failure = ApiError(error.status, error.message, code=error.code, retry_after_s=error.retry_after_s)
            sequence.generation.fail(sequence.index, failure)

    def _abort(self, request_ids: Sequence[int], reason: str) -> None:
        known = [request_id for request_id in request_ids if request_id in self._in_flight]
        for request_id in known:
            self._forget(request_id, reason)
        self._end_in_engine(known)

    def _end_in_engine(self, request_ids: Sequence[int]) -> None:
        if request_ids and self.engine is not None:
            self._outbox.abort(request_ids)
        if self.num_in_flight:  # aborts that wait to be sent count
            self._idle.clear()

    def _forget(self, request_id: int, reason: str) -> None:
        sequence = self._in_flight.pop(request_id)
        now_s = time.perf_counter()
        self.outlook.ended(request_id, now_s)
        finished = sequence.finished(reason, now_s)
        self.metrics.observe_finished(finished)
        sequence.generation.finished.append(finished)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_in_flight:
            self._idle.set()

    def _fail_all(self) -> list[int]:
        """Fail everything in flight; return its ids."""
        error = self.status.refusal(self.name)
        failed = list(self._in_flight.items())
        for request_id, sequence in failed:
            self._forget(request_id, "error")
            sequence.generation.fail(sequence.index, error)
        return [request_id for request_id, _ in failed]


async def _let_write() -> None:
    """Let the event loop write the tokens handed on so far. Figures can wait; taking them in may take a millisecond."""
    for _ in range(_ROUNDS_TO_WRITE):
        await asyncio.sleep(0)
