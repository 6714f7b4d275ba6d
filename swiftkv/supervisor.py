"""One engine process: started, watched, started again within bounds when it dies, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from swiftkv.config import RestartConfig
from swiftkv.engine.messages import EXIT_LOAD_FAILED, EngineConfig, Ready
from swiftkv.errors import EngineError
from swiftkv.server.client import EngineClient
from swiftkv.server.errors import ApiError

_STOP_TIMEOUT_S = 10.0


class EngineSupervisor:
    """Owns the process; tells `client` when it is gone. The engine itself tells the client when it serves.

    The engine's standard input is its life line: it stays open as long as this process lives, and ends with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        restart: RestartConfig,
        say: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:
        """`environment` is all that the engine inherits of this process's."""
        self._config = config
        self._environment = environment
        self._client = client
        self._restart = restart
        self._say = say
        self._restarts_s: deque[float] = deque()  # when, on the monotonic clock, within the window
        self._process: Process | None = None

    async def start(self) -> Ready:
        """Start the process and wait until it serves. Raises `EngineError` if it ends before."""
        command = [sys.executable, "-m", "swiftkv.engine.main", self._config.name]  # the name is for those who run ps
        # A session of its own: Ctrl-C in a terminal is for the node, which then stops its engines in order.
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=sys.stderr, start_new_session=True, env=self._environment
            )
        except OSError as error:  # no memory or no process to be had
            raise EngineError(f"{self._config.name}: the engine cannot be started: {error.strerror}") from None
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already, which waiting for it shows
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            await process.stdin.drain()
        ready = asyncio.create_task(self._client.wait_ready())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
        finally:
            ready.cancel()
            ended.cancel()
        raise EngineError(f"{self._config.name}: the engine {_how(process)} before it served; its last words are above")

    async def keep_running(self) -> None:
        """Start the engine again whenever it dies, until that happens too often or cannot help."""
        while True:
            process = self._process
            assert process is not None
            await process.wait()
            delay_s = self._next_delay_s(process)
            if delay_s is None:
                self._client.engine_down("is down and is not started again", pid=process.pid)
                self._say(f"{self._config.name}: the engine {_how(process)}; it stays down")
                return
            self._client.engine_down(retry_after_s=max(1.0, delay_s), pid=process.pid)
            self._say(
                f"{self._config.name}: the engine {_how(process)}; starting it again in {delay_s:g} s "
                f"(restart {len(self._restarts_s)} of {self._restart.limit} in {self._restart.window:g} s)"
            )
            await asyncio.sleep(delay_s)
            with contextlib.suppress(EngineError):  # the next round deals with its end
                ready = await self.start()
                self._say(f"{self._config.name}: serves again (process {ready.pid})")

    def set_lending_budget(self, budget_bytes: int) -> None:
        """With what budget an engine that lends is started from now on."""
        assert self._config.lending is not None
        lending = msgspec.structs.replace(self._config.lending, budget_bytes=budget_bytes)
        self._config = msgspec.structs.replace(self._config, lending=lending)

    async def stop(self) -> None:
        """End the process: politely, then by its life line, then by force. Returns once it is gone."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        if self._client.engine is None:  # it does not listen yet
            process.stdin.close()
        with contextlib.suppress(ApiError):  # its queue is full
            self._client.shutdown_engine()
        for push in (process.stdin.close, process.kill):
            if await _ended_within(process, _STOP_TIMEOUT_S / 2):
                return
            push()
        await process.wait()

    def _next_delay_s(self, process: Process) -> float | None:
        """Seconds to wait before the next start, or None if there is none to be."""
        now_s = time.monotonic()
        while self._restarts_s and self._restarts_s[0] < now_s - self._restart.window:
            self._restarts_s.popleft()
        if process.returncode == EXIT_LOAD_FAILED or len(self._restarts_s) >= self._restart.limit:
            return None
        delay_s = self._restart.backoff * 2 ** len(self._restarts_s)
        self._restarts_s.append(now_s)
        return float(delay_s)


async def _ended_within(process: Process, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


def _how(process: Process) -> str:
    code = process.returncode
    assert code is not None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
