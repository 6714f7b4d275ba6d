"""A real node: `swiftkv serve` as a process, its engines, and the files that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import yaml

from swiftkv.admin_key import find_admin_key

T = TypeVar("T")

DEADLINE_S = 120.0
"""Nothing here takes long, but the machine may be busy."""


MAX_MODEL_LEN = 32768
"""The number of tokens of an answer that outlasts any test."""


def wait_for(what: str, probe: Callable[[], T]) -> T:
    """Call `probe` until its result is truthy, and return that."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if answer := probe():
            return answer
        time.sleep(0.02)
    raise TimeoutError(what)


class NodeProcess:
    """A context manager that runs a node; leaving it kills the processes that still run.

    `temporary` is the node's TMPDIR, so that tests see the files left there; two nodes in turn can share it.
    """

    def __init__(
        self,
        config: dict[str, Any],
        directory: Path,
        temporary: Path,
        *,
        wait: bool = True,
        program: Sequence[str] = ("-m", "swiftkv"),
        stderr: int | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`wait`: enter only once every model serves. `program`: Python's arguments, instead of the command."""
        self._cwd = cwd
        self._program = program
        self._stderr = stderr
        self.file = directory / "node.yaml"
        self.file.write_text(yaml.safe_dump(config))
        self.temporary = temporary
        self.lines: list[str] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wait = wait
        self._everybody: list[psutil.Process] = []

    def __enter__(self) -> NodeProcess:
        self.process = subprocess.Popen(
            [sys.executable, *self._program, "serve", str(self.file)],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=self._cwd,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            if self._wait:
                self.url = self.wait_line(r"all models: (http\S+)/v1")[1]
                self.engines()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._everybody:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile, after its rank 0
                process.kill()
        self.process.kill()
        self.process.wait()

    def wait_line(self, pattern: str) -> re.Match[str]:
        """Wait for the next line of its output that matches, and return the match."""
        while True:
            line = self._unread.get(timeout=DEADLINE_S)
            assert line is not None, f"ended before a line matched {pattern!r}:\n" + "\n".join(self.lines)
            if match := re.search(pattern, line):
                return match

    def wait_errors(self) -> str:
        """Wait until it has ended, and return its standard error, for which `stderr` must be a pipe.

        `communicate` would disturb the reader of its standard output.
        """
        assert self.process.stderr is not None
        errors: str = self.process.stderr.read()
        self.process.wait(DEADLINE_S)
        return errors

    def admin_headers(self) -> dict[str, str]:
        """The header that opens `/admin`."""
        return {"Authorization": f"Bearer {find_admin_key(self.url)}"}

    def url_of(self, model: str) -> str:
        """Return the model's own URL, as printed, without `/v1`."""
        return next(line for line in self.lines if line.startswith(f"{model}: http")).split()[1].removesuffix("/v1")

    def engines(self) -> dict[str, psutil.Process]:
        """Return the engine processes that run now, by model."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                command = child.cmdline()
                if "swiftkv.engine.main" in command:
                    found[command[-1]] = child
        self._everybody.extend(found.values())
        return found

    def ready(self) -> dict[str, str]:
        """Return the state of each model in `/ready`."""
        return {name: view["state"] for name, view in self.engine_views().items()}

    def engine_views(self) -> dict[str, dict[str, Any]]:
        """Return each engine's entry in `/ready`; the HTTP status must agree with them."""
        answer = httpx.get(f"{self.url}/ready", timeout=DEADLINE_S)
        content = answer.json()
        views: dict[str, dict[str, Any]] = content["engines"]
        assert content["models"] == {name: view["state"] for name, view in views.items()}
        assert answer.status_code == (200 if set(content["models"].values()) <= {"ready", "slow", "asleep"} else 503)
        return views

    def assert_nothing_left(self) -> None:
        """Assert that no process, no socket directory and nothing with our name in shared memory is left."""
        wait_for("engines to end", lambda: not any(process.is_running() for process in self._everybody))
        assert not list(self.temporary.iterdir())
        assert not list(Path("/dev/shm").glob("*swiftkv*"))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._unread.put(line.rstrip())
        self._unread.put(None)


def small_models(checkpoint: Path, *names: str) -> list[dict[str, Any]]:
    """Return the configuration of models that load fast and leave each other cores."""
    return [
        {"name": name, "path": str(checkpoint), "dtype": "float32", "threads": 1, "kv_cache": {"memory": "64MiB"}}
        for name in names
    ]


def free_ports(count: int) -> list[int]:
    """Return free ports on the loopback interface, outside of the range that the system assigns by itself.

    A port that the system had assigned may belong to some client by the time a test uses it.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def short_temporary_directory() -> Path:
    """Return a temporary directory; pytest's own are too long for the path of a socket."""
    return Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Such a directory, for the `conftest.py` of the tests that need one."""
    directory = short_temporary_directory()
    yield directory
    remove(directory)
