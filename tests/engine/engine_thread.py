"""An engine in a thread of this process, so that a test can be a part of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import pytest
import torch
import zmq

from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import Shutdown, ToEngine
from swiftkv.engine.runner import ModelRunner
from tests.engine.engine_process import TIMEOUT_S, EngineClient

Runner = TypeVar("Runner", bound=ModelRunner)


class PatientEngine(Engine):
    """An engine that reads no message while the test holds a lock."""

    may_read: threading.Lock

    def _receive(self) -> list[ToEngine]:
        with self.may_read:
            return super()._receive()


class EngineThread(EngineClient, Generic[Runner]):
    """The client of an engine with a runner of the test's own."""

    def __init__(self, checkpoint: Path, runner: type[Runner], **options: object) -> None:
        super().__init__(checkpoint, **options)
        with torch.inference_mode():
            self.runner = runner(self.config)
        self._ended: Future[None]
        self._may_read = threading.Lock()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        with self._may_read:
            yield

    def check_runs(self) -> None:
        if self._ended.done():
            self._ended.result()
            pytest.fail("the engine ended")

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as thread:
            self._ended = thread.submit(self._run)
            try:
                yield
            finally:
                self.send(Shutdown())
                self._ended.result(TIMEOUT_S)
                self.runner.close()
                self.close()

    def prepare(self, engine: Engine) -> None:
        """Called before the engine runs."""

    def _run(self) -> None:
        context = zmq.Context()
        requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        requests.connect(self.config.requests_address)
        outputs.connect(self.config.outputs_address)
        try:
            with torch.inference_mode():
                engine = PatientEngine(self.config, self.runner, requests, outputs, context)
                engine.may_read = self._may_read
                self.prepare(engine)
                engine.run()
        finally:
            context.destroy(linger=0)
