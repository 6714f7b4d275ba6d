"""A real Mooncake Store for one test: its master, and a process that gives it memory."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.support.node_process import free_ports, wait_for

HOST = "127.0.0.1"
SEGMENT_BYTES = 64 << 20
LEASE_MS = 5000


class MooncakeStore:
    """The master's process; it can be ended and started again at the same address, but then knows no objects."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = free_ports(3)
        self.address = f"{HOST}:{self._ports[0]}"
        self.master = self._start_master()
        self._donor: subprocess.Popen[bytes] | None = None

    def restart(self) -> None:
        """Start the master that was killed."""
        self.master = self._start_master()

    def give_memory(self, num_bytes: int) -> None:
        """Start a process that gives the store memory for objects."""
        arguments = [f"--host={HOST}", f"--master_server_address={self.address}", f"--port={self._ports[2]}"]
        arguments += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--global_segment_size={num_bytes}"]
        self._donor = self._start("mooncake_client", arguments)
        wait_for("memory", lambda: self._has_said("mooncake_client", "client service"))

    def close(self) -> None:
        """End both processes at once."""
        for process in (self._donor, self.master):
            if process is not None:
                process.kill()
                process.wait()

    def _start_master(self) -> subprocess.Popen[bytes]:
        rpc, metrics, _ = self._ports
        arguments = [f"--rpc_address={HOST}", f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
        master = self._start("mooncake_master", [*arguments, f"--default_kv_lease_ttl={LEASE_MS}"])
        wait_for("mooncake_master", lambda: _answers(rpc) or master.poll() is not None)
        assert master.poll() is None, (self._directory / "mooncake_master").read_text()
        return master

    def _start(self, program: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self._directory / program).open("wb") as log:
            command = [_program(program), "--logtostderr", *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "MC_LOG_LEVEL": "INFO"})

    def _has_said(self, program: str, text: str) -> bool:
        return text in (self._directory / program).read_text(errors="replace").lower()


@contextmanager
def mooncake_store(memory_bytes: int = SEGMENT_BYTES) -> Iterator[MooncakeStore]:
    """Start a store, with 0 bytes without memory. Skips the test where its package or libraries are not installed."""
    skip_without_mooncake()
    with TemporaryDirectory(prefix="swiftkv-mooncake-") as directory, closing(MooncakeStore(Path(directory))) as store:
        if memory_bytes:
            store.give_memory(memory_bytes)
        yield store


def skip_without_mooncake() -> None:
    """Skip the test on a machine that cannot run a store, and say what to install."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"{error}: pip install swiftkv[mooncake], and apt-get install libibverbs1 librdmacm1")


@contextmanager
def held_still(store: MooncakeStore) -> Iterator[None]:
    """Suspend the master, so that it does not answer, until the end of the block."""
    store.master.send_signal(signal.SIGSTOP)
    wait_for("the master to stop", lambda: psutil.Process(store.master.pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        store.master.send_signal(signal.SIGCONT)


def _program(name: str) -> str:
    """Return the path of a program of the package, and make it executable, which not every installer does."""
    directories = importlib.import_module("mooncake").__path__  # two if one environment is based on another
    path = next(path for directory in directories if (path := Path(directory) / name).exists())
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _answers(port: int) -> bool:
    with closing(socket.socket()) as caller:
        return caller.connect_ex((HOST, port)) == 0
