"""A whole gateway for tests: a real tokenizer, real sockets, a real HTTP server, and an echo engine as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx
import openai
import uvicorn
import uvloop
from echo_coordinator import BLOCK_BYTES, FIRST_BUDGET_BYTES, POOL_BYTES
from fastapi import FastAPI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swiftkv.server.app import GatewayMetrics, ModelHandle, ServerSettings, create_app, create_model_app
from swiftkv.server.batches.room import Room
from swiftkv.server.batches.runner import BatchRunner
from swiftkv.server.batches.storage import Storage, StorageLimits
from swiftkv.server.batches.store import Store
from swiftkv.server.client import EngineClient
from swiftkv.server.errors import ApiError
from swiftkv.server.http_protocol import http_config
from swiftkv.server.lending import Borrower, CoordinatorClient, Lender, LendingMember, NodeLending, Outsider
from swiftkv.server.models import ClientPolicy, ModelTable
from swiftkv.server.sleep import Sleeper
from swiftkv.server.storage_changes import StorageChanges
from swiftkv.server.threads import BoundedThreads
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.tier.messages import TierSpec

T = TypeVar("T")

ECHO_ENGINE = Path(__file__).with_name("echo_engine.py")
PATIENCE_S = 60
"""A deadline for what happens at once, on a machine that may be busy with other things."""

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 4096
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('no such thing') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. Viele Grüße aus Köln, 你好, 👋🏽 def f(x): return x\n"


def train_tokenizer(path: Path, tags: Sequence[str] = (), template: str = TEMPLATE) -> None:
    """A byte-level BPE tokenizer with a chat template, trained on Python's own source; `tags` are tokens of it too."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tags),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([Path(asyncio.base_events.__file__).read_text(), TEXT * 20], trainer)
    backend.add_tokens(list(tags))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)


class FixedModels:
    """Changes no model: there is no supervisor."""

    async def add(self, section: object) -> str:
        raise ApiError(409, "this gateway takes no models")

    async def remove(self, name: str, timeout_s: float, *, now: bool) -> None:
        raise ApiError(409, f"this gateway keeps '{name}'")

    async def reload(self, name: str, timeout_s: float, *, now: bool) -> None:
        raise ApiError(409, f"this gateway keeps '{name}'")


def storage_changes(client: EngineClient, directory: Path) -> StorageChanges:
    """Return the part of a gateway that attaches storage; what it remembers is in a list."""
    remembered: list[TierSpec | None] = [None]
    return StorageChanges(
        client.name,
        client.storage,
        spec=lambda: remembered[-1],
        remember=remembered.append,
        directory=directory,
        io_backend="kernel",
        why_not="its KV is nowhere" if client.name == "code" else None,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something that other threads do has happened."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


@dataclass
class EchoProcess:
    """An echo engine that can be killed and started again, as a supervisor would."""

    client: EngineClient
    step_ms: float
    max_model_len: int
    leases_address: str
    process: subprocess.Popen[bytes] | None = None
    incarnation: int = 0

    def start(self) -> None:
        self.incarnation += 1
        self.client.expect(self.incarnation)
        addresses = [self.client.requests_address, self.client.outputs_address]
        options = [f"--step-ms={self.step_ms}", f"--max-model-len={self.max_model_len}"]
        options += [f"--incarnation={self.incarnation}"]
        options += [f"--name={self.client.name}", f"--leases-address={self.leases_address}"]
        self.process = subprocess.Popen([sys.executable, ECHO_ENGINE, *addresses, *options])

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Have the engine read and say nothing within the block."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@dataclass
class Gateway:
    """A node's port and one model's own port, in an event loop of their own."""

    loop: asyncio.AbstractEventLoop
    url: str
    model_url: str
    clients: dict[str, EngineClient]
    engines: dict[str, EchoProcess]
    metrics: GatewayMetrics
    apps: list[FastAPI] = field(default_factory=list)
    api_key: str | None = None
    admin_key: str = ""
    models: dict[str, ModelHandle] = field(default_factory=dict)
    budgets: dict[str, list[int]] = field(default_factory=dict)
    """Every budget that was set, in bytes."""
    storage: Storage | None = None

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the gateway's event loop."""

        async def run() -> object:
            return function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def with_store(self, work: Callable[[Store], T]) -> T:
        """Run ``work`` in the thread of the store of files and batches."""
        assert self.storage is not None
        return asyncio.run_coroutine_threadsafe(self.storage.call(work), self.loop).result(PATIENCE_S)

    def wait_ready(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(self.clients[name].wait_ready(), self.loop).result(PATIENCE_S)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers=headers)

    def admin(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers=headers)

    @contextmanager
    def asking(self, path: str, body: dict[str, Any], sent_ahead: bytes = b"") -> Iterator[None]:
        """Be a client that has sent a request, and perhaps more, and reads no answer; it hangs up at the end."""
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + content + sent_ahead)
            yield

    @contextmanager
    def preparing_nothing(self, name: str) -> Iterator[BoundedThreads]:
        """Keep both threads that prepare a model's requests busy within the block; yield them."""
        threads, release = self.models[name].threads, threading.Event()
        busy = [
            asyncio.run_coroutine_threadsafe(threads.run(lambda: release.wait(PATIENCE_S)), self.loop) for _ in range(2)
        ]
        try:
            yield threads
        finally:
            release.set()
            for work in busy:
                work.result(PATIENCE_S)

    def openai(self, path: str = "/v1") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.url + path, api_key=self.api_key or "none", max_retries=0, timeout=PATIENCE_S
        )


def start_gateway(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    step_ms: float = 0,
    max_model_len: int = MAX_MODEL_LEN,
    settings: ServerSettings | None = None,
    lending: bool = True,
    policy: ClientPolicy | None = None,
    state: Path | None = None,
    model_dir: Path | None = None,
    storage_limits: StorageLimits | None = None,
    **habits: Any,
) -> tuple[Gateway, Callable[[], None]]:
    """A gateway with the models ``chat`` (own port too) and ``code``; the second item stops it.

    ``chat`` wakes for requests, ``code`` does not. Unless ``lending`` is off, ``code`` lends to ``chat``, as far as
    their echo engines say. With ``state`` there are files and batches, and each model has 16 slots for these.
    ``habits`` are further fields of both `ModelHandle`s.
    """
    settings = settings or ServerSettings()
    policy = policy or ClientPolicy()
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    metrics = GatewayMetrics()
    metrics.watch(settings.limits)
    servers: list[uvicorn.Server] = []
    serving: list[asyncio.Task[None]] = []
    receiving: list[asyncio.Task[NoReturn]] = []
    running: list[tuple[Storage, asyncio.Task[NoReturn]]] = []
    coordinators: list[CoordinatorClient] = []
    resting: list[asyncio.Task[None]] = []
    budgets: dict[str, list[int]] = {"chat": [], "code": []}

    async def build() -> Gateway:
        clients: dict[str, EngineClient] = {}
        members = []
        for name in ("chat", "code"):
            addresses = [f"ipc://{directory}/{name}.{end}" for end in ("requests", "outputs")]
            client = EngineClient(name, *addresses, metrics.for_model(name), max_in_flight=600)
            client.start()
            receiving.append(loop.create_task(client.receive()))
            clients[name] = client
            coordinator = CoordinatorClient(name, f"ipc://{directory}/{name}.leases") if lending else None
            if coordinator is not None:
                receiving.append(loop.create_task(coordinator.receive()))
            role = "master" if name == "chat" else "worker"
            part: Lender | Borrower | Outsider = Outsider("lends and borrows nothing: node.lending is off")
            if coordinator is not None:
                coordinators.append(coordinator)
                part = (
                    Borrower(coordinator, "is a master")
                    if name == "chat"
                    else Lender(
                        coordinator,
                        BLOCK_BYTES,
                        lambda name=name: [FIRST_BUDGET_BYTES, *budgets[name]][-1],
                        budgets[name].append,
                    )
                )
            members.append(LendingMember(name, role, POOL_BYTES, client, part))
        node_lending = NodeLending(members, lending, "shm")
        engines = {
            name: EchoProcess(client, step_ms, max_model_len, f"ipc://{directory}/{name}.leases")
            for name, client in clients.items()
        }

        async def rest(name: str) -> None:
            """End the engine of a model that sleeps, if it has not ended, and start it when somebody wakes it."""
            if clients[name].engine is None:
                return
            engines[name].stop()
            clients[name].engine_down("ended with code 0")

            async def come_back() -> None:
                await clients[name].until_wanted()
                engines[name].start()

            resting.append(loop.create_task(come_back()))

        handles = {
            name: ModelHandle(
                name,
                name,
                model_dir or directory,
                max_model_len,
                VOCAB_SIZE,
                tokenizer,
                client,
                Sleeper(client, node_lending, lambda name=name: rest(name)),
                storage_changes(client, directory),
                policy,
                auto_wake=name == "chat",
                **habits,
            )
            for name, client in clients.items()
        }
        storage = None
        if state is not None:
            storage = await Storage.open(state, storage_limits or StorageLimits())
            rooms = dict.fromkeys(handles, Room.of(32, None))
            runner = BatchRunner(storage, ModelTable(handles), rooms, metrics)
            running.append((storage, loop.create_task(runner.run())))
        port_settings = replace(settings, storage=storage)
        apps = [
            create_app(ModelTable(handles), port_settings, metrics, node_lending, FixedModels()),
            create_model_app(ModelTable({"chat": handles["chat"]}), "chat", port_settings, metrics, node_lending),
        ]
        urls = []
        for app in apps:
            listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            server = uvicorn.Server(http_config(app, settings.limits, timeout_graceful_shutdown=1))
            servers.append(server)
            serving.append(loop.create_task(server.serve(sockets=[listener])))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        keys = settings.api_key, settings.admin_key
        return Gateway(loop, *urls, clients, engines, metrics, apps, *keys, handles, budgets, storage)

    gateway = asyncio.run_coroutine_threadsafe(build(), loop).result(PATIENCE_S)
    for name, engine in gateway.engines.items():
        engine.start()
        gateway.wait_ready(name)

    async def shut_down() -> None:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        for task in [*receiving, *resting]:
            task.cancel()
        await asyncio.gather(*receiving, *resting, return_exceptions=True)
        for storage, _ in running:
            await storage.close()
        for coordinator in coordinators:
            coordinator.close()
        for client in gateway.clients.values():
            client.close()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(shut_down(), loop).result(PATIENCE_S)
        for engine in gateway.engines.values():
            engine.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)

    return gateway, stop
