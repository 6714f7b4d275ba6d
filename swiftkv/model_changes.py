"""Adds models to a node that runs, removes them and loads them anew."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from swiftkv.config import Config
from swiftkv.devices import check_devices
from swiftkv.errors import ConfigError, EngineError, SwiftkvError
from swiftkv.fleet import Fleet, Member
from swiftkv.handles import load_handles
from swiftkv.model_config import ModelConfig
from swiftkv.planning.advice import small_contexts
from swiftkv.planning.models import ModelPlan
from swiftkv.ports import Ports, files_of
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.grammars import GrammarChecker
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.sleep import SleepLevel
from swiftkv.server.templates import TemplateRenderer
from swiftkv.sockets import listen_on

if TYPE_CHECKING:
    from swiftkv.server.batches.service import BatchService
    from swiftkv.server.models import ModelHandle, ModelTable

_BUSY_RETRY_S = 1.0
_Mark = frozenset[tuple[str, int, int, int]]
"""The names, inodes, sizes and times of a model's files."""


class RunningModels:
    """The models of a node that runs, as clients know them.

    One change is made at a time, and the first once `begin` was called: until then the node is starting its models.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: ModelTable,
        *,
        ports: Ports,
        limits: NodeLimits,
        grammars: GrammarChecker,
        templates: TemplateRenderer,
        metrics: GatewayMetrics,
        batches: BatchService | None,
        say: Callable[[str], None],
    ) -> None:
        """`table` has the models that clients may name."""
        self._fleet = fleet
        self._table = table
        self._ports = ports
        self._limits = limits
        self._grammars = grammars
        self._templates = templates
        self._metrics = metrics
        self._batches = batches
        self._say = say
        self._changing = asyncio.Lock()
        self._has_begun = False
        self._marks = {name: _mark_of(member.plan) for name, member in fleet.members.items()}

    def begin(self) -> None:
        """Allow changes from now on."""
        self._has_begun = True

    async def add(self, section: object) -> str:
        """Start a model, and return its name when it serves. If that fails, the node is as it was.

        Raises:
            ApiError: 400 for a mistake in the section and for a model that does not load, 409 while models change.
        """
        async with self._one_at_a_time():
            with contextlib.ExitStack() as stack:
                try:
                    config, plan = await asyncio.to_thread(self._check, section)
                    self._take_files(config.models[-1], stack)
                    port = config.models[-1].endpoint
                    listening = None
                    if port is not None:
                        listening = stack.enter_context(listen_on(config.node.host, port.port, "endpoint.port"))
                    member = self._fleet.add(config, plan)
                except ConfigError as error:
                    raise ApiError(400, str(error), code="invalid_model") from None
                for warning in small_contexts(member.config, plan):
                    self._say(warning)
                await self._come_up(member, listening)
                stack.pop_all()  # the port stays open from here on
            self._say(f"{plan.name}: added")
            return plan.name

    async def remove(self, name: str, timeout_s: float, *, now: bool) -> None:
        """End a model, when its requests in flight have ended; `timeout_s` and `now` are those of `Sleeper.sleep`.

        The memory that it lends is recalled first.

        Raises:
            ApiError: 404 for an unknown model, 409 for one that has requests in flight for too long or falls asleep,
                for the only model, and while models change.
        """
        async with self._one_at_a_time():
            handle = self._table.get(name)
            name = handle.name
            if len(self._table.names) == 1:
                raise ApiError(409, f"'{name}' is the only model of this node", param="model", code="only_model")
            state = handle.client.state
            if state.is_there or state in (EngineState.SLEEPING, EngineState.ASLEEP):  # refused while it falls asleep
                await handle.sleeper.sleep(SleepLevel.WITHOUT_PROCESS, timeout_s, now=now)
            self._table.remove(name)
            handle.client.status.drain()  # before a client can wake it
            await self._ports.close_model(name)
            model = self._fleet.members[name].config
            await self._end(name)
            self._limits.leave_files_of_model(files_of(model))
            self._say(f"{name}: removed")

    async def reload(self, name: str, timeout_s: float, *, now: bool) -> None:
        """Serve a model from the current files in its directory; `timeout_s` and `now` are those of `remove`.

        The files are checked before the old engine ends; if they have a mistake, the node stays as it was.

        Raises:
            ApiError: 400 for files that cannot replace the old ones, 404 for an unknown model, 409 for one that does
                not serve or has requests in flight for too long, and while models change; 503 if it does not load.
        """
        async with self._one_at_a_time():
            handle = self._table.get(name)
            name = handle.name
            try:
                mark, renewed = await asyncio.to_thread(self._renewed, name)
            except (SwiftkvError, OSError) as error:
                raise ApiError(400, str(error), code="invalid_model") from None
            await handle.sleeper.sleep(SleepLevel.WITHOUT_PROCESS, timeout_s, now=now)
            self._show(renewed, mark)
            await handle.sleeper.wake()
            self._say(f"{name}: reloaded")

    async def before_restart(self, name: str) -> None:
        """Let clients use the current files of a model, which its next engine will load, if they have changed.

        Raises `EngineError`, after a line that says why, if they cannot replace those that the model was served from.
        """
        if await asyncio.to_thread(_mark_of, self._fleet.members[name].plan) == self._marks[name]:
            return
        try:
            mark, renewed = await asyncio.to_thread(self._renewed, name)
        except (SwiftkvError, OSError) as error:
            self._say(f"{name}: its files have changed, and cannot replace those that it was served from: {error}")
            raise EngineError(str(error)) from None
        self._show(renewed, mark)
        self._say(f"{name}: its files have changed; the next engine serves the new ones")

    def _renewed(self, name: str) -> tuple[_Mark, ModelHandle]:
        """Return the handle of a model with its current files, and their mark. Raises `SwiftkvError` for unfit ones."""
        member = self._fleet.members[name]
        mark = _mark_of(member.plan)  # taken first: a later change is noticed at the next start
        self._fleet.check_files(name)
        [renewed] = load_handles(self._fleet.config, [member], self._grammars, self._templates)
        return mark, renewed

    def _show(self, renewed: ModelHandle, mark: _Mark) -> None:
        """Let clients use a model's new handle from now on. Even if its engine ends now, the next has these files."""
        self._marks[renewed.name] = mark
        self._table.add(renewed)
        self._ports.renew(renewed)

    def _check(self, section: object) -> tuple[Config, ModelPlan]:
        """Return the configuration with one more model, and its plan. Raises `ConfigError`."""
        config, plan = self._fleet.plan(section)
        check_devices(config)
        return config, plan

    def _take_files(self, model: ModelConfig, stack: contextlib.ExitStack) -> None:
        """Take the descriptors of a model from those of clients, until `stack` is left.

        Raises `ConfigError` if clients need them.
        """
        num_files = files_of(model)
        if not self._limits.take_files_of_model(num_files):
            raise ConfigError(
                f"node.max_connections: clients leave no {num_files} descriptors for another model; close connections, "
                "or raise the hard limit of open files (ulimit -Hn) and start the node again"
            )
        stack.callback(self._limits.leave_files_of_model, num_files)

    async def _come_up(self, member: Member, listening: socket.socket | None) -> None:
        """Start a model that was added, open its port, and let clients name it.

        Raises `ApiError` 400 if it does not load. Whatever happens, it comes up whole, or is forgotten.
        """
        name = member.plan.name
        async with contextlib.AsyncExitStack() as undoing:
            undoing.push_async_callback(self._end, name)
            self._marks[name] = _mark_of(member.plan)
            try:
                await self._fleet.start(member, self.before_restart, behind_others=True)
                [handle] = await asyncio.to_thread(
                    load_handles, self._fleet.config, [member], self._grammars, self._templates
                )
                if listening is not None:
                    self._ports.serve_model(listening, handle)
            except (SwiftkvError, OSError) as error:
                raise ApiError(400, str(error), code="load_failed") from None
            undoing.pop_all()
        self._metrics.show_model(name)
        if self._batches is not None:
            self._batches.add(member.config)
        self._table.add(handle)

    async def _end(self, name: str) -> None:
        """End the engine of a model that is no longer used, and forget the model."""
        await self._fleet.end(name)
        self._marks.pop(name, None)
        self._metrics.hide_model(name)

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        """Make a change; raise `ApiError` 409 if another one is in progress, or the node is starting."""
        if not self._has_begun:
            message = "the node is starting; models can be changed when all of them are ready"
            raise ApiError(409, message, code="busy", retry_after_s=_BUSY_RETRY_S)
        if self._changing.locked():
            raise ApiError(409, "another change of models is in progress", code="busy", retry_after_s=_BUSY_RETRY_S)
        async with self._changing:
            yield


def _mark_of(plan: ModelPlan) -> _Mark:
    """Return what changes when a model's files do; empty if the directory is gone."""
    found = set()
    with contextlib.suppress(OSError):
        for file in plan.checkpoint.directory.iterdir():
            status = file.stat()
            found.add((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)
