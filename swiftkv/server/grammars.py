"""Has grammars checked before an engine hears of them, in a process that may die of one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from swiftkv.grammars import GrammarSource, Verdict
from swiftkv.processes import how_it_ended
from swiftkv.server.errors import ApiError

logger = logging.getLogger(__name__)

CHECK_CPU_S = 2
"""Processor time that one check may take."""
HEADER_BYTES = 4
"""Each message to the process and from it begins with its length."""

_CHECK_S = 20.0  # the process may have to start first, and others may have the processors
_REMEMBERED = 256
_MAX_WAITING = 64
_BUSY_RETRY_S = 1.0
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the field of the request that has it."""

    field: str
    source: GrammarSource


class GrammarChecker:
    """Checks one grammar at a time and remembers the verdicts. Use it from one event loop.

    The process starts with the first grammar, and again after one that ended it.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # the one that was asked for last is the last
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    async def check(self, asked: AskedGrammar) -> str:
        """Return the grammar as engines take it.

        Raises:
            ApiError: 400 that names the field and says why, 429 if too many others wait, 503 if nobody can check it.
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
        await self._end_process()

    async def _verdict(self, source: GrammarSource) -> Verdict:
        key = hashlib.sha256(msgspec.msgpack.encode(source)).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= _MAX_WAITING:
                raise ApiError(
                    429, "too many grammars wait to be checked", code="queue_full", retry_after_s=_BUSY_RETRY_S
                )
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
        message = msgspec.msgpack.encode(source)
        async with self._turn:
            try:
                async with asyncio.timeout(_CHECK_S):
                    return self._decoder.decode(await self._ask(message))
            except TimeoutError:  # the machine is busy: the process would have ended itself
                await self._end_process()
                raise ApiError(
                    503, "grammars cannot be checked at the moment", code="busy", retry_after_s=_BUSY_RETRY_S
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                process = self._process
                assert process is not None
                ended = how_it_ended(await process.wait())
                self._process = None
                logger.warning("the process that checks grammars %s", ended)
                return Verdict(why=f"takes more memory or time to compile than it may: the check {ended}")

    async def _ask(self, message: bytes) -> bytes:
        """Raises `IncompleteReadError` or `ConnectionError` if the process ends."""
        process = self._process or await self._start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(message).to_bytes(HEADER_BYTES, "little") + message)
        await process.stdin.drain()
        header = await process.stdout.readexactly(HEADER_BYTES)
        return await process.stdout.readexactly(int.from_bytes(header, "little"))

    async def _start_process(self) -> Process:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}  # no keys
        command = (sys.executable, "-m", "swiftkv.server.grammar_child")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
