"""Models that are added to a real node and removed from it, while others go on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from swiftkv.background import PATIENCE_VARIABLE
from swiftkv.cli import app
from swiftkv.machine_memory import allowed_memory_bytes
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


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    directory = tmp_path_factory.mktemp("models")
    config = {
        "node": {"port": 0, "load_timeout": "200s", "state_dir": str(directory / "state")},
        "models": small_models(checkpoint, "steady"),
    }
    with NodeProcess(config, directory, short_temporary_directory()) as node:
        yield node
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()
    remove(node.temporary)


def admin(node: NodeProcess, method: str, path: str, body: object = None) -> httpx.Response:
    url = f"{node.url}/admin/{path}"
    return httpx.request(method, url, json=body, headers=node.admin_headers(), timeout=DEADLINE_S)


def add(node: NodeProcess, section: dict[str, Any]) -> httpx.Response:
    return admin(node, "POST", "models", section)


def get(node: NodeProcess, path: str) -> httpx.Response:
    return httpx.get(f"{node.url}{path}", timeout=DEADLINE_S)


def greedy(node: NodeProcess, model: str) -> object:
    body = {"prompt": "def", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{node.url}/models/{model}/v1/completions", json=body, timeout=DEADLINE_S)
    return answer.json()["choices"][0]["text"]


def traces(node: NodeProcess) -> tuple[list[str], set[str]]:
    """Return what a model leaves in the node's directory, and the engines that run."""
    return sorted(path.name for path in node.temporary.rglob("*")), set(node.engines())


def assert_alone(node: NodeProcess) -> None:
    """There is no other model, and the one that there is serves, if not at once on a busy machine."""
    assert set(node.ready()) == {"steady"}
    wait_for("it to serve", lambda: node.ready()["steady"] == "ready")


@pytest.mark.parametrize("num_times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_model_comes_and_goes_and_others_do_not_notice(
    node: NodeProcess, checkpoint: Path, tmp_path: Path, num_times: int
) -> None:
    before = traces(node)
    [section] = small_models(checkpoint, "guest")
    section["endpoint"] = {"port": 0}
    (tmp_path / "guest.yaml").write_text(yaml.safe_dump(section))
    answers = []
    with streaming(node, "steady", max_tokens=MAX_MODEL_LEN - 100) as stream:
        for _ in range(num_times):
            added = CliRunner().invoke(app, ["models", "add", str(tmp_path / "guest.yaml"), "--url", node.url])
            assert added.stdout.startswith("guest is ready after "), added.stderr
            wait_for("both to serve", lambda: node.ready() == {"steady": "ready", "guest": "ready"})
            assert float(node.engines()["guest"].environ()[PATIENCE_VARIABLE]) > 0  # `steady` has a request
            answers.append(greedy(node, "guest"))
            listed = get(node, "/v1/models").json()["data"]
            assert [card["id"] for card in listed] == ["steady", "guest"]
            assert 'model_name="guest"' in get(node, "/metrics").text
            assert "guest" in str(get(node, "/openapi.json").json())
            assert get(node, "/models/guest/ready").status_code == 200
            gone = CliRunner().invoke(app, ["models", "remove", "guest", "--url", node.url])
            assert gone.stdout.startswith("guest is removed after "), gone.stderr
            assert_alone(node)
            assert complete(node, "guest").status_code == 404
            assert get(node, "/models/guest/metrics").status_code == 404
            assert 'model_name="guest"' not in get(node, "/metrics").text
            assert traces(node) == before
        assert next(stream.events)["choices"]
    assert answers == [greedy(node, "steady")] * num_times


def test_a_model_whose_port_cannot_be_opened_is_not_there(node: NodeProcess, checkpoint: Path) -> None:
    """A port takes sixteen descriptors."""
    [section] = small_models(checkpoint, "guest")
    section["endpoint"] = {"port": 0}
    gateway = psutil.Process(node.process.pid)
    soft, hard = gateway.rlimit(psutil.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(add, node, section)
        wait_for("its engine", lambda: "guest" in node.engines())
        highest = max(int(path.name) for path in Path(f"/proc/{gateway.pid}/fd").iterdir())
        try:
            gateway.rlimit(psutil.RLIMIT_NOFILE, (highest + 8, hard))
            answer = adding.result()
        finally:
            gateway.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "load_failed")
    assert_alone(node)


@pytest.mark.slow
def test_removal_waits_for_requests_in_flight_or_aborts_them(node: NodeProcess, checkpoint: Path) -> None:
    [section] = small_models(checkpoint, "guest")
    assert add(node, section).status_code == 201
    with streaming(node, "guest", max_tokens=MAX_MODEL_LEN - 100) as stream:
        kept = admin(node, "DELETE", "models/guest?timeout=50ms")
        assert (kept.status_code, kept.json()["error"]["code"]) == (409, "in_flight")
        assert complete(node, "guest").status_code == 200
        removed = admin(node, "DELETE", "models/guest?now=true")
        assert (removed.status_code, removed.json()["state"]) == (200, "removed")
        *_, last = stream.events
        assert "error" in last
    assert complete(node, "guest").status_code == 404


@pytest.mark.slow
def test_a_model_whose_engine_was_killed_can_be_removed(node: NodeProcess, checkpoint: Path) -> None:
    [section] = small_models(checkpoint, "guest")
    assert add(node, section).status_code == 201
    assert float(node.engines()["guest"].environ()[PATIENCE_VARIABLE]) == 0  # nobody has requests
    dead = node.engines()["guest"]
    dead.send_signal(signal.SIGKILL)
    wait_for("the engine to be gone", lambda: node.ready()["guest"] == "restarting")
    assert admin(node, "DELETE", "models/guest").status_code == 200  # while it waits for its restart
    assert set(node.engines()) == {"steady"}
    assert_alone(node)


@pytest.mark.slow
def test_a_model_is_not_removed_while_it_falls_asleep(node: NodeProcess, checkpoint: Path) -> None:
    [section] = small_models(checkpoint, "guest")
    assert add(node, section).status_code == 201
    node.engines()["guest"].send_signal(signal.SIGSTOP)  # so that its end takes seconds
    with ThreadPoolExecutor(1) as threads:
        sleeping = threads.submit(admin, node, "POST", "models/guest/sleep?level=2")
        wait_for("it to fall asleep", lambda: node.ready()["guest"] == "going to sleep")
        refused = admin(node, "DELETE", "models/guest?now=true")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_ready")
        assert sleeping.result().json()["state"] == "asleep"
    assert admin(node, "DELETE", "models/guest").status_code == 200
    assert_alone(node)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"name": "steady"}, "invalid_model", "'steady' is taken by models[0].name"),
        ({"naem": "x"}, "invalid_model", "naem: unknown key; did you mean name?"),
        ({"kv_cache": {"memory": "64KiB"}, "max_model_len": 4096}, "invalid_model", "kv_cache.memory: 64KiB holds"),
        ({"path": "/does/not/exist"}, "invalid_model", "path: "),
        ({"endpoint": {"port": "taken"}}, "invalid_model", "endpoint.port: "),
        ({"device": "cuda:7", "dtype": "bfloat16"}, "invalid_model", "device"),
    ],
)
def test_a_model_that_cannot_be_leaves_the_node_as_it_was(
    node: NodeProcess, checkpoint: Path, change: dict[str, Any], code: str, says: str
) -> None:
    before = traces(node)
    if change.get("endpoint") == {"port": "taken"}:
        change = {"endpoint": {"port": int(node.url.rpartition(":")[2])}}
    [section] = small_models(checkpoint, "guest")
    refused = add(node, section | change)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == code
    assert says in refused.json()["error"]["message"]
    assert traces(node) == before
    assert_alone(node)


def test_a_model_must_fit_the_machine_beside_those_that_are_awake(node: NodeProcess, checkpoint: Path) -> None:
    [section] = small_models(checkpoint, "guest")
    weight_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    fits_alone_bytes = allowed_memory_bytes() - 2 * weight_bytes - (32 << 20)  # half of the pool of `steady`
    refused = add(node, section | {"kv_cache": {"memory": f"{fits_alone_bytes >> 10}KiB"}})
    assert refused.status_code == 400
    assert "kv_cache.memory: steady, guest: pools of" in refused.json()["error"]["message"]
    assert_alone(node)


def test_a_model_that_does_not_load_leaves_the_node_as_it_was(
    node: NodeProcess, tmp_path: Path, checkpoint: Path
) -> None:
    before = traces(node)
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: None if file.suffix == ".json" else 4096])
    [section] = small_models(tmp_path, "guest")
    refused = add(node, section)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "load_failed")
    assert "before it was ready" in refused.json()["error"]["message"]
    assert traces(node) == before
    assert_alone(node)
    assert complete(node, "steady").status_code == 200


def test_a_model_goes_by_its_other_name(node: NodeProcess, checkpoint: Path) -> None:
    [section] = small_models(checkpoint, "guest")
    assert add(node, section | {"served_model_name": "gpt-4"}).status_code == 201
    assert admin(node, "POST", "models/gpt-4/reload").status_code == 200
    assert get(node, "/models/guest/ready").status_code == 200
    assert admin(node, "DELETE", "models/gpt-4").status_code == 200
    assert_alone(node)


def test_a_tokenizer_that_cannot_be_read_leaves_the_node_as_it_was(
    node: NodeProcess, tmp_path: Path, checkpoint: Path
) -> None:
    """A file of a newer version, for instance, is a plain Exception of the library."""
    before = traces(node)
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"] = {"type": "BPE", "vocab": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    [section] = small_models(tmp_path, "guest")
    refused = add(node, section)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "load_failed")
    assert "no usable tokenizer" in refused.json()["error"]["message"]
    assert traces(node) == before
    assert_alone(node)


def test_a_failure_that_nobody_foresaw_leaves_the_node_as_it_was(node: NodeProcess, checkpoint: Path) -> None:
    """A program that cleans up temporary directories may take that of the sockets."""
    before = traces(node)
    [sockets] = node.temporary.iterdir()
    away = node.temporary / "taken-away"
    sockets.rename(away)
    [section] = small_models(checkpoint, "guest")
    assert add(node, section).status_code == 500
    away.rename(sockets)
    assert traces(node) == before
    assert_alone(node)
    assert add(node, section).status_code == 201
    assert admin(node, "DELETE", "models/guest").status_code == 200
    assert_alone(node)


def test_models_do_not_change_while_the_node_starts(checkpoint: Path, tmp_path: Path, temporary: Path) -> None:
    """One engine is stopped while it loads, so that the node has opened its ports and is not ready yet."""
    [port] = free_ports(1)
    config = {"node": {"port": port}, "models": small_models(checkpoint, "early", "late")}
    with NodeProcess(config, tmp_path, temporary, wait=False) as node:
        node.url = f"http://127.0.0.1:{port}"
        wait_for("the engine of late", lambda: "late" in node.engines())
        node.engines()["late"].send_signal(signal.SIGSTOP)
        wait_for("early to serve", lambda: answers(node) and node.ready()["early"] == "ready")
        [section] = small_models(checkpoint, "guest")
        for refused in (
            admin(node, "DELETE", "models/early"),
            admin(node, "DELETE", "models/late"),
            add(node, section),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
            assert "the node is starting" in refused.json()["error"]["message"]
        node.engines()["late"].send_signal(signal.SIGCONT)
        node.wait_line("all models: ")
        assert admin(node, "DELETE", "models/early").status_code == 200
        assert set(node.ready()) == {"late"}
        assert complete(node, "late").status_code == 200


def answers(node: NodeProcess) -> bool:
    try:
        return bool(get(node, "/ready"))
    except httpx.TransportError:
        return False


def test_the_only_model_stays(node: NodeProcess) -> None:
    assert admin(node, "DELETE", "models/steady").json()["error"]["code"] == "only_model"
    assert admin(node, "DELETE", "models/nobody").status_code == 404
