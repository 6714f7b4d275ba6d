"""Faults of a node that serves: real processes, real HTTP, tiny random models."""

from __future__ import annotations

import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from swiftkv.cli import app
from swiftkv.node import stop_signals
from tests.support.completions import complete, streaming
from tests.support.node_process import (
    DEADLINE_S,
    MAX_MODEL_LEN,
    NodeProcess,
    free_ports,
    remove,
    short_temporary_directory,
    small_models,
    wait_for,
)

RUN_COMMAND = "runpy.run_module('swiftkv', run_name='__main__', alter_sys=True)"


def config(checkpoint: Path, *names: str, **node: Any) -> dict[str, Any]:
    models = small_models(checkpoint, *names)
    models[0]["endpoint"] = {"port": 0}
    return {
        "node": {"port": 0, "allow_priority": True, "restart": {"limit": 2, "backoff": "50ms"}, **node},
        "models": models,
    }


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Three models; a test that kills an engine kills its own."""
    directory = tmp_path_factory.mktemp("node")
    with NodeProcess(config(checkpoint, "steady", "killed", "doomed"), directory, short_temporary_directory()) as node:
        yield node
    remove(node.temporary)


def test_the_printed_lines_can_be_pasted(node: NodeProcess) -> None:
    lines = [shlex.split(line) for line in node.lines if line.startswith("  curl")]
    assert len(lines) == 3
    for line in lines:
        url, headers, body = line[1], line[line.index("-H") + 1], line[line.index("-d") + 1]
        answer = httpx.post(url, headers=dict([headers.split(": ")]), content=body, timeout=DEADLINE_S)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    assert len({node.url_of("steady"), node.url_of("killed"), node.url_of("doomed")}) == 3
    assert not node.url_of("steady").startswith(node.url)


@pytest.mark.parametrize("temperature", [0, 1e-300, 1, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**31 - 1, "top_p": 1e-300},
        {"top_k": 1, "top_p": 1e-9, "min_p": 1},
        {"top_k": -1, "min_p": 1e-300},
        {"repetition_penalty": 0.01, "presence_penalty": 2, "frequency_penalty": 2},
        {"repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": -2},
        {"logit_bias": {str(token): -100 for token in range(300)}, "logprobs": 20},
        {"logit_bias": {"5": 100, "6": 100}, "logprobs": 0, "prompt_logprobs": 20},
        {"seed": -(2**63) + 1, "priority": 2**31 - 1, "n": 3},
        {"seed": 2**63 - 1, "priority": -(2**31) + 1, "n": 128},
        {"min_tokens": 4, "stop_token_ids": list(range(256)), "ignore_eos": False},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_the_ends_of_what_a_field_may_be_harm_no_engine(
    node: NodeProcess, fields: dict[str, Any], temperature: float
) -> None:
    engine = node.engines()["steady"].pid
    body = {"prompt": "def", "max_tokens": 4, "ignore_eos": True, "temperature": temperature, **fields}
    answer = httpx.post(f"{node.url}/models/steady/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == fields.get("n", 1)
    assert node.engines()["steady"].pid == engine


def test_a_killed_engine_fails_its_requests_alone_and_comes_back(node: NodeProcess) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(streaming(node, "steady", max_tokens=2000))
        broken = stack.enter_context(streaming(node, "killed", max_tokens=MAX_MODEL_LEN - 100))
        waiting = stack.enter_context(streaming(node, "killed", max_tokens=MAX_MODEL_LEN - 100))
        dead = node.engines()["killed"]
        dead.send_signal(signal.SIGKILL)
        for stream in (broken, waiting):
            *_, last = stream.events
            assert "model 'killed' stopped" in last["error"]["message"]
        *_, last = other.events
        assert last["choices"][0]["finish_reason"] == "length"
    node.wait_line(r"killed: the engine was killed by SIGKILL; starting it again in 0.05 s \(restart 1 of 2")
    wait_for("the restart", lambda: node.ready() == {"steady": "ready", "killed": "ready", "doomed": "ready"})
    assert node.engines()["killed"].pid != dead.pid
    assert complete(node, "killed").status_code == 200


@pytest.mark.slow
def test_engines_import_nothing_from_the_working_directory_and_outlive_it(
    checkpoint: Path, tmp_path: Path, temporary: Path
) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "safetensors.py").write_text("raise SystemExit('imported from the working directory')")
    program = ("-P", "-m", "swiftkv")
    with NodeProcess(config(checkpoint, "only"), tmp_path, temporary, program=program, cwd=directory) as node:
        remove(directory)
        node.engines()["only"].send_signal(signal.SIGKILL)
        node.wait_line("only: serves again")
        assert complete(node, "only").status_code == 200


def test_a_crash_loop_ends_and_the_others_serve(node: NodeProcess) -> None:
    for attempt in range(3):
        wait_for("doomed to serve", lambda: node.ready()["doomed"] == "ready")
        node.engines()["doomed"].send_signal(signal.SIGKILL)
        stays_down = "doomed: .* SIGKILL; it stays down until you start it: swiftkv models start doomed"
        node.wait_line(rf"doomed: .*restart {attempt + 1} of 2" if attempt < 2 else stays_down)
    states = {"steady": "ready", "killed": "ready", "doomed": "down"}
    wait_for("it to be down alone", lambda: node.ready() == states)
    refused = complete(node, "doomed")
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert refused.json()["error"]["message"] == (
        "model 'doomed' is down until you start it (swiftkv models start doomed): its engine was killed by SIGKILL"
    )
    assert complete(node, "steady").status_code == 200
    assert "doomed" not in node.engines()
    started = CliRunner().invoke(app, ["models", "start", "doomed", "--url", node.url])
    assert started.stdout == "doomed is being started; `swiftkv status` shows when it serves\n"
    node.wait_line("doomed: serves again")
    assert complete(node, "doomed").status_code == 200
    again = CliRunner().invoke(app, ["models", "start", "doomed", "--url", node.url])
    assert (again.exit_code, again.stderr) == (1, "swiftkv: model 'doomed' is ready, not down\n")


def test_models_that_are_added_leave_descriptors_to_clients(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    """The node may open 64 + 128 files for itself, 24 for each of two models, and 20 for clients."""
    settings = config(checkpoint, "only", port=free_ports(1)[0])
    program = ("-c", "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (260, 260)); " + RUN_COMMAND)
    [first, second] = small_models(checkpoint, "first", "second")
    with NodeProcess(settings, tmp_path, temporary, program=program) as node:

        def change(method: str, path: str, **body: Any) -> httpx.Response:
            url = f"{node.url}/admin/{path}"
            return httpx.request(method, url, headers=node.admin_headers(), timeout=DEADLINE_S, **body)

        assert change("POST", "models", json=first).status_code == 201
        refused = change("POST", "models", json=second)
        assert refused.status_code == 400
        assert "no 24 descriptors for another model" in refused.json()["error"]["message"]
        assert change("DELETE", "models/first").status_code == 200
        assert change("POST", "models", json=second).status_code == 201


@pytest.mark.slow
def test_uploads_leave_descriptors_to_the_node_itself(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    settings = config(checkpoint, "only", port=free_ports(1)[0], state_dir=str(tmp_path / "state"))
    program = ("-c", "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600)); " + RUN_COMMAND)
    upload = (
        b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 30000\r\n"
        b"content-type: multipart/form-data; boundary=B\r\n\r\n"
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    )
    with NodeProcess(settings, tmp_path, temporary, program=program) as node, ExitStack() as connections:
        for _ in range(400):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", settings["node"]["port"])))
            with suppress(ConnectionError):  # it was refused
                connection.sendall(upload)
        node.engines()["only"].send_signal(signal.SIGKILL)
        node.wait_line("only: serves again")
        assert node.process.poll() is None
        assert psutil.Process(node.process.pid).num_fds() < 600


def test_sigterm_aborts_what_outlasts_the_timeout_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, temporary: Path
) -> None:
    with (
        NodeProcess(config(checkpoint, "only", shutdown_timeout="500ms"), tmp_path, temporary) as node,
        streaming(node, "only", max_tokens=MAX_MODEL_LEN - 100) as stream,
        httpx.Client(base_url=node.url, timeout=DEADLINE_S) as client,
    ):
        assert client.get("/ready").status_code == 200  # a connection that is there before the end
        assert list(temporary.glob("swiftkv-*.ipc"))
        node.process.send_signal(signal.SIGTERM)
        node.wait_line("stopping: up to 0.5 s for 1 sequences in flight")
        *_, last = stream.events
        assert last["error"]["message"] == "model 'only' is shutting down"
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()


UNLESS_IGNORED = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="tests run under nohup")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=UNLESS_IGNORED)])
def test_a_signal_while_models_load_leaves_nothing(
    checkpoint: Path, tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    with NodeProcess(config(checkpoint, "one", "two"), tmp_path, temporary, wait=False) as node:
        wait_for("both engines to be started", lambda: set(node.engines()) == {"one", "two"})
        node.process.send_signal(number)
        node.wait_line(" stopped$")
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()


def test_a_node_that_nohup_started_outlives_its_terminal() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_does_not_wait(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    with (
        NodeProcess(config(checkpoint, "only", shutdown_timeout="1h"), tmp_path, temporary) as node,
        streaming(node, "only", max_tokens=MAX_MODEL_LEN - 100) as stream,
    ):
        node.process.send_signal(signal.SIGINT)
        node.wait_line("stopping: up to 3600 s")
        refused = complete(node, "only")
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        node.process.send_signal(signal.SIGINT)
        *_, last = stream.events
        assert last["error"]["message"] == "model 'only' is shutting down"
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()


def test_a_node_waits_until_the_last_one_at_its_port_has_stopped(
    checkpoint: Path, tmp_path: Path, temporary: Path
) -> None:
    """The engine of the last one stands still, so that its request ends when the test wants it to."""
    settings = config(checkpoint, "only", port=free_ports(1)[0], shutdown_timeout="1h", watchdog="off")
    settings["node"]["state_dir"] = str(tmp_path / "state")
    with ExitStack() as ends:
        last = ends.enter_context(NodeProcess(settings, tmp_path, temporary))
        (engine,) = last.engines().values()
        stream = ends.enter_context(streaming(last, "only", max_tokens=MAX_MODEL_LEN - 100))
        engine.send_signal(signal.SIGSTOP)
        last.process.send_signal(signal.SIGTERM)
        last.wait_line("stopping: up to 3600 s for 1 sequences in flight")
        node = ends.enter_context(NodeProcess(settings, tmp_path, temporary, wait=False))
        node.wait_line(f"waiting up to 3630 s for the node that had port {settings['node']['port']} to stop")
        engine.send_signal(signal.SIGCONT)
        last.process.send_signal(signal.SIGTERM)
        *_, end = stream.events
        assert end["error"]["message"] == "model 'only' is shutting down"
        assert last.process.wait(DEADLINE_S) == 0
        node.url = node.wait_line(r"all models: (http\S+)/v1")[1]
        assert node.url == last.url
        assert complete(node, "only").status_code == 200


def test_a_killed_node_takes_its_engines_along_and_the_next_one_tidies_up(
    checkpoint: Path, tmp_path: Path, temporary: Path
) -> None:
    with (
        NodeProcess(config(checkpoint, "only"), tmp_path, temporary) as node,
        streaming(node, "only", max_tokens=MAX_MODEL_LEN - 100),
    ):
        engines = list(node.engines().values())
        node.process.kill()
        gone, alive = psutil.wait_procs(engines, timeout=DEADLINE_S)
        assert len(gone) == 1
        assert not alive
    stale = set(temporary.iterdir())
    assert len(stale) == 1
    with NodeProcess(config(checkpoint, "only"), tmp_path, temporary) as node:
        assert not stale & set(temporary.iterdir())
        with streaming(node, "only", max_tokens=400) as stream:
            node.process.send_signal(signal.SIGTERM)
            *_, last = stream.events  # it is let finish
            assert last["choices"][0]["finish_reason"] == "length"
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()
