"""A real Redis server for one test, on a Unix socket."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAXMEMORY = 64 << 20


class RedisServer:
    """A server process; it can be ended and started again at the same address."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory = directory
        self._arguments = arguments
        self.url = f"unix://{directory}/redis.sock"
        self.process = self._start()

    def restart(self) -> None:
        """Start the server that was ended, empty."""
        self.process = self._start()

    def kill(self) -> None:
        """End the server at once."""
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[str]:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self._directory}/redis.sock"]
        command += ["--dir", str(self._directory), "--save", "", "--appendonly", "no", *self._arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "ready to accept connections" in line.lower():
                return process
        raise AssertionError(f"redis-server did not start: {''.join(said)}")


@contextmanager
def redis_server(maxmemory: int = MAXMEMORY, policy: str = "allkeys-lru", *arguments: str) -> Iterator[RedisServer]:
    """Start a server. Skips the test where the server or the client is not installed."""
    pytest.importorskip("redis", reason="the package redis is not here: pip install swiftkv[redis]")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not here: apt-get install redis-server")
    directory = Path(tempfile.mkdtemp(prefix="swiftkv-redis-", dir="/tmp"))  # a socket's path must be short
    server = RedisServer(directory, "--maxmemory", str(maxmemory), "--maxmemory-policy", policy, *arguments)
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)
