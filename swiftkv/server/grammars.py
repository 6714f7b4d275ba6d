"""Checks grammars before engines get them, in a process that may die of one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from swiftkv.grammars import GrammarSource, Verdict
from swiftkv.server.child import Child, ChildEndedError
from swiftkv.server.errors import ApiError

logger = logging.getLogger(__name__)

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the field of the request that has it."""

    field: str
    source: GrammarSource


class GrammarChecker:
    """Checks one grammar at a time and remembers the verdicts. Use it from one event loop."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # in order of last use
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}
        self._child = Child("swiftkv.server.grammar_child", "grammars wait to be checked")
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    async def check(self, asked: AskedGrammar) -> str:
        """Return the grammar as engines take it.

        Raises:
            ApiError: 400 that names the field and says why, 429 if too many others wait, 503 if it cannot be checked
                now.
        """
        verdict = await self._verdict(asked.source)
        if verdict.grammar is None:
            message = f"field '{asked.field}': {verdict.why}"
            raise ApiError(400, message, param=asked.field, code="invalid_grammar")
        return verdict.grammar

    async def close(self) -> None:
        """End the process."""
        checks = list(self._running.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await self._child.close()

    async def _verdict(self, source: GrammarSource) -> Verdict:
        key = hashlib.sha256(msgspec.msgpack.encode(source)).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._check(source))
            task.add_done_callback(lambda done: self._checked(key, done))
        return await asyncio.shield(task)

    def _checked(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._verdicts[key] = task.result()
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)

    async def _check(self, source: GrammarSource) -> Verdict:
        try:
            return self._decoder.decode(await self._child.ask(msgspec.msgpack.encode(source)))
        except ChildEndedError as ended:
            logger.warning("the process that checks grammars %s", ended)
            return Verdict(why=f"it takes more memory or time to compile than is allowed: the check {ended}")
