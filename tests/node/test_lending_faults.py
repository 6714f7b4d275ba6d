"""Faults while one engine uses another's memory: engines are killed and stopped, and no answer changes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.lending_node import LendingNode, Reference, Turn, conversation, meanwhile, serving
from tests.support.node_process import remove, short_temporary_directory, wait_for

MASTER = "float32"
WORKERS = ("broad", "odd")
LONG_TOKENS = 1000
LONG = [(Turn(tuple(3 + i * (i + seed) % 311 for i in range(LONG_TOKENS)), 48, seed or None),) for seed in range(2)]
CONVERSATIONS = [conversation(seed) for seed in range(400, 404)]
WORKER_CONVERSATIONS = [conversation(seed, num_turns=2, max_tokens=(4, 12)) for seed in range(500, 503)]
HYBRIDS = ("hybrids shm ahead", "hybrids shm", "hybrids p2p")


def slow(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


on_both = pytest.mark.parametrize("kind", ["shm ahead", "p2p", *slow(*HYBRIDS)], indirect=True, scope="module")
on_shm_first = pytest.mark.parametrize(
    "kind", ["shm ahead", *slow("shm", "p2p", *HYBRIDS)], indirect=True, scope="module"
)
STOPS = [2.0, pytest.param(10.0, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> set[str]:
    """The transport; `ahead`: the master plans a step while one is in progress; `hybrids`: all models have windows."""
    return set(request.param.split())


@pytest.fixture(scope="module")
def right(request: pytest.FixtureRequest, kind: set[str]) -> Reference:
    reference: Reference = request.getfixturevalue("hybrid_reference" if "hybrids" in kind else "reference")
    return reference


@pytest.fixture(scope="module")
def node(
    request: pytest.FixtureRequest, kind: set[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendingNode]:
    """A master with a pool of 384 tokens, a hybrid of 768, beside two workers; it waits for those that start again."""
    checkpoints: dict[str, Path] = request.getfixturevalue("hybrid_checkpoints" if "hybrids" in kind else "checkpoints")
    (transport,) = kind & {"shm", "p2p"}
    shared: dict[str, Any] = {"threads": 1, "max_num_batched_tokens": 256}
    models = [
        {"name": MASTER, "role": "master", "path": str(checkpoints["master"]), "dtype": "float32"},
        {"name": "broad", "path": str(checkpoints["broad"]), "dtype": "bfloat16"},
        {"name": "odd", "path": str(checkpoints["odd"]), "dtype": "bfloat16"},
    ]
    # Two of six layers have all of a hybrid's history, and only their part of the pool streams it.
    memory = "2304KiB" if "hybrids" in kind else "1152KiB"
    models[0] |= {"kv_cache": {"memory": memory}, "async_scheduling": "ahead" in kind}
    for worker in models[1:]:
        worker |= {"kv_cache": {"memory": "4MiB"}, "lending": {"budget": "100%", "window": "200ms"}}
    config = {
        "node": {
            "port": 0,
            "restart": {"limit": 1000, "window": "1s", "backoff": "50ms"},
            "lending": {"transport": transport, "max_wait": "100s"},
        },
        "models": [{**shared, **model} for model in models],
    }
    temporary = short_temporary_directory()
    with serving(config, tmp_path_factory.mktemp("faults"), temporary) as node:
        yield node
    remove(temporary)


@pytest.fixture(autouse=True)
def _lending_resumes(node: LendingNode) -> Iterator[None]:
    """After each test every engine serves, lends again, and nothing is lost."""
    wait_until_all_lend(node)
    yield
    wait_until_all_lend(node)
    node.assert_at_rest(MASTER, *WORKERS)


def wait_until_all_lend(node: LendingNode) -> None:
    wait_for("every engine to serve", node.is_ready)
    for worker in WORKERS:
        node.wait_until_lent(worker, MASTER)


@contextmanager
def streaming(node: LendingNode, right: Reference) -> Iterator[None]:
    """The master is busy with more than its pool holds; no client of it sees an error, and every answer is right."""
    expected = right.answers(MASTER, [*LONG, *CONVERSATIONS])

    def hold() -> None:
        assert node.hold_all(MASTER, [*LONG, *CONVERSATIONS]) == expected

    with meanwhile(hold, 0.0):
        wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"])
        yield


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    wait_for("the process to stop", lambda: process.status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def engine(node: LendingNode, model: str) -> psutil.Process:
    return node.process.engines()[model]


def epochs_held(node: LendingNode, lender: str) -> dict[tuple[int, int], int]:
    """Return the epoch of each extent that the master holds, by KV group and number."""
    return {
        (link["borrower_group"], extent["extent"]): extent["epoch"]
        for link in node.pool(MASTER)["borrows"]
        if link["lender"] == lender
        for extent in link["extents"]
        if extent["state"] == "held"
    }


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def recalling(node: LendingNode, worker: str, master: psutil.Process) -> Iterator[None]:
    """The worker has asked for everything, and the stopped master has not heard it. On leaving, it is home."""
    with ThreadPoolExecutor(1) as admin:
        with stopped(master):
            answer = admin.submit(node.set_budget, worker, 0)
            wait_for("the recall", lambda: node.extents(worker, "lends", "recalled").get(MASTER))
            assert not answer.done()
            yield
        change = answer.result()
        assert change.status_code == 200, change.text
        assert change.json()["lent_bytes"] == 0
        assert change.json()["recalled_bytes"] > 0
    assert node.blocks(worker)["lent"] == 0
    assert node.set_budget(worker, "100%").status_code == 200


@on_shm_first
def test_a_worker_is_killed_while_the_master_streams_from_it(node: LendingNode, right: Reference) -> None:
    with streaming(node, right):
        dead = engine(node, "broad")
        kill(dead)
    wait_for("the restart", node.is_ready)
    assert engine(node, "broad").pid != dead.pid


@on_shm_first
def test_all_workers_are_killed_at_once(node: LendingNode, right: Reference) -> None:
    """Requests that the master cannot hold alone wait until the workers are back."""
    with streaming(node, right):
        for worker in WORKERS:
            kill(engine(node, worker))


@on_both
def test_a_lender_dies_with_copies_under_way(node: LendingNode, right: Reference) -> None:
    """It is stopped first: a two-sided copy waits for it in the middle of a step, and fails when it is killed.

    What the other one lent stays: it would come back at other epochs.
    """
    with streaming(node, right):
        held = epochs_held(node, "odd")
        dead = engine(node, "broad")
        with stopped(dead):
            time.sleep(0.5)
            kill(dead)
    assert held.items() <= epochs_held(node, "odd").items()


@on_shm_first
def test_a_budget_outlives_the_engine_that_was_told(node: LendingNode) -> None:
    """It holds at once, long before what is lent beyond it is home and the answer comes."""
    dead = engine(node, "odd")
    request = [
        b"PATCH /admin/lending/odd HTTP/1.1",
        b"Host: localhost",
        b"Authorization: " + node.process.admin_headers()["Authorization"].encode(),
        b"Content-Type: application/json",
        b"Content-Length: 13",
        b"",
        b'{"budget": 0}',
    ]
    url = httpx.URL(node.process.url)
    with stopped(engine(node, MASTER)), socket.create_connection((url.host, url.port)) as client:
        client.sendall(b"\r\n".join(request))
        wait_for("the recall", lambda: node.extents("odd", "lends", "recalled").get(MASTER))
        kill(dead)
    wait_for("the restart", lambda: node.process.engines().get("odd", dead).pid != dead.pid and node.is_ready())
    assert node.model("odd")["budget_bytes"] == 0
    assert node.set_budget("odd", "100%").status_code == 200


@on_shm_first
def test_the_master_is_killed_while_a_worker_recalls(node: LendingNode, right: Reference) -> None:
    master = engine(node, MASTER)
    with recalling(node, "broad", master):
        kill(master)
        assert node.hold_all("broad", WORKER_CONVERSATIONS) == right.answers("broad", WORKER_CONVERSATIONS)
    wait_for("the restart", node.is_ready)
    assert engine(node, MASTER).pid != master.pid
    wait_until_all_lend(node)
    assert node.hold_all(MASTER, LONG) == right.answers(MASTER, LONG)


@on_shm_first
def test_the_master_is_killed_while_it_streams(node: LendingNode, right: Reference) -> None:
    """Its requests would go on for as long as there is room: they end when it is killed."""
    endless = node.max_model_len(MASTER) - LONG_TOKENS
    bodies = [turns[0].body(MASTER, []) | {"max_tokens": endless} for turns in LONG]
    with ThreadPoolExecutor(len(bodies)) as clients:
        answers = [clients.submit(node.complete, body) for body in bodies]
        wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"])
        assert not any(answer.done() for answer in answers)
        kill(engine(node, MASTER))
        assert node.hold_all("broad", WORKER_CONVERSATIONS) == right.answers("broad", WORKER_CONVERSATIONS)
        assert {answer.result().status_code for answer in answers} == {503}


@on_shm_first
@pytest.mark.parametrize("stop_s", STOPS)
def test_a_worker_is_stopped_while_the_master_streams_from_it(
    node: LendingNode, right: Reference, stop_s: float
) -> None:
    with streaming(node, right), ThreadPoolExecutor(1) as clients:
        with stopped(engine(node, "broad")):
            answers = clients.submit(node.hold_all, "broad", WORKER_CONVERSATIONS)
            time.sleep(stop_s)
            assert not answers.done()
        assert answers.result() == right.answers("broad", WORKER_CONVERSATIONS)


@on_shm_first
@pytest.mark.parametrize("stop_s", STOPS)
def test_a_worker_is_stopped_while_it_recalls(node: LendingNode, right: Reference, stop_s: float) -> None:
    with streaming(node, right), ThreadPoolExecutor(1) as admin, ExitStack() as worker:
        with stopped(engine(node, MASTER)):
            answer = admin.submit(node.set_budget, "broad", 0)
            wait_for("the recall", lambda: node.extents("broad", "lends", "recalled").get(MASTER))
            worker.enter_context(stopped(engine(node, "broad")))
        time.sleep(stop_s)
        assert not answer.done()
        worker.close()
        assert answer.result().json()["lent_bytes"] == 0
        assert node.set_budget("broad", "100%").status_code == 200


@on_shm_first
@pytest.mark.parametrize("stop_s", STOPS)
def test_the_master_is_stopped_while_it_streams(node: LendingNode, right: Reference, stop_s: float) -> None:
    """A worker that needs what it has lent answers when the master goes on, at the latest."""
    with streaming(node, right), ThreadPoolExecutor(1) as clients:
        with stopped(engine(node, MASTER)):
            answers = clients.submit(node.hold_all, "broad", WORKER_CONVERSATIONS)
            time.sleep(stop_s)
        assert answers.result() == right.answers("broad", WORKER_CONVERSATIONS)
