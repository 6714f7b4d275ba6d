"""The supervisor of one engine process: starts it, watches it, restarts it within bounds when it ends, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from swiftkv.background import PATIENCE_VARIABLE
from swiftkv.engine.messages import EXIT_LOAD_FAILED, EXIT_NO_ROOM, EngineConfig, Ready
from swiftkv.errors import EngineError
from swiftkv.lease.messages import LendingSpec
from swiftkv.node_config import NodeConfig
from swiftkv.processes import how_it_ended, kill_child, module_command
from swiftkv.progress import ProgressPage
from swiftkv.restarts import Restarts
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EndCause, EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.lending import CoordinatorClient
from swiftkv.tier.messages import TierSpec
from swiftkv.watch import EngineWatch

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an engine process. `cause` is for metrics; `how` completes "the engine …"."""

    cause: EndCause
    how: str
    can_restart: bool = True


class EngineSupervisor:
    """Owns the process and everything that depends on it; reports its starts, its states and its end to `client`.

    The engine itself tells the client when it serves. Its standard input stays open as long as this process lives, and
    the engine ends with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        coordinator: CoordinatorClient | None,
        *,
        node: NodeConfig,
        say: Callable[[str], None],
        environment: Mapping[str, str],
        step_time_s: Callable[[], list[float]] = list,
        give_way_s: Callable[[], float] = float,
    ) -> None:
        """`environment` is the part of this process's environment that the engine inherits.

        `step_time_s` returns the step times that engines of this model have learnt; `give_way_s` the seconds for which
        the load of an engine that is added or wakes gives way to other work.
        """
        self.lenders: list[EngineSupervisor] = []
        """The supervisors of the engines that this one borrows from."""
        self._config = config
        self._environment = environment
        self._client = client
        self._coordinator = coordinator
        self._node = node
        self._say = say
        self._step_time_s = step_time_s
        self._give_way_s = give_way_s
        self._restarts = Restarts(node.restart)
        self._process: Process | None = None
        self._watch: EngineWatch | None = None
        self._life: asyncio.Task[_End] | None = None
        self._at_rest = asyncio.Event()  # there is no process, and `keep_running` waits until one is wanted

    @property
    def is_unresponsive(self) -> bool:
        """Whether other engines may be waiting for this one in vain."""
        return self._watch is not None and self._watch.is_unresponsive

    @property
    def has_process(self) -> bool:
        """Whether there is a process, or one that has not quite ended."""
        return self._life is not None and not self._life.done()

    async def start(self) -> Ready:
        """Start the process, and wait until its model is loaded and it takes requests. Raises `EngineError`."""
        return await self._start(0.0)

    async def start_behind_others(self) -> Ready:
        """Do as `start` does, but give way to other models meanwhile."""
        return await self._start(self._give_way_s())

    async def _start(self, give_way_s: float) -> Ready:
        """Start the process, and wait for it.

        Raises `EngineError` if the process ends before that, or is ended because it took longer than `load_timeout`.
        """
        life = await self._spawn(give_way_s)
        ready = asyncio.create_task(self._client.wait_ready())
        try:
            await asyncio.wait({ready, life}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._config = msgspec.structs.replace(self._config, has_served=True)
                return ready.result()
        finally:
            ready.cancel()
        how = life.result().how
        raise EngineError(f"{self._config.name}: the engine {how} before it was ready; its own message is above")

    async def keep_running(self, prepare: Callable[[], Awaitable[None]], clean_up: Callable[[], None]) -> None:
        """Start the engine again whenever it ends, until the node stops.

        `clean_up` is called once the process is gone. `prepare` is called before each start; if it raises
        `EngineError`, that start has failed.
        """
        while True:
            assert self._life is not None
            await asyncio.wait({self._life})  # cancelling this wait does not cancel the task
            end = self._life.result()
            clean_up()
            if self._client.status.is_draining:
                self._client.engine_down(end.how, state=EngineState.DOWN)
                return
            start = self.start
            if self._client.status.rests:
                await self._rest(end)
                start = self.start_behind_others
            else:
                await self._recover(end)
            with contextlib.suppress(EngineError):  # the next round deals with its end
                await prepare()
                ready = await start()
                self._say(f"{self._config.name}: serves again (process {ready.pid})")

    async def _rest(self, end: _End) -> None:
        """Wait until the model, which now sleeps without a process, is woken."""
        self._client.engine_down(end.how)
        self._at_rest.set()
        await self._client.until_wanted()
        self._at_rest.clear()

    async def _recover(self, end: _End) -> None:
        """Wait until the engine, which ended unexpectedly, is to be started again."""
        delay_s = self._restarts.next_delay_s(time.monotonic()) if end.can_restart else None
        if delay_s is None:
            await self._stay_down(end)
        else:
            await self._back_off(end, delay_s)
        self._client.engine_restarts(end.cause)

    async def _back_off(self, end: _End, delay_s: float) -> None:
        self._client.engine_down(end.how, retry_after_s=max(1.0, delay_s))
        self._say(
            f"{self._config.name}: the engine {end.how}; starting it again in {delay_s:g} s "
            f"(restart {len(self._restarts)} of {self._node.restart.limit} in {self._node.restart.window:g} s)"
        )
        await asyncio.sleep(delay_s)

    async def _stay_down(self, end: _End) -> None:
        """Wait until somebody asks for the engine, which ended too often, or which another start could not help."""
        name = self._config.name
        self._client.engine_down(end.how, state=EngineState.DOWN)
        self._say(f"{name}: the engine {end.how}; it stays down until you start it: swiftkv models start {name}")
        await self._client.until_wanted()
        self._restarts.forget()
        self._client.engine_down(end.how)

    async def put_to_rest(self) -> None:
        """End the process of a model that sleeps or falls asleep. Return once the model can be woken or is given up."""
        await self.stop()
        at_rest = asyncio.create_task(self._at_rest.wait())
        given_up = asyncio.create_task(self._client.status.until(()))  # then `keep_running` may have ended
        try:
            await asyncio.wait({at_rest, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            at_rest.cancel()
            given_up.cancel()

    def meet(self, lending: LendingSpec) -> None:
        """Set the peers of engines that are started from now on; the budget stays."""
        lending = msgspec.structs.replace(lending, budget_bytes=self.lending_budget())
        self._config = msgspec.structs.replace(self._config, lending=lending)

    def lending_budget(self) -> int:
        """Return the budget, in bytes, that an engine is started with."""
        assert self._config.lending is not None
        return self._config.lending.budget_bytes

    def set_lending_budget(self, budget_bytes: int) -> None:
        """Set the budget of engines that are started from now on."""
        assert self._config.lending is not None
        lending = msgspec.structs.replace(self._config.lending, budget_bytes=budget_bytes)
        self._config = msgspec.structs.replace(self._config, lending=lending)

    def storage(self) -> TierSpec | None:
        """Return the storage that the engine is started with."""
        return self._config.storage

    def set_storage(self, storage: TierSpec | None) -> None:
        """Set the storage of engines that are started from now on."""
        self._config = msgspec.structs.replace(self._config, storage=storage)

    async def stop(self) -> None:
        """End the process, and return once it is gone; without one, do nothing.

        First ask the engine to end. If that does not help, close its standard input, which ends it, and at last send
        SIGKILL. Before its input is closed, the engine has time to write to storage.
        """
        process, life = self._process, self._life
        if process is None or life is None:
            return
        assert process.stdin is not None
        if self._client.engine is None:  # it does not listen yet
            process.stdin.close()
        with contextlib.suppress(ApiError):  # its queue is full
            self._client.shutdown_engine()
        storage = self._config.storage
        patience_s = _STOP_TIMEOUT_S / 2 + (0.0 if storage is None else storage.close_patience_s)
        for push in (process.stdin.close, process.kill):
            await asyncio.wait({life}, timeout=patience_s)
            if life.done():
                break
            patience_s = _STOP_TIMEOUT_S / 2
            with contextlib.suppress(ProcessLookupError):
                push()
        await asyncio.wait({life})

    async def _spawn(self, give_way_s: float) -> asyncio.Task[_End]:
        """Start a process. The task returns how it ended, once it is gone. Raises `EngineError`."""
        config = msgspec.structs.replace(
            self._config, incarnation=secrets.randbits(63), step_time_s=self._step_time_s()
        )
        try:
            page = ProgressPage.create()
        except OSError as error:
            raise self._cannot_start(error) from None
        config = msgspec.structs.replace(config, progress_fd=page.fd)
        self._client.expect(config.incarnation)
        self._client.load_meter.give_way(give_way_s)
        command = module_command("swiftkv.engine.main", config.name)  # the name is for `ps`
        # In a session of its own, the engine gets no Ctrl-C of the terminal: the node stops its engines in order.
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=sys.stderr,
                start_new_session=True,
                cwd="/",  # the directory in which the node was started may be gone
                pass_fds=(page.fd, *config.inherited_fds),
                env={**self._environment, PATIENCE_VARIABLE: str(give_way_s)},
            )
        except OSError as error:
            raise self._cannot_start(error) from None
        finally:
            page.close()
        self._process = process
        watch = self._watch = EngineWatch(
            self._client, self._coordinator, watchdog_s=self._node.watchdog, pid=process.pid, page=page
        )
        life = self._life = asyncio.create_task(self._see_through(process, watch), name=f"engine {config.name}")
        assert process.stdin is not None
        # It may have died already: `_see_through` notices. uvloop raises RuntimeError once it has closed the pipe.
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            await process.stdin.drain()
        return life

    def _cannot_start(self, error: OSError) -> EngineError:
        """Return the error for a process that cannot be started, for lack of memory, processes or open files."""
        return EngineError(f"{self._config.name}: the engine cannot be started: {error.strerror}")

    async def _see_through(self, process: Process, watch: EngineWatch) -> _End:
        """Wait until the process ends, and end it if it does not load in time, hangs, or sends a malformed message."""
        exited = asyncio.create_task(process.wait())
        receivers = [asyncio.create_task(self._client.receive())]
        watchers: dict[EndCause, asyncio.Task[str]] = {
            "load_timeout": asyncio.create_task(self._until_overdue()),
            "hung": asyncio.create_task(watch.until_hung(self._waits_for_others)),
        }
        if self._coordinator is not None:
            receivers.append(asyncio.create_task(self._coordinator.receive()))
            watchers["coordinator_hung"] = asyncio.create_task(watch.until_silent())
        tasks: set[asyncio.Task[Any]] = {exited, *receivers, *watchers.values()}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return end_of(exited.result())
            end = self._bad_message(receivers) or next(
                _End(cause, watcher.result()) for cause, watcher in watchers.items() if watcher.done()
            )
            self._client.engine_down(end.how)  # at once: a process that hangs in the kernel may take long to end
            return end
        finally:
            self._watch = None
            if not exited.done():
                kill_child(process)
                await asyncio.wait({exited})
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self._coordinator is not None:
                self._coordinator.engine_ended()

    def _bad_message(self, receivers: list[asyncio.Task[NoReturn]]) -> _End | None:
        for receiver in receivers:
            if receiver.done() and (error := receiver.exception()):
                logger.error("the engine of %s sent a malformed message", self._config.name, exc_info=error)
                return _End("bad_message", f"sent a malformed message ({error!r}) and was ended")
        return None

    async def _until_overdue(self) -> str:
        """Wait until the engine takes too long to load its model, at its start or on waking; return a description."""
        timeout_s = self._node.load_timeout
        try:
            while not self._client.status.is_draining:
                async with asyncio.timeout(timeout_s):
                    await self._client.wait_ready()
                await self._client.status.until((EngineState.WAKING,))
        except TimeoutError:
            return (
                f"did not load within {timeout_s:g} s (raise node.load_timeout for models that take longer) "
                "and was ended"
            )
        return await asyncio.Future[str]()

    def _waits_for_others(self) -> bool:
        return any(lender.is_unresponsive for lender in self.lenders)


def end_of(returncode: int) -> _End:
    """Return how an engine process ended, and whether it may be started again, from its `Popen.returncode`."""
    if returncode == EXIT_LOAD_FAILED:
        return _End("load_failed", "could not load the model", can_restart=False)
    if returncode == EXIT_NO_ROOM:
        return _End("exited", "found no room for the model")
    return _End("killed" if returncode < 0 else "exited", how_it_ended(returncode))
