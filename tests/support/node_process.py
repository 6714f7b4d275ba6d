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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import yaml

from swiftkv.admin_key import find_admin_key

T = TypeVar("T")

DEADLINE_S = 120.0
"""Nothing here takes long; a machine may be busy with other things."""


MAX_MODEL_LEN = 32768
"""Tokens: an answer of this length outlasts what a test does meanwhile."""


def wait_for(what: str, probe: Callable[[], T]) -> T:
    """Ask until the answer is true, and return it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if answer := probe():
            return answer
        time.sleep(0.02)
    raise TimeoutError(what)


class NodeProcess:
    """A context manager: the node serves inside. Leaving it kills what still runs.

    `temporary` is the node's TMPDIR, so that tests see the files left there; share it to start two in turn.
    """

    def __init__(
        self,
        config: dict[str, Any],
        directory: Path,
        temporary: Path,
        *,
        wait: bool = True,
        program: Sequence[str] = ("-m", "swiftkv.cli"),
        stderr: int | None = None,
    ) -> None:
        """`wait`: be entered only when every model serves. `program`: another than the command, for Python."""
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
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()

    def wait_line(self, pattern: str) -> re.Match[str]:
        """The next line of its output that matches."""
        while True:
            line = self._unread.get(timeout=DEADLINE_S)
            assert line is not None, f"ended before a line matched {pattern!r}:\n" + "\n".join(self.lines)
            if match := re.search(pattern, line):
                return match

    def wait_errors(self) -> str:
        """Wait until it has ended, and return its standard error, which `stderr` has made a pipe.

        Its standard output has a reader already, which `communicate` would disturb.
        """
        assert self.process.stderr is not None
        errors: str = self.process.stderr.read()
        self.process.wait(DEADLINE_S)
        return errors

    def admin_headers(self) -> dict[str, str]:
        """The header that opens `/admin`."""
        return {"Authorization": f"Bearer {find_admin_key(self.url)}"}

    def url_of(self, model: str) -> str:
        """The model's own URL, as printed, without `/v1`."""
        return next(line for line in self.lines if line.startswith(f"{model}: http")).split()[1].removesuffix("/v1")

    def engines(self) -> dict[str, psutil.Process]:
        """The engine processes that run now, by model."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                command = child.cmdline()
                if "swiftkv.engine.main" in command:
                    found[command[-1]] = child
        self._everybody.extend(found.values())
        return found

    def ready(self) -> dict[str, str]:
        """State by model, as `/ready` tells it."""
        return {name: view["state"] for name, view in self.engine_views().items()}

    def engine_views(self) -> dict[str, dict[str, Any]]:
        """All that `/ready` tells of each engine; its status must agree."""
        answer = httpx.get(f"{self.url}/ready", timeout=DEADLINE_S)
        content = answer.json()
        views: dict[str, dict[str, Any]] = content["engines"]
        assert content["models"] == {name: view["state"] for name, view in views.items()}
        assert answer.status_code == (200 if set(content["models"].values()) <= {"ready", "slow", "asleep"} else 503)
        return views

    def assert_nothing_left(self) -> None:
        """No process, no socket directory, nothing with our name in shared memory."""
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
    """Return the configuration of models that load fast and leave cores to each other."""
    return [
        {"name": name, "path": str(checkpoint), "dtype": "float32", "threads": 1, "kv_cache": {"memory": "64MiB"}}
        for name in names
    ]


def free_ports(count: int) -> list[int]:
    """Return ports on the loopback interface that nobody has, and that the system gives to nobody by itself.

    A port that the system gave and got back may be some client's by the time a test uses it.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def short_temporary_directory() -> Path:
    """pytest's own are too long for the path of a socket."""
    return Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
