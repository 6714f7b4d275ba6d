"""The composition root: starts the engines and the gateway, watches them, stops them, and leaves nothing behind.

It is one file of more than 400 lines, so that a node's life can be followed from its start to its end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from swiftkv import __version__
from swiftkv.admin_key import generated_admin_key
from swiftkv.config import Config
from swiftkv.devices import check_devices
from swiftkv.errors import ConfigError
from swiftkv.fleet import Fleet, Member
from swiftkv.handles import load_handles
from swiftkv.host_tiers import check_memory
from swiftkv.latency import prefer_latency
from swiftkv.model_changes import RunningModels
from swiftkv.output import detach_output, open_standard_descriptors
from swiftkv.planning.advice import small_contexts
from swiftkv.planning.models import ModelPlan
from swiftkv.policies import LogLevel, Task
from swiftkv.ports import Ports, files_of
from swiftkv.processes import allow_open_files, exit_in, fix_search_paths, share_one_heap
from swiftkv.server.grammars import GrammarChecker
from swiftkv.server.limits import SPARE_CONNECTIONS, NodeLimits
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.otlp import OtlpSink, open_sink
from swiftkv.server.request_log import RequestLog, open_request_log
from swiftkv.server.templates import TemplateRenderer
from swiftkv.sockets import host_in_url, ipc_directory, listen
from swiftkv.state import state_directory
from swiftkv.stopping import StoppingMark, end_hanging_threads, wait_for_stopping
from swiftkv.tasks import Tasks
from swiftkv.tenant_config import TenantConfig
from swiftkv.units import format_size, loading_words

if TYPE_CHECKING:
    from swiftkv.server.batches.service import BatchService
    from swiftkv.server.models import ModelHandle, ModelTable

_EXAMPLES: dict[Task, tuple[str, str]] = {
    "generate": ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64'),
    "embed": ("embeddings", '"input": "Hello"'),
    "score": ("rerank", '"query": "Hello", "documents": ["Good morning"]'),
}
"""The route and the body, without the model, of the request that the node shows for a model of each task."""
_FILES_OF_NODE = SPARE_CONNECTIONS + 128
"""Descriptors for what is neither a model's nor a client's."""
_ENGINES_STOP_S = 30.0
"""The most seconds that a node without requests takes to end, with its engines."""
_DISK_S = 5.0
"""The most seconds that a node that stops waits for its disk."""
_THREADS_S = 10.0
"""The most seconds that a node that has stopped waits for its threads."""
_LOADING_S = 5.0
"""The seconds between two lines about engines that load."""


def run_node(config: Config, plans: Sequence[ModelPlan]) -> None:
    """Serve `config` until one of `stop_signals`.

    Raises `ConfigError`, before anything starts, if a port is taken, a key is not set or a device is missing;
    `EngineError` if a model does not come up.
    """
    share_one_heap()
    fix_search_paths()
    open_standard_descriptors()
    limits = _checked_limits(config, plans)
    _run_without_triton()
    wait_for_stopping(config.node.port, config.node.shutdown_timeout + _ENGINES_STOP_S, say)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,  # closed last: it may wait for threads that hang
        StoppingMark(config.node.port) as stopping,
        open_request_log(config.node.request_log) as request_log,
        open_sink(None if config.node.otlp is None else config.node.otlp.endpoint) as traces,
        listen(config) as sockets,
        ipc_directory() as ipc,
        _admin_key(config, sockets[0]) as (admin_key, key_file),
        state_directory(config) as (state, why_no_state),
    ):

        async def serve() -> None:
            node = Node(
                config,
                plans,
                keys=NodeKeys(config.node.api_key(), admin_key, config.node.tenant_keys()),
                limits=limits,
                sockets=sockets,
                ipc=ipc,
                request_log=request_log,
                trace_sink=traces,
                state=state,
                stopping=stopping,
            )
            await node.run()

        detach_output()
        _log(config.node.log_level)
        if key_file is not None:
            say(f"the admin key is in {key_file}")
        why_none = "this version does not keep those of tenants apart" if config.node.tenants else why_no_state
        if why_none is not None:
            say(f"/v1/files and /v1/batches are not served: {why_none}")
        with end_hanging_threads(_THREADS_S, say):
            runner.run(serve())


def _checked_limits(config: Config, plans: Sequence[ModelPlan]) -> NodeLimits:
    """Check that this machine has what the node needs, and return the limits of its connections and bodies."""
    config.node.check_access()
    check_devices(config)
    check_memory(plans)
    return NodeLimits(config.node.max_connections, config.node.max_bodies, _files_for_clients(config))


def _files_for_clients(config: Config) -> int:
    """Return the descriptors that the node leaves to clients. Raises `ConfigError` if there are none."""
    reserved = _FILES_OF_NODE + sum(map(files_of, config.models))
    open_files = allow_open_files()
    if open_files <= reserved:
        raise ConfigError(
            f"node.max_connections: this node may open {open_files} files, but needs {reserved} for itself and its "
            "models; raise the hard limit (ulimit -Hn)"
        )
    return open_files - reserved


@contextmanager
def _admin_key(config: Config, listening: socket.socket) -> Iterator[tuple[str, Path | None]]:
    """Yield the configured key of `/admin`, or a new one and the file that it is in, which only this user can read."""
    if configured := config.node.admin_key():
        yield configured, None
        return
    with generated_admin_key(listening.getsockname()[1]) as generated:
        yield generated


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The keys of the models' routes and of `/admin`. Without `api` and `tenants`, the routes need no key."""

    api: str | None = field(repr=False)
    admin: str = field(repr=False)
    tenants: dict[str, TenantConfig] = field(repr=False)  # by key


class Node:
    """Everything that runs in the gateway's process, on one event loop."""

    def __init__(
        self,
        config: Config,
        plans: Sequence[ModelPlan],
        *,
        keys: NodeKeys,
        limits: NodeLimits,
        sockets: Sequence[socket.socket],
        ipc: Path,
        request_log: RequestLog | None,
        trace_sink: OtlpSink | None,
        state: Path | None,
        stopping: StoppingMark,
    ) -> None:
        """`sockets`: the node's, then one for each model that has its own port, in order. Needs a running loop.

        `state` is the directory of files and batches; without it the node offers neither.
        """
        self._config = config
        self._keys = keys
        self._limits = limits
        self._sockets = sockets
        self._request_log = request_log
        self._trace_sink = trace_sink
        self._state = state
        self._stopping = stopping
        self._is_held_up = False  # by a disk that hangs
        self._grammars = GrammarChecker()
        self._templates = TemplateRenderer()
        self._metrics = GatewayMetrics()
        self._metrics.watch(limits)
        if trace_sink is not None:
            self._metrics.registry.register(trace_sink)
        kept = state if config.node.state_dir is not None else None  # only `state_dir` outlives the node
        self._tasks = Tasks()
        self._fleet = Fleet(config, plans, ipc=ipc, metrics=self._metrics, tasks=self._tasks, say=_say_when, state=kept)
        self._models: RunningModels | None = None
        """The models as clients know them; `None` until the ports are open."""
        self._batching: asyncio.Task[None] | None = None
        """The task that runs the lines of batches; `None` until the ports are open, and in a node without batches."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Serve until one of `stop_signals`.

        Raises `EngineError` if a model does not come up, or the error of one of the node's own tasks.
        """
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with AsyncExitStack() as ends:  # called from the last to the first, each even if others fail
            ends.callback(self._exit_if_held_up)
            ends.callback(self._fleet.close)
            ends.push_async_callback(self._fleet.stop_engines)
            ends.push_async_callback(self._tasks.close)
            ends.push_async_callback(self._templates.close)
            ends.push_async_callback(self._grammars.close)
            try:
                if await self._unless_stopped(self._come_up(ends)):
                    await self._unless_stopped(asyncio.Event().wait())
                if self._batching is not None:
                    await self._tasks.end(self._batching)
                await self._drain()
                await self._on_disk(self._fleet.keep_learnt())
            finally:
                self._stopping.set()
        if self._tasks.failure.done():
            self._tasks.failure.result()
        _say_when("stopped")

    async def _on_disk(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, but give it up if the disk hangs: nothing can interrupt the thread that waits for the disk."""
        try:
            async with asyncio.timeout(_DISK_S):
                await work
        except TimeoutError:
            self._is_held_up = True

    def _exit_if_held_up(self) -> None:
        if self._is_held_up:
            _say_when(
                "the disk of node.state_dir hangs; results that were not written are computed again after a start"
            )
            exit_in(_DISK_S, 1)

    def _on_signal(self) -> None:
        """Stop at the first signal; at the second, do not wait for requests."""
        if self._stop.is_set():
            self._hurry.set()
        self._stopping.set()
        self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do `work`, but cancel it when the node stops; return whether it was done.

        Raises the error of `work`, or of one of the node's tasks meanwhile.
        """
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        failure = self._tasks.failure
        waiting: set[asyncio.Future[Any]] = {task, stop, failure}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait({task})
        if failure.done():
            failure.result()
        return False

    async def _come_up(self, ends: AsyncExitStack) -> None:
        """Start the engines, and open the ports meanwhile. What is to be closed at the end is put on `ends`."""
        members = list(self._fleet.members.values())
        _say_when(f"swiftkv {__version__}: starting {', '.join(member.plan.name for member in members)}")
        for memory, choice in self._fleet.transports.items():
            say(f"lending in the memory of {memory} uses {choice.kind}: {choice.reason}")
        for member in members:
            for warning in small_contexts(member.config, member.plan):
                say(warning)
        started_s = time.monotonic()
        engines = [asyncio.create_task(self._start_engine(member, started_s)) for member in members]
        telling = asyncio.create_task(self._tell_loading(members))
        try:
            handles = await asyncio.to_thread(load_handles, self._config, members, self._grammars, self._templates)
            for handle in handles:
                if differences := handle.defaults.differences():
                    say(f"{handle.name}: sampling defaults of its generation_config.json: {differences}")
            models = self._models = await self._serve_http(handles, ends)
            await asyncio.gather(*engines)
        finally:
            for task in (telling, *engines):
                task.cancel()
        self._tasks.start(self._fleet.keep_learning(), "the saving of step times")
        prefer_latency()
        gc.collect()
        gc.freeze()  # imports stay for good; a collection that walks them all would hold up every SSE response
        self._say_where()
        models.begin()

    async def _tell_loading(self, members: Sequence[Member]) -> None:
        """Print the progress of engines that still load, every few seconds."""
        while True:
            await asyncio.sleep(_LOADING_S)
            for member in members:
                if (loading := member.client.load_meter.view(member.client.state)) is not None:
                    words = loading_words(loading.loaded_bytes, loading.total_bytes, loading.left_s)
                    _say_when(f"{member.plan.name}: {words}")

    async def _start_engine(self, member: Member, started_s: float) -> None:
        plan = member.plan
        ready = await self._fleet.start(member, self._before_restart)
        took_s = time.monotonic() - started_s
        pool = format_size(ready.pool_bytes)
        where = f" on each of {plan.tensor_parallel_size} ranks" if plan.tensor_parallel_size > 1 else ""
        cached = f"{pool} of KV cache{where} for {ready.num_blocks * ready.block_size:,} tokens"
        _say_when(f"{plan.name}: ready after {took_s:.1f} s, {cached}, {ready.max_model_len:,} in one sequence")

    async def _before_restart(self, name: str) -> None:
        if self._models is not None:  # else clients know no model yet
            await self._models.before_restart(name)

    async def _serve_http(self, handles: Sequence[ModelHandle], ends: AsyncExitStack) -> RunningModels:
        """Open the ports. Models can be changed only after `begin` of the result has been called."""
        from swiftkv.server.app import ServerSettings
        from swiftkv.server.models import ModelTable
        from swiftkv.server.tenants import senders_by_key

        table = ModelTable({handle.name: handle for handle in handles})
        batches = None
        if self._state is not None and not self._config.node.tenants:
            batches = await self._open_batches(table, self._state, ends)
        node = self._config.node
        settings = ServerSettings(
            api_key=self._keys.api,
            tenants=senders_by_key(self._keys.tenants),
            max_body_bytes=node.max_body,
            admin_key=self._keys.admin,
            allowed_hosts=node.checked_hosts,
            limits=self._limits,
            protect_metrics=node.protect_metrics,
            request_log=self._request_log,
            trace_sink=self._trace_sink,
            storage=None if batches is None else batches.storage,
        )
        ports = Ports(settings, self._metrics, self._fleet.lending, self._tasks)
        ends.push_async_callback(ports.close)
        models = RunningModels(
            self._fleet,
            table,
            ports=ports,
            limits=self._limits,
            grammars=self._grammars,
            templates=self._templates,
            metrics=self._metrics,
            batches=batches,
            say=_say_when,
        )
        own = [handle for model, handle in zip(self._config.models, handles, strict=True) if model.endpoint is not None]
        ports.serve_node(self._sockets[0], table, models)
        for listening, handle in zip(self._sockets[1:], own, strict=True):
            ports.serve_model(listening, handle)
        return models

    async def _open_batches(self, table: ModelTable, state: Path, ends: AsyncExitStack) -> BatchService:
        from swiftkv.server.batches.service import BatchService

        batches = await BatchService.open(state, self._config, table, self._metrics)
        batching = self._batching = self._tasks.start(batches.run(), "the runner of batches")

        async def close() -> None:
            await self._tasks.end(batching)
            await self._on_disk(batches.close())

        ends.push_async_callback(close)
        return batches

    async def _drain(self) -> None:
        """Refuse new requests with 503, and wait for the others until `shutdown_timeout` or a second signal."""
        timeout_s = self._config.node.shutdown_timeout
        if waiting := sum(member.client.num_in_flight for member in self._fleet.members.values()):
            _say_when(f"stopping: up to {timeout_s:g} s for {waiting} sequences in flight; a second signal ends them")
        drained = asyncio.create_task(self._drain_clients(timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drained, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drained.done():
            drained.cancel()
            await self._drain_clients(0)

    async def _drain_clients(self, timeout_s: float) -> None:
        await asyncio.gather(*(member.client.drain(timeout_s) for member in self._fleet.members.values()))

    def _say_where(self) -> None:
        """Print each model's URL, and a line to paste."""
        ports = [listening.getsockname()[1] for listening in self._sockets]
        host = host_in_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.node.host, self._config.node.host))
        node_url = f"http://{host}:{ports.pop(0)}"
        variables = self._config.node.key_variables
        key = f' -H "Authorization: Bearer ${variables[0]}"' if variables else ""
        lines = []
        for model in self._config.models:
            url = f"http://{host}:{ports.pop(0)}/v1" if model.endpoint else f"{node_url}/models/{model.name}/v1"
            path, fields = _EXAMPLES[model.task]
            body = f'{{{fields}, "model": "{model.name}"}}'
            lines += [f"{model.name}: {url}"]
            lines += [f"  curl {url}/{path}{key} -H 'Content-Type: application/json' -d '{body}'"]
        admin = f" --admin-key-env {self._config.node.admin_key_env}" if self._config.node.admin_key_env else ""
        lines += [f"all models: {node_url}/v1 (Ctrl-C stops)", f"to watch them: swiftkv page --url {node_url}{admin}"]
        say("\n".join(lines))


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the node: SIGHUP, when its terminal is closed, unless it was started by `nohup`."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def _run_without_triton() -> None:
    """Keep libraries from importing Triton, which takes a second and 80 MB: the gateway runs no kernels."""
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


def _log(level: LogLevel) -> None:
    """Log this package's records from `level` on, and those of others from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("swiftkv").setLevel(level.upper())


def _say_when(text: str) -> None:
    """Print one of the node's lines about an event, with the time in the log's format."""
    say(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}")


def say(text: str) -> None:
    """Print one of the node's few lines on standard output."""
    print(text, flush=True)
