"""Calls to an engine about its cache, and the ids that its latest requests have in the engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from swiftkv.engine.messages import CacheCall, CacheCommand, CacheReport, Pin, PinPrompt, Unpin
from swiftkv.server.errors import ApiError
from swiftkv.server.pending import PendingCalls

_PATIENCE_S = 60.0
_MAX_REMEMBERED = 4096


class CacheCalls:
    """The calls to one engine that wait for an answer, and the ids that its latest requests have in the engine."""

    def __init__(self, send: Callable[[CacheCall], bool], refusal: Callable[[], ApiError]) -> None:
        """`send` returns whether the message was sent; `refusal` makes the error if it was not."""
        self._send = send
        self._refusal = refusal
        self._calls: PendingCalls[CacheReport] = PendingCalls()
        self._remembered: OrderedDict[str, range] = OrderedDict()

    def remember(self, request_id: str, in_engine: range) -> None:
        """Note the ids of a request's sequences in the engine."""
        self._remembered[request_id] = in_engine
        self._remembered.move_to_end(request_id)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    async def explain(self, request_id: str) -> CacheReport | None:
        """Ask why a request found no more of its prompt in the cache; `None` if the engine had no such request lately.

        Raises:
            ApiError: 503 if the engine is down or does not answer.
        """
        in_engine = self._remembered.get(request_id)
        return None if in_engine is None else await self._ask(lambda call: CacheCommand(call, list(in_engine)))

    async def clear(self) -> CacheReport:
        """Have the engine forget every cached block that no running request holds.

        Raises:
            ApiError: 503 if the engine is down or does not answer.
        """
        return await self._ask(lambda call: CacheCommand(call, clear=True))

    async def pin(self, request_id: str, ttl_s: float) -> CacheReport | None:
        """Have the engine pin the prompt of a request; `None` if it had no such request lately.

        Raises:
            ApiError: 503 if the engine is down or does not answer.
        """
        in_engine = self._remembered.get(request_id)
        return None if in_engine is None else await self._ask(lambda call: Pin(call, list(in_engine), ttl_s))

    async def pin_prompt(self, token_ids: Sequence[int], cache_salt: str, ttl_s: float) -> CacheReport:
        """Have the engine pin the cached part of a prompt.

        Raises:
            ApiError: 503 if the engine is down or does not answer.
        """
        prompt = np.array(token_ids, np.int32).tobytes()
        return await self._ask(lambda call: PinPrompt(call, prompt, cache_salt, ttl_s))

    async def unpin(self, pin_id: int) -> CacheReport:
        """Have the engine end a pin.

        Raises:
            ApiError: 503 if the engine is down or does not answer.
        """
        return await self._ask(lambda call: Unpin(call, pin_id))

    def answered(self, report: CacheReport) -> None:
        """Hand an answer to the call that waits for it."""
        self._calls.answered(report.call, report)

    def fail(self) -> None:
        """End all calls: the engine is gone."""
        self._calls.fail(self._refusal())

    async def _ask(self, message: Callable[[int], CacheCall]) -> CacheReport:
        with self._calls.new() as (call, answer):
            if not self._send(message(call)):
                raise self._refusal()
            try:
                return await asyncio.wait_for(answer, _PATIENCE_S)
            except TimeoutError:
                raise ApiError(503, "the engine did not answer in time", code="busy") from None
