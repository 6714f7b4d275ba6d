"""Models of a real node that sleep and wake, while others go on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from swiftkv.cli import app
from tests.support.completions import complete
from tests.support.lending_node import Conversation, LendingNode, Reference, conversation, meanwhile, serving
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for

CONVERSATIONS = [conversation(seed) for seed in range(6)]
OTHERS = [conversation(seed, num_turns=2, max_tokens=(4, 12)) for seed in range(100, 104)]


@pytest.fixture(scope="module")
def node(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingNode]:
    """`float32` has a pool of 384 tokens and borrows from `broad`, half of it at most while that is awake."""
    directory = tmp_path_factory.mktemp("sleep")
    shutil.copytree(checkpoints["broad"], directory / "alone")
    models: list[dict[str, Any]] = [
        {"name": "float32", "role": "master", "path": str(checkpoints["master"]), "dtype": "float32",
         "max_num_batched_tokens": 256, "max_num_seqs": 16, "kv_cache": {"memory": "1152KiB"}},
        {"name": "broad", "path": str(checkpoints["broad"]), "kv_cache": {"memory": "12MiB"},
         "lending": {"budget": "25%", "window": "200ms"}, "auto_wake": True},
        {"name": "alone", "path": "alone", "kv_cache": {"memory": "4MiB"}},
    ]  # fmt: skip
    models = [{"threads": 1, **model} for model in models]
    restart = {"limit": 20, "backoff": "50ms"}
    config = {
        "node": {"port": 0, "load_timeout": "200s", "restart": restart, "lending": {"max_wait": "100s"}},
        "models": models,
    }
    temporary = short_temporary_directory()
    with serving(config, directory, temporary) as node:
        yield node
        node.process.process.send_signal(signal.SIGTERM)
        assert node.process.process.wait(DEADLINE_S) == 0
        node.process.assert_nothing_left()
    remove(temporary)


def steer(node: LendingNode, *command: str) -> str:
    done = CliRunner().invoke(app, ["models", *command, "--url", node.process.url])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def budget(node: LendingNode) -> int | None:
    found: int | None = node.model("broad")["budget_bytes"]
    return found


def lent_bytes(node: LendingNode) -> int:
    found: int | None = node.model("broad")["lent_bytes"]
    return found or 0


def test_a_master_streams_from_the_pool_of_a_worker_that_sleeps(node: LendingNode, reference: Reference) -> None:
    expected = reference.answers("float32", CONVERSATIONS)
    before = budget(node)
    assert steer(node, "sleep", "broad").startswith("broad is asleep after ")
    pool_bytes = node.model("broad")["pool_bytes"]
    assert budget(node) == pool_bytes
    wait_for("more to be lent than the budget", lambda: lent_bytes(node) > 2 * (before or 0))
    assert node.hold_all("float32", CONVERSATIONS) == expected
    assert node.metric("swiftkv:kv_tier_tokens", model_name="float32", tier="peer") > 0
    states = {"float32": "ready", "broad": "asleep", "alone": "ready"}
    wait_for("the others to answer", lambda: node.process.ready() == states)
    assert steer(node, "wake", "broad").startswith("broad is ready after ")
    wait_for("the budget of before", lambda: budget(node) == before and lent_bytes(node) <= before)
    assert node.hold_all("broad", OTHERS) == reference.answers("broad", OTHERS)
    assert node.hold_all("float32", CONVERSATIONS) == expected


def test_requests_wake_it_while_its_memory_is_in_use(node: LendingNode, reference: Reference) -> None:
    """It falls asleep again and again, with a master at work in its pool."""

    def put_to_sleep() -> None:
        url = f"{node.process.url}/admin/models/broad/sleep"
        answer = httpx.post(url, headers=node.process.admin_headers(), timeout=DEADLINE_S)
        assert answer.status_code in (200, 409), answer.text  # it may be waking up, or just falling asleep

    with meanwhile(lambda: [node.hold("broad", turns) for turns in OTHERS[:1]], 0.1), meanwhile(put_to_sleep, 0.3):
        assert node.hold_all("float32", CONVERSATIONS) == reference.answers("float32", CONVERSATIONS)
    assert node.hold_all("broad", OTHERS) == reference.answers("broad", OTHERS)


def test_a_killed_engine_stays_asleep_and_wakes_as_a_new_process(node: LendingNode, reference: Reference) -> None:
    assert "asleep" in steer(node, "sleep", "broad")
    node.process.engines()["broad"].send_signal(signal.SIGKILL)
    wait_for("its end to be noticed", lambda: node.process.engine_views()["broad"]["pid"] is None)
    assert node.process.ready()["broad"] == "asleep"
    assert node.hold_all("float32", CONVERSATIONS[:2]) == reference.answers("float32", CONVERSATIONS[:2])
    assert node.hold_all("broad", OTHERS) == reference.answers("broad", OTHERS)  # a request wakes it


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_again_is_down_and_the_others_serve(node: LendingNode) -> None:
    assert "asleep" in steer(node, "sleep", "alone", "--level", "2")
    assert "alone" not in node.process.engines()
    checkpoint = node.process.file.parent / "alone"
    hidden = checkpoint.rename(checkpoint.with_name("hidden"))
    failed = CliRunner().invoke(app, ["models", "wake", "alone", "--url", node.process.url])
    assert failed.exit_code == 1
    assert "model 'alone' is down" in failed.stderr
    assert complete(node.process, "float32").status_code == 200
    hidden.rename(checkpoint)
    steer(node, "start", "alone")
    wait_for("the model to serve", node.is_ready)
    assert complete(node.process, "alone").status_code == 200


def test_a_worker_that_is_removed_and_added_anew_lends_again(node: LendingNode, reference: Reference) -> None:
    node.wait_until_lent("broad", "float32")
    expected = reference.answers("float32", CONVERSATIONS)
    [section] = [m for m in yaml.safe_load(node.process.file.read_text())["models"] if m["name"] == "broad"]
    url, headers = f"{node.process.url}/admin/models", node.process.admin_headers()
    with ThreadPoolExecutor(1) as clients:
        answers = clients.submit(node.hold_all, "float32", CONVERSATIONS)
        removed = httpx.delete(f"{url}/broad", headers=headers, timeout=DEADLINE_S)
        assert removed.status_code == 200, removed.text
        assert set(node.process.ready()) == {"float32", "alone"}
        added = httpx.post(url, json=section, headers=headers, timeout=DEADLINE_S)
        assert added.status_code == 201, added.text
        assert answers.result() == expected
    node.wait_until_lent("broad", "float32")
    assert node.hold_all("broad", OTHERS) == reference.answers("broad", OTHERS)
    assert node.hold_all("float32", CONVERSATIONS) == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a fifth of the cycles load the model anew in a new process
@pytest.mark.parametrize("num_cycles", [20, 100])
def test_cycles_leave_nothing_behind(node: LendingNode, reference: Reference, num_cycles: int) -> None:
    """Two models answer meanwhile, and right; every fifth sleep ends the process."""
    cycle(node, 2)
    before = left(node.process)
    with (
        meanwhile(lambda: compare(node, reference, "float32", CONVERSATIONS[:2]), 0.0),
        meanwhile(lambda: compare(node, reference, "broad", OTHERS[:2]), 0.0),
    ):
        for number in range(num_cycles):
            cycle(node, 2 if number % 5 == 4 else 1)
    assert complete(node.process, "alone").status_code == 200
    wait_for("as much as before", lambda: left(node.process) == before)


def cycle(node: LendingNode, level: int) -> None:
    steer(node, "sleep", "alone", "--level", str(level))
    steer(node, "wake", "alone")


def compare(node: LendingNode, reference: Reference, model: str, conversations: Sequence[Conversation]) -> None:
    assert node.hold_all(model, conversations) == reference.answers(model, conversations)


def left(node: NodeProcess) -> tuple[int, int, list[str]]:
    """Count what a cycle could leave: descriptors but for clients' connections, processes, files of the node."""
    gateway = psutil.Process(node.process.pid)
    files = sorted(str(path.relative_to(node.temporary)) for path in node.temporary.rglob("*"))
    return gateway.num_fds() - len(gateway.net_connections("tcp")), len(gateway.children(recursive=True)), files
