"""Runs the lines of batches in the room that clients' requests leave, as requests of the lowest priority."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar
from uuid import uuid4

from swiftkv.engine.messages import NO_KV_CACHE
from swiftkv.server.batches.checking import InputCheck
from swiftkv.server.batches.lines import answered, parse_line, refused
from swiftkv.server.batches.objects import OfflineBatch, Status, now_s
from swiftkv.server.batches.room import Load, Room
from swiftkv.server.batches.storage import Storage
from swiftkv.server.batches.store import Store, TakenLine
from swiftkv.server.choices import deltas
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import Generation
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.prepare import begin, check, prepare
from swiftkv.server.threads import BoundedThreads

T = TypeVar("T")

_POLL_S = 0.1  # while lines wait for room, which comes without notice
_PASSING_STATUSES = (429, 503)  # the engine is down, or has too much to do
_PASSING_RETRY_S = 1.0
_MAX_ENGINE_DEATHS = 3  # after this many while a line ran, it counts as their cause
_STORAGE_RETRY_S = 1.0
_TELL_S = 60.0  # between two lines in the log about a disk that fails
_MAX_TAKEN = 16

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Running:
    """A line that is being answered."""

    line: TakenLine
    task: asyncio.Task[None] | None = None
    generation: Generation | None = None
    num_sequences: int = 1
    has_token: bool = False

    @property
    def num_in_engine(self) -> int:
        return 0 if self.generation is None else self.generation.num_unfinished


@dataclass(frozen=True, slots=True)
class _Result:
    text: bytes
    has_failed: bool


class BatchRunner:
    """The one task that moves batches on. `run` it until it is cancelled."""

    def __init__(
        self, storage: Storage, models: ModelTable, rooms: Mapping[str, Room], metrics: GatewayMetrics
    ) -> None:
        """`rooms` has the size of each model."""
        self._storage = storage
        self._models = models
        self._rooms = rooms
        self._metrics = metrics
        self._parsing = BoundedThreads("the parsing of batch lines", workers=1)
        self._running: dict[tuple[int, int], _Running] = {}
        self._checks: dict[int, InputCheck] = {}
        self._engine_deaths: dict[tuple[int, int], int] = {}
        self._retry_at_s: dict[str, float] = {}
        self._may_have_strangers = True
        self._names = models.names  # as of the last look for strangers
        self._tell_at_s = 0.0

    async def run(self) -> NoReturn:
        """Work on batches until cancelled. Unfinished lines run again when the node is next started."""
        try:
            while True:
                self._storage.changed.clear()
                delay_s = await self._round()
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._storage.changed.wait()
        finally:
            await self._abandon(list(self._running.values()))

    async def _round(self) -> float | None:
        """Move batches on; return the seconds until there may be more to do, `None` if only a change can bring more."""
        for model in self._models.all():
            self._metrics.batch_sequences.labels(model.name).set(
                sum(running.num_in_engine for running in self._lines_of(model))
            )
        try:
            active = await self._storage.call(Store.active_batches)
            delays_s = [await self._move_on(number, batch) for number, batch in active]
            if any(batch.status == "in_progress" for _, batch in active):
                await self._start_lines()
            return min(delays_s, default=None)
        except ApiError as error:
            self._checks.clear()
            self._tell(error)
            return _STORAGE_RETRY_S

    async def _move_on(self, number: int, batch: OfflineBatch) -> float:
        """Take a batch as far as it gets now; return the seconds until it may get further on its own."""
        left_s = batch.expires_at - now_s()
        if batch.status in ("validating", "in_progress") and left_s <= 0:
            return await self._end(number, "expired")
        match batch.status:
            case "validating":
                return await self._check_input(number, batch)
            case "cancelling":
                return await self._end(number, "cancelled")
            case "finalizing":  # it was interrupted
                return await self._end(number, "completed")
        counts = batch.request_counts
        num_running = sum(running.line.batch == number for running in self._running.values())
        num_left = counts.total - counts.completed - counts.failed
        if not num_left and not num_running:
            return await self._end(number, "completed")
        return _POLL_S if num_left > num_running else left_s

    async def _check_input(self, number: int, batch: OfflineBatch) -> float:
        if number not in self._checks:
            self._checks[number] = InputCheck(number, batch, self._storage.limits, self._models.own_names())
        if await self._storage.call(self._checks[number].go_on):
            del self._checks[number]
            self._may_have_strangers = True
        return 0.0

    async def _end(self, number: int, status: Status) -> float:
        self._checks.pop(number, None)
        await self._abandon([running for running in self._running.values() if running.line.batch == number])
        for file in await self._storage.call(lambda store: store.finish(number, status)):
            self._storage.note(file.bytes)
        return 0.0

    async def _start_lines(self) -> None:
        for model in self._models.all():
            num_lines = min(self._room_for(model), _MAX_TAKEN)
            if num_lines:
                self._start(await self._take((model.name,), True, num_lines))
        # Lines for models that this node does not serve: each gets its error.
        if self._may_have_strangers or self._names != self._models.names:
            self._names = self._models.names
            strangers = await self._take(tuple(self._models.names), False, _MAX_TAKEN)
            self._may_have_strangers = bool(strangers)
            self._start(strangers)

    async def _take(self, models: tuple[str, ...], is_among: bool, limit: int) -> list[TakenLine]:
        return await self._storage.call(lambda store: store.take(models, is_among, limit))

    def _room_for(self, model: ModelHandle) -> int:
        """Return how many more lines of a model may begin."""
        client = model.client
        if not client.state.serves or time.monotonic() < self._retry_at_s.get(model.name, 0.0):
            return 0
        lines = self._lines_of(model)
        stats = client.stats
        load = Load(
            waiting=client.num_waiting,
            online=client.num_in_flight - sum(running.num_in_engine for running in lines),
            offline=sum(running.num_sequences for running in lines),
            beginning=sum(not running.has_token for running in lines),
            kv_usage=0.0 if stats is None else stats.num_used_blocks / max(1, stats.num_blocks),
        )
        return self._rooms[model.name].num_lines(load)

    def _lines_of(self, model: ModelHandle) -> list[_Running]:
        return [running for running in self._running.values() if running.line.model == model.name]

    def _start(self, lines: list[TakenLine]) -> None:
        for line in lines:
            running = _Running(line)
            self._running[line.batch, line.number] = running
            running.task = asyncio.create_task(self._run(running), name="a line of a batch")

    async def _abandon(self, lines: list[_Running]) -> None:
        """End lines without a result."""
        tasks = [running.task for running in lines if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in lines:  # a task that is cancelled before it begins does not clean up
            self._forget(running.line)

    def _forget(self, line: TakenLine) -> None:
        self._running.pop((line.batch, line.number), None)

    async def _run(self, running: _Running) -> None:
        line = running.line
        try:
            [outcome] = await asyncio.gather(self._result(running), return_exceptions=True)
            if isinstance(outcome, BaseException):
                logger.error("a line of a batch failed because of a defect in swiftkv", exc_info=outcome)
                error = ApiError(500, "internal error: see the server's log")
                outcome = _Result(refused(line.custom_id, error), has_failed=True)
            if outcome is None:
                await self._write(lambda store: store.put_back(line))
            else:
                result = outcome
                self._engine_deaths.pop((line.batch, line.number), None)
                await self._write(lambda store: store.keep(line, result.text, has_failed=result.has_failed))
            self._count(line, outcome)
        finally:
            self._forget(line)
            self._storage.changed.set()

    async def _result(self, running: _Running) -> _Result | None:
        """Return the result of a line, or `None` if it is to run again."""
        try:
            return _Result(await self._answer(running), has_failed=False)
        except ApiError as error:
            if error.status in _PASSING_STATUSES and self._may_run_again(running, error):
                return None
            return _Result(refused(running.line.custom_id, error), has_failed=True)

    def _may_run_again(self, running: _Running, error: ApiError) -> bool:
        """Note that a line was refused, and return whether it may run again.

        It may not if its model is gone, or if engines died too often while it ran.
        """
        line = running.line
        # Other lines may need less memory than one for which not enough was lent.
        retry_s = 0.0 if error.code == NO_KV_CACHE else error.retry_after_s
        self._retry_at_s[line.model] = time.monotonic() + max(retry_s, _PASSING_RETRY_S)
        if line.model not in self._models.names:  # it was removed
            return False
        status = self._models.get(line.model).client.status
        if running.generation is not None and not status.state.is_there and not status.rests:
            key = line.batch, line.number
            self._engine_deaths[key] = self._engine_deaths.get(key, 0) + 1
            return self._engine_deaths[key] < _MAX_ENGINE_DEATHS
        return True

    async def _answer(self, running: _Running) -> bytes:
        """Send a line to its engine as if a client had sent its body; return the line of the output file."""
        line = running.line
        text = await self._storage.call(lambda store: store.text(line))
        body = await self._parsing.run(lambda: parse_line(text), len(text))
        model = self._models.pick(None, body.model)
        check(model, body)
        prepared = await prepare(model, body, len(text))
        running.num_sequences = len(prepared.sequences)
        answer = begin(model, body, prepared, uuid4().hex)
        running.generation = answer.generation
        with answer.generation:
            async for batch in deltas(answer.generation, answer.choices):
                running.has_token = True
                answer.add(batch)
        return await asyncio.to_thread(lambda: answered(line.custom_id, answer.whole()))

    async def _write(self, work: Callable[[Store], T]) -> T:
        """Write to the store, and try again for as long as that fails."""
        while True:
            try:
                return await self._storage.call(work)
            except ApiError as error:
                self._tell(error)
                await asyncio.sleep(_STORAGE_RETRY_S)

    def _tell(self, error: ApiError) -> None:
        if time.monotonic() >= self._tell_at_s:
            self._tell_at_s = time.monotonic() + _TELL_S
            logger.warning("batches wait: %s", error.message)

    def _count(self, line: TakenLine, result: _Result | None) -> None:
        if line.model in self._rooms:
            outcome = "again" if result is None else "failed" if result.has_failed else "completed"
            self._metrics.batch_lines.labels(line.model, outcome).inc()
