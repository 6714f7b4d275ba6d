"""Puts a model to sleep, and wakes it: when a user asks for that, or for a request if the model has `auto_wake`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

from swiftkv.errors import ConfigError
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.lending import NodeLending

_BUSY_RETRY_S = 1.0


class SleepLevel(IntEnum):
    """The levels of a model's sleep, numbered as clients name them."""

    WITHOUT_WEIGHTS = 1
    """The engine keeps its process, its pool, all of which it may lend, and what it has borrowed itself."""
    WITHOUT_PROCESS = 2
    """All that it lends is recalled, and its process ends."""


class Sleeper:
    """The sleep of one model."""

    def __init__(
        self,
        client: EngineClient,
        lending: NodeLending,
        end_engine: Callable[[], Awaitable[None]],
        *,
        give_way_s: Callable[[], float] = float,
        check_room: Callable[[], None] = lambda: None,
        can_stay: bool = True,
    ) -> None:
        """`end_engine` ends the process, and returns when it is gone.

        `can_stay`: whether the process can go on while the model sleeps.
        `give_way_s` returns how long the loading of the model, when it wakes, gives way to the work of others.
        `check_room` raises `ConfigError` if there is no memory for it beside what the others hold.
        """
        self._client = client
        self._lending = lending
        self._end_engine = end_engine
        self._give_way_s = give_way_s
        self._check_room = check_room
        self._can_stay = can_stay
        self._changing = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._num_waiting = 0  # requests

    async def sleep(self, level: SleepLevel, timeout_s: float, *, now: bool = False) -> None:
        """Put the model to sleep, once requests in flight have ended.

        If they have not within `timeout_s`, the model stays awake; with `now` they are aborted at once. The process
        of a model that sleeps can still be ended; otherwise a model that sleeps stays as it is.

        Raises:
            ApiError: 409 for a model that takes no requests, is just falling asleep or waking, or has requests in
                flight for too long; 400 for a level that it does not have.
        """
        name, status = self._client.name, self._client.status
        if level is SleepLevel.WITHOUT_WEIGHTS and not self._can_stay:
            raise ApiError(400, f"model '{name}' has several ranks, and sleeps at level 2 only", param="level")
        if self._changing.locked():
            raise self._refused(f"is {status.state}; try again later", retry_after_s=_BUSY_RETRY_S)
        async with self._changing:
            if status.state is EngineState.ASLEEP:
                if level is SleepLevel.WITHOUT_PROCESS:
                    await self._end()
                return
            if not status.go_to_sleep():
                raise self._refused(f"is {status.state}; only a model that serves can be put to sleep")
            try:
                await self._empty(timeout_s, now)
                if level is SleepLevel.WITHOUT_WEIGHTS:
                    self._client.sleep_engine()
                else:
                    await self._end()
            except (ApiError, asyncio.CancelledError):
                status.stay_awake()
                raise
            await status.until_not(EngineState.SLEEPING)
            if level is SleepLevel.WITHOUT_WEIGHTS:
                await self._lending.lend_all(name)

    async def wake(self) -> None:
        """Wake the model if it is asleep, and return when it serves. One task wakes it for all callers.

        Raises:
            ApiError: 503 if it does not serve, or there is no memory for it.
        """
        await self._until_woken()
        self._client.check_available()

    async def wake_for_request(self) -> None:
        """Wake the model for one of the requests that wait for it. It may be asleep again when this returns.

        Raises:
            ApiError: 429 if as many wait as the model may have in flight, else as `wake`.
        """
        client = self._client
        if self._num_waiting >= client.max_in_flight:
            client.metrics.count_refused("max_num_queued_reqs")
            message = f"model '{client.name}' is waking up, and {self._num_waiting} requests wait for it already"
            raise ApiError(429, message, code="queue_full", retry_after_s=client.status.retry_after_s)
        self._num_waiting += 1
        try:
            await self._until_woken()
        finally:
            self._num_waiting -= 1
        if not client.status.rests:
            client.check_available()

    async def _until_woken(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake(), name=f"wake {self._client.name}")
            self._waking.add_done_callback(self._woken)
        await asyncio.shield(self._waking)

    async def _wake(self) -> None:
        async with self._changing:
            status = self._client.status
            if status.state is EngineState.ASLEEP:
                try:
                    self._check_room()
                except ConfigError as error:
                    message = f"model '{self._client.name}' stays asleep: {error}"
                    raise ApiError(503, message, param="model", code="no_room") from None
                self._client.wake(self._give_way_s())
                self._restoring = asyncio.create_task(self._lending.lend_as_before(self._client.name))
            await status.until_not(EngineState.WAKING)

    def _woken(self, waking: asyncio.Task[None]) -> None:
        if self._waking is waking:
            self._waking = None

    async def _empty(self, timeout_s: float, now: bool) -> None:
        """Wait until nothing is in flight; with `now`, abort it. Raises `ApiError` 409 if it takes too long."""
        if now:
            self._client.abort_all()
            timeout_s = max(timeout_s, 1.0)
        if not await self._client.until_idle(timeout_s):
            raise self._refused(
                f"has {self._client.num_in_flight} sequences in flight after {timeout_s:g} s, so it stays awake; wait "
                "longer, or abort them with now=true (swiftkv models sleep --now)",
                code="in_flight",
                retry_after_s=_BUSY_RETRY_S,
            )

    async def _end(self) -> None:
        """Recall what is lent, and end the process."""
        await self._lending.recall_all(self._client.name)
        await self._end_engine()

    def _refused(self, reason: str, *, code: str = "not_ready", retry_after_s: float = 0) -> ApiError:
        message = f"model '{self._client.name}' {reason}"
        return ApiError(409, message, param="model", code=code, retry_after_s=retry_after_s)
