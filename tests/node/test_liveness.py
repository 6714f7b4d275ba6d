"""Engines that hang, stop or say nonsense, tasks that fail, and output that goes nowhere: real processes, real HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import yaml
import zmq

from swiftkv.engine.messages import StepOutput
from tests.support.completions import complete, streaming
from tests.support.node_process import (
    DEADLINE_S,
    NodeProcess,
    free_ports,
    remove,
    short_temporary_directory,
    small_models,
    wait_for,
)

MOST_EXPENDABLE = 1000
"""The highest score that there is: some containers begin with it."""

WATCHDOG_S = 8.0
"""An engine is seen to be stopped for about so long before it is ended."""


def config(checkpoint: Path, *names: str, **node: Any) -> dict[str, Any]:
    return {
        "node": {"port": 0, "restart": {"limit": 20, "backoff": "50ms"}, **node},
        "models": small_models(checkpoint, *names),
    }


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Tests are about `other`; `steady` goes on beside it."""
    settings = config(checkpoint, "steady", "other", watchdog=f"{WATCHDOG_S}s")
    with NodeProcess(settings, tmp_path_factory.mktemp("node"), short_temporary_directory()) as node:
        yield node
    remove(node.temporary)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def metric(node: NodeProcess, name: str, **labels: str) -> float | None:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.startswith(f"{name}{{") and wanted <= set(sample.partition("{")[2].removesuffix("}").split(",")):
            return float(value)
    return None


def wait_until_restarted(node: NodeProcess, model: str, dead: psutil.Process) -> None:
    def is_back() -> bool:
        view = node.engine_views()[model]
        return view["state"] == "ready" and view["pid"] != dead.pid

    wait_for("the restart", is_back)


def is_at_rest(view: dict[str, Any]) -> bool:
    return bool(view["state"] == "ready" and view["in_flight"] == 0)


def why_not_ready(node: NodeProcess) -> str | None:
    answer = httpx.get(f"{node.url}/ready", timeout=DEADLINE_S)
    return None if answer.status_code == 200 else str(answer.json()["error"]["message"])


def status(node: NodeProcess, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swiftkv", "status", "--url", node.url, *options]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def test_an_engine_that_stops_with_work_is_ended_and_started_again(node: NodeProcess) -> None:
    dead = node.engines()["other"]
    with streaming(node, "steady", max_tokens=2000) as steady, streaming(node, "other", max_tokens=30000) as broken:
        dead.send_signal(signal.SIGSTOP)
        wait_for("it to be seen", lambda: why_not_ready(node))
        *_, last = broken.events
        message = last["error"]["message"]
        assert message.startswith("model 'other' stopped and is being restarted: its engine made no progress for ")
        assert message.endswith(" s and was ended")
        *_, last = steady.events
        assert last["choices"][0]["finish_reason"] == "length"
    node.wait_line(r"other: the engine made no progress for \d+ s and was ended; starting it again")
    wait_until_restarted(node, "other", dead)
    assert not dead.is_running()
    assert complete(node, "other").status_code == 200
    assert metric(node, "swiftkv:engine_restarts_total", model_name="other", reason="hung") == 1


def test_a_stopped_engine_without_work_is_shown_and_left_alone(node: NodeProcess) -> None:
    wait_for("it to be at rest", lambda: is_at_rest(node.engine_views()["other"]))
    engine = node.engines()["other"]
    with stopped(engine):
        wait_for(
            "more than the watchdog",
            lambda: (node.engine_views()["other"]["progress_age_s"] or 0.0) > 1.5 * WATCHDOG_S,
        )
        wait_for("the other to answer", lambda: node.ready() == {"steady": "ready", "other": "stopped"})
        assert why_not_ready(node) == "not ready: 'other' is stopped (is stopped by a signal or a debugger)"
        assert metric(node, "swiftkv:engine_state", model_name="other", state="stopped") == 1
        assert metric(node, "swiftkv:engine_state", model_name="other", state="ready") == 0
        assert metric(node, "swiftkv:engine_progress_age_seconds", model_name="other") > 1.5 * WATCHDOG_S
        shown = status(node)
        assert shown.returncode == 1
        rows = [line.split()[:2] for line in shown.stdout.splitlines()[1:3]]
        assert rows == [["steady", "ready"], ["other", "stopped"]]
        assert str(engine.pid) in shown.stdout
        assert "other: the engine is stopped by a signal or a debugger" in shown.stdout
        assert json.loads(status(node, "--json").stdout)["engines"]["other"]["pid"] == engine.pid
    wait_for("it to go on", lambda: node.ready()["other"] == "ready")
    assert node.engines()["other"].pid == engine.pid
    assert status(node).returncode == 0
    assert complete(node, "other").status_code == 200


@pytest.mark.slow
def test_a_stopped_engine_that_is_to_sleep_leaves_the_model_asleep(node: NodeProcess) -> None:
    engine = node.engines()["other"]
    engine.send_signal(signal.SIGSTOP)
    url, headers = f"{node.url}/admin/models/other", node.admin_headers()
    slept = httpx.post(f"{url}/sleep?level=1", headers=headers, timeout=DEADLINE_S)
    assert slept.json()["state"] == "asleep"
    wait_for("its end", lambda: not engine.is_running())
    httpx.post(f"{url}/wake", headers=headers, timeout=DEADLINE_S).raise_for_status()
    assert complete(node, "other").status_code == 200


def test_an_engine_that_is_killed_by_a_real_time_signal_comes_back(node: NodeProcess) -> None:
    dead = node.engines()["other"]
    dead.send_signal(40)
    node.wait_line("other: the engine was killed by real-time signal 40; starting it again")
    wait_until_restarted(node, "other", dead)
    assert complete(node, "other").status_code == 200


def test_an_engine_that_says_what_makes_no_sense_is_ended_and_started_again(node: NodeProcess) -> None:
    """The message can be decoded, but has more requests than tokens."""
    dead = node.engines()["other"]
    (directory,) = node.temporary.glob("swiftkv-*.ipc")
    with zmq.Context() as context, context.socket(zmq.PUSH) as outputs, streaming(node, "other", 30000) as broken:
        outputs.connect(f"ipc://{directory}/1.outputs")
        outputs.send(msgspec.msgpack.encode(StepOutput(bytes(16), bytes(4), bytes(1))))
        *_, last = broken.events
        assert "sent a malformed message" in last["error"]["message"]
    wait_until_restarted(node, "other", dead)
    assert complete(node, "other").status_code == 200
    assert metric(node, "swiftkv:engine_restarts_total", model_name="other", reason="bad_message") == 1


@pytest.mark.skipif(not os.access("/proc/self/oom_score_adj", os.W_OK), reason="scores stay as they are here")
def test_the_kernel_prefers_engines_when_memory_runs_out(node: NodeProcess) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    of_node = score(node.process.pid)
    assert score(node.engines()["steady"].pid) > of_node or of_node == MOST_EXPENDABLE


def test_a_stopped_engine_does_not_outlive_a_killed_node(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    with NodeProcess(config(checkpoint, "only"), tmp_path, temporary) as node:
        engine = node.engines()["only"]
        engine.send_signal(signal.SIGSTOP)
        wait_for("it to stop", lambda: engine.status() == psutil.STATUS_STOPPED)
        node.process.kill()
        psutil.wait_procs([engine], timeout=DEADLINE_S)
        assert not engine.is_running()


def test_an_engine_that_does_not_load_in_time_is_ended(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    settings = config(checkpoint, "only", load_timeout="100ms")
    with NodeProcess(settings, tmp_path, temporary, wait=False, stderr=subprocess.PIPE) as node:
        errors = node.wait_errors()
        assert node.process.returncode == 1
        reason = "did not load within 0.1 s (raise node.load_timeout for models that take longer) and was ended"
        assert f"only: the engine {reason}" in errors
        node.assert_nothing_left()


IMPATIENT = """
from swiftkv import cli, node

node._LOADING_S = 0.01
cli.app()
"""


def test_the_node_says_how_far_its_engines_are_while_they_load(
    checkpoint: Path, tmp_path: Path, temporary: Path
) -> None:
    settings = config(checkpoint, "only")
    with NodeProcess(settings, tmp_path, temporary, wait=False, program=("-c", IMPATIENT)) as node:
        # With the time, as lines of the log have it, so that both can be compared.
        when = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
        node.wait_line(when + r"swiftkv \S+: starting only$")
        node.wait_line(when + r"only: \S+ of \S+iB of weights loaded")
        node.wait_line(when + "only: ready after")
        node.process.terminate()
        node.wait_line(when + "stopped$")


DEFECT = """
from swiftkv import cli, restarts

def fail(self, now_s):
    raise RuntimeError("a defect")

restarts.Restarts.next_delay_s = fail
cli.app()
"""


def test_a_defect_in_a_supervisor_stops_the_node_loudly(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    settings = config(checkpoint, "one", "two")
    with NodeProcess(settings, tmp_path, temporary, program=("-c", DEFECT), stderr=subprocess.PIPE) as node:
        node.engines()["one"].kill()
        errors = node.wait_errors()
        assert node.process.returncode == 1
        assert "the supervisor of one failed, which ends the node" in errors
        assert "RuntimeError: a defect" in errors
        node.assert_nothing_left()


@contextmanager
def output_that_goes_nowhere(kind: str) -> Iterator[int | None]:
    """A file descriptor to write to, or `None` for none at all."""
    if kind == "full disk":
        fd = os.open("/dev/full", os.O_WRONLY)
        yield fd
        os.close(fd)
        return
    if kind == "closed":
        yield None
        return
    reader, writer = os.pipe()
    if kind == "reader has gone":
        os.close(reader)
    else:  # it has stalled: the pipe is full
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    if kind != "reader has gone":
        os.close(reader)


@pytest.mark.parametrize(
    "kind",
    [
        "reader has stalled",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full disk", "reader has gone", "closed")),
    ],
)
def test_output_that_goes_nowhere_holds_nobody_up(kind: str, checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    file = tmp_path / "node.yaml"
    [port] = free_ports(1)
    file.write_text(yaml.safe_dump(config(checkpoint, "only", port=port)))
    arguments = ["-m", "swiftkv", "serve", str(file)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with output_that_goes_nowhere(kind) as fd:
        if fd is None:
            shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, *arguments]
            process = subprocess.Popen(shell, env=environment)
        else:
            process = subprocess.Popen([sys.executable, *arguments], stdout=fd, stderr=fd, env=environment)
        try:
            engine = restart_engine_while_logging(port, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert not engine.is_running()
            assert not list(temporary.iterdir())
        finally:
            process.kill()
            process.wait()


def restart_engine_while_logging(port: int, process: subprocess.Popen[bytes]) -> psutil.Process:
    """Kill the node's only engine and return the next, while the node has more to say than a pipe holds."""
    url = f"http://127.0.0.1:{port}"

    def pid() -> int | None:
        assert process.poll() is None
        try:
            answer = httpx.get(f"{url}/ready", timeout=DEADLINE_S).json()
        except httpx.ConnectError:
            return None
        found: int | None = answer["engines"]["only"]["pid"]
        return found

    first = wait_for("the engine to serve", pid)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"nonsense\r\n\r\n")
            client.recv(1 << 16)
    os.kill(first, signal.SIGKILL)
    second = wait_for("the restart", lambda: (found := pid()) != first and found)
    body = {"prompt": "def", "max_tokens": 4, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
    return psutil.Process(second)
