"""A real engine process with real sockets, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import zmq

from swiftkv.engine.messages import (
    Abort,
    AddRequest,
    CacheCommand,
    CacheReport,
    EngineConfig,
    EngineStats,
    FromEngine,
    Pooling,
    Ready,
    RequestError,
    SamplingParams,
    Shutdown,
    StepOutput,
    StepTrace,
    StorageChanged,
    ToEngine,
    TokenLogprobs,
    unpack_prompt_logprobs,
)
from swiftkv.units import PoolBytes

TIMEOUT_S = 120.0


@dataclass
class Answer:
    """All messages that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    cached_tokens: int | None = None
    hit_tokens: dict[str, int] = field(default_factory=dict)  # those, by tier
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None
    steps: list[StepTrace] = field(default_factory=list)
    error: RequestError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finish_reason != 0 or self.error is not None or self.pooled is not None


class EngineClient:
    """The gateway's end of an engine's sockets, and the configuration with which an engine meets it there."""

    def __init__(self, checkpoint: Path, kv_bytes: int = 64 << 20, **options: object) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="swiftkv-test-")
        addresses = [f"ipc://{self._directory.name}/{name}" for name in ("requests", "outputs")]
        defaults: dict[str, object] = {"dtype": "float32", "memory": PoolBytes(kv_bytes), "max_model_len": 512}
        self.config = msgspec.convert(
            {
                "name": "tiny",
                "path": str(checkpoint),
                "requests_address": addresses[0],
                "outputs_address": addresses[1],
                "ranks_directory": f"{self._directory.name}/ranks",
                **defaults,
                **options,
            },
            EngineConfig,
        )
        self.answers: dict[int, Answer] = {}
        self.stats: EngineStats | None = None
        self.is_stale = False  # the statistics: a request has ended since
        self.changes: list[StorageChanged] = []  # answers to changes of storage
        self.taken: list[int] = []  # messages, as the engine counted them
        self._ids = count(1)
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._requests.bind(addresses[0])
        self._outputs.bind(addresses[1])
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def check_runs(self) -> None:
        """Raise if the engine has ended."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Have the engine wait while messages are sent, so that no step comes between them."""
        yield

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._directory.cleanup()

    def send(self, message: ToEngine | bytes) -> None:
        self._requests.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._outputs.poll(200):
            self.check_runs()
            assert time.monotonic() < deadline_s, "the engine says nothing"
        message: FromEngine = self._decoder.decode(self._outputs.recv())
        return message

    def says_something(self, within_s: float) -> bool:
        return bool(self._outputs.poll(within_s * 1000))

    def add(
        self,
        prompt: Sequence[int],
        cache_salt: str = "",
        pooling: Pooling | None = None,
        is_traced: bool = False,
        priority: int = 0,
        is_to_last: bool = False,
        arrived_s: float | None = None,
        **sampling: Any,
    ) -> int:
        request_id = next(self._ids)
        params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.answers[request_id] = Answer()
        tokens = np.array(prompt, np.int32).tobytes()
        self.send(
            AddRequest(
                request_id,
                tokens,
                params,
                cache_salt=cache_salt,
                priority=priority,
                pooling=pooling,
                is_traced=is_traced,
                is_to_last=is_to_last,
                arrived_s=arrived_s,
            )
        )
        return request_id

    def abort(self, *request_ids: int) -> None:
        self.send(Abort(list(request_ids)))

    def wait(self, request_ids: Iterable[int]) -> list[Answer]:
        """Receive until all of the requests have ended."""
        wanted = list(request_ids)
        while not all(self.answers[request_id].has_ended for request_id in wanted):
            self.take_one()
        return [self.answers[request_id] for request_id in wanted]

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:
        with self.at_once():
            request_ids = [self.add(prompt, **sampling) for prompt in prompts]
        return self.wait(request_ids)

    def wait_for_rest(self) -> EngineStats:
        """Receive until the engine says that it has nothing to do, and return its statistics."""
        while self.stats is None or self.is_stale or self.stats.num_running or self.stats.num_waiting:
            self.take_one()
        return self.stats

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self.send(CacheCommand(1, clear=True))
        while not isinstance(message := self.receive(), CacheReport):
            self.take(message)

    def take_one(self) -> None:
        self.take(self.receive())

    def take(self, message: FromEngine) -> None:
        """Note what the engine says."""
        if isinstance(message, RequestError):
            self.answers[message.request_id].error = message
            return
        if isinstance(message, StorageChanged):
            self.changes.append(message)
            return
        assert isinstance(message, StepOutput)
        self.stats = message.stats or self.stats
        # An engine at rest says so anew, also one that rested while a grammar was compiled.
        has_ended = any(message.finish_reasons) or bool(message.pooled)
        self.is_stale = message.stats is None and (self.is_stale or has_ended)
        self.taken.append(message.messages_taken)
        for admitted in message.admitted:
            answer = self.answers[admitted.request_id]
            assert answer.cached_tokens is None or answer.cached_tokens < admitted.cached_tokens
            assert not answer.token_ids
            answer.cached_tokens, answer.hit_tokens = admitted.cached_tokens, admitted.hit_tokens_by_tier()
        arrays = (
            np.frombuffer(message.request_ids, np.uint64).tolist(),
            np.frombuffer(message.token_ids, np.int32).tolist(),
            np.frombuffer(message.finish_reasons, np.uint8).tolist(),
        )
        for request_id, token_id, finish_reason in zip(*arrays, strict=True):
            answer = self.answers[request_id]
            assert not answer.has_ended
            answer.token_ids.append(token_id)
            answer.finish_reason = finish_reason
        for part in message.traces or ():
            self.answers[part.request_id].steps.append(part)
        for request_id, pooled in (message.pooled or {}).items():
            assert not self.answers[request_id].has_ended
            self.answers[request_id].pooled = pooled
        for request_id, logprobs in (message.logprobs or {}).items():
            self.answers[request_id].logprobs += logprobs
        for request_id, prompt_logprobs in (message.prompt_logprobs or {}).items():
            assert self.answers[request_id].prompt_logprobs is None
            self.answers[request_id].prompt_logprobs = list(unpack_prompt_logprobs(prompt_logprobs))


class EngineProcess(EngineClient):
    """A context manager; leaving it shuts the engine down and expects exit code 0 unless it has ended before."""

    def __init__(self, checkpoint: Path, stderr: int | None = None, **options: object) -> None:
        super().__init__(checkpoint, **options)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swiftkv.engine.main"],
            stdin=subprocess.PIPE,
            stderr=stderr,
            pass_fds=self.config.inherited_fds,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.config) + b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> EngineProcess:
        self.ready = self.receive()
        assert isinstance(self.ready, Ready)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None and kind is None:
            self.send(Shutdown())
            assert self.process.wait(TIMEOUT_S) == 0
        self.close()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def check_runs(self) -> None:
        assert self.process.poll() is None, f"the engine ended with code {self.process.returncode}"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        super().close()


def tokens(found: Sequence[Answer]) -> list[list[int]]:
    assert all(answer.error is None for answer in found)
    return [answer.token_ids for answer in found]


def wait_until_stored(client: EngineClient) -> None:
    """Wait until nothing more is to be written, if there is storage."""
    client.wait_for_rest()
    while client.stats is not None and client.stats.tier is not None and client.stats.tier.num_to_store:
        client.take_one()
