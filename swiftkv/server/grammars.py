"""Checks grammars before engines get them, in a process that may die of one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec

from swiftkv.grammars import GrammarSource, Verdict
from swiftkv.server.child import Child, ChildEndedError
from swiftkv.server.errors import ApiError
from swiftkv.server.tenants import Sender

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
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._child = Child("swiftkv.server.grammar_child", "the check of their grammars")
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    async def check(self, asked: AskedGrammar, sender: Sender) -> str:
        """Return the grammar as engines take it.

        Raises:
            ApiError: 400 that names the field and says why, 429 if too many of the sender's grammars wait, 503 if it
                cannot be checked now.
        """
        verdict = await self._verdict(asked.source, sender)
        if verdict.grammar is None:
            message = f"field '{asked.field}': {verdict.why}"
            raise ApiError(400, message, param=asked.field, code="invalid_grammar")
        return verdict.grammar

    async def close(self) -> None:
        """End the process."""
        await self._child.close()

    async def _verdict(self, source: GrammarSource, sender: Sender) -> Verdict:
        message = msgspec.msgpack.encode(source)
        key = hashlib.sha256(message).digest()
        async with self._locks.setdefault(key, asyncio.Lock()):  # those that wait here find the first one's verdict
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = await self._check(message, sender)
                if len(self._verdicts) > _REMEMBERED:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(key)
            return verdict

    async def _check(self, message: bytes, sender: Sender) -> Verdict:
        try:
            return self._decoder.decode(await self._child.ask(message, sender))
        except ChildEndedError as ended:
            logger.warning("the process that checks grammars %s", ended)
            return Verdict(why=f"it takes more memory or time to compile than is allowed: the check {ended}")
