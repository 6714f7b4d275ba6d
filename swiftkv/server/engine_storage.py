"""The storage of one engine as the gateway knows it, and the changes that it asks the engine for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from swiftkv.engine.messages import AttachStorage, DetachStorage, StorageChanged
from swiftkv.server.errors import ApiError
from swiftkv.server.pending import PendingCalls
from swiftkv.tier.messages import TierSpec, TierStats

_TIMEOUT_S = 120.0
"""The time for one change: opening storage reads the weights, for their fingerprint."""


class EngineStorage:
    """Attaches storage to an engine that runs, and detaches it.

    `send` gives a message to the engine, and raises `ApiError` 503 if the engine takes none.
    """

    def __init__(self, send: Callable[[AttachStorage | DetachStorage], None]) -> None:
        self.backend: str | None = None
        """The name of the backend; `None`: there is none, or nothing is known yet."""
        self.is_degraded = False
        self._send = send
        self._changes: PendingCalls[str | None] = PendingCalls()

    @property
    def state(self) -> Literal["ok", "degraded"] | None:
        """The state of the storage; `None` where there is none."""
        if self.backend is None:
            return None
        return "degraded" if self.is_degraded else "ok"

    async def attach(self, storage: TierSpec) -> None:
        """Attach storage; return once it is in use. Raises `ApiError`: 409 if it is refused, 503 without an answer."""
        await self._change(lambda change_id: AttachStorage(change_id, storage))

    async def detach(self) -> None:
        """Detach the storage; return once the engine has let go of it. Raises `ApiError` as `attach` does."""
        await self._change(DetachStorage)

    def observe(self, stats: TierStats | None) -> None:
        """Take over what the engine reports."""
        self.backend = None if stats is None else stats.backend
        self.is_degraded = stats is not None and stats.is_degraded

    def answered(self, answer: StorageChanged) -> None:
        """Hand an answer to the change that waits for it."""
        self._changes.answered(answer.change_id, answer.why_not)

    def engine_gone(self, refusal: ApiError) -> None:
        """Fail the changes that wait for an engine whose process has ended."""
        self.observe(None)
        self._changes.fail(refusal)

    async def _change(self, message: Callable[[int], AttachStorage | DetachStorage]) -> None:
        with self._changes.new() as (change_id, answer):
            self._send(message(change_id))
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    why_not = await answer
            except TimeoutError:
                raise ApiError(
                    503,
                    f"the engine has not changed its storage within {_TIMEOUT_S:g} s, but may still do so: "
                    "see GET /admin/storage",
                    code="engine_unavailable",
                ) from None
        if why_not is not None:
            raise ApiError(409, why_not, code="storage_refused")
