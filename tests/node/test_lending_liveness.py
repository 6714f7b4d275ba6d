"""Engines that hang while they hold others' memory: ending them brings it back, and nobody else notices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.lending_node import LendingNode, Reference, Turn, conversation, serving
from tests.support.node_process import DEADLINE_S, remove, short_temporary_directory, wait_for

MASTER, WORKER = "float32", "broad"
CONVERSATIONS = [conversation(seed) for seed in range(600, 602)]
SILENT_COORDINATOR = """
import sys
if "swiftkv.engine.main" in sys.orig_argv:
    import pathlib, time
    from swiftkv.lease.coordinator import Coordinator

    answer = Coordinator._state

    def hang(self, request):
        while (pathlib.Path(__file__).parent / self._name).exists():
            time.sleep(0.02)
        return answer(self, request)

    Coordinator._state = hang
"""


@pytest.fixture(scope="module")
def defects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory: while it holds a file with a model's name, that model's coordinator hangs when it is asked."""
    directory = tmp_path_factory.mktemp("defects")
    (directory / "sitecustomize.py").write_text(SILENT_COORDINATOR)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(directory))
        yield directory


@contextmanager
def lending_node(transport: str, watchdog: str, checkpoints: dict[str, Path], directory: Path) -> Iterator[LendingNode]:
    """A master with a pool of 384 tokens beside a worker."""
    shared: dict[str, Any] = {"threads": 1, "max_num_batched_tokens": 256}
    models = [
        {"name": MASTER, "role": "master", "path": str(checkpoints["master"]), "dtype": "float32"},
        {"name": WORKER, "path": str(checkpoints["broad"]), "dtype": "bfloat16"},
    ]
    models[0] |= {"kv_cache": {"memory": "1152KiB"}}
    models[1] |= {"kv_cache": {"memory": "4MiB"}, "lending": {"budget": "100%", "window": "200ms"}}
    settings: dict[str, Any] = {"port": 0, "watchdog": watchdog, "restart": {"limit": 100, "backoff": "50ms"}}
    settings["lending"] = {"transport": transport, "max_wait": "100s"}
    config = {"node": settings, "models": [{**shared, **model} for model in models]}
    temporary = short_temporary_directory()
    with serving(config, directory, temporary) as node:
        yield node
    remove(temporary)


@pytest.fixture(scope="module")
def node(
    defects: Path, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendingNode]:
    with lending_node("shm", "6s", checkpoints, tmp_path_factory.mktemp("liveness")) as node:
        yield node


def wait_until_back(node: LendingNode, model: str, dead: psutil.Process) -> None:
    def is_back() -> bool:
        views = node.process.engine_views()
        return views[model]["pid"] not in (None, dead.pid) and node.is_ready()

    wait_for(f"{model} to be back", is_back)
    node.wait_until_lent(WORKER, MASTER)


def test_a_stopped_borrower_is_ended_for_what_it_owes(node: LendingNode, reference: Reference) -> None:
    """The borrower has no request of its own; the lender's administrator is waiting."""
    node.wait_until_lent(WORKER, MASTER)
    dead, lender = node.process.engines()[MASTER], node.process.engines()[WORKER]
    dead.send_signal(signal.SIGSTOP)
    change = node.set_budget(WORKER, 0)
    assert change.status_code == 200, change.text
    assert change.json()["recalled_bytes"] > 0
    assert change.json()["lent_bytes"] == 0
    assert not psutil.wait_procs([dead], DEADLINE_S)[1]
    assert node.set_budget(WORKER, "100%").status_code == 200
    wait_until_back(node, MASTER, dead)
    assert node.process.engines()[WORKER].pid == lender.pid
    assert node.hold_all(MASTER, CONVERSATIONS) == reference.answers(MASTER, CONVERSATIONS)
    node.assert_at_rest(MASTER, WORKER)


def test_nobody_waits_for_an_answer_of_a_lender_that_was_killed(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """It is killed while it waits for what a stopped borrower owes."""
    with lending_node("shm", "100s", checkpoints, tmp_path) as node, ThreadPoolExecutor(1) as administrators:
        node.wait_until_lent(WORKER, MASTER)
        borrower, dead = node.process.engines()[MASTER], node.process.engines()[WORKER]
        borrower.send_signal(signal.SIGSTOP)
        change = administrators.submit(node.set_budget, WORKER, 0)
        wait_for("extents to be recalled", lambda: node.extents(WORKER, "lends", "recalled").get(MASTER))
        dead.kill()
        answer = change.result()
        borrower.send_signal(signal.SIGCONT)
        assert answer.status_code == 503
        assert "the engine of model 'broad' ended meanwhile" in answer.text
        wait_for("the next engine to take a budget", lambda: node.set_budget(WORKER, "100%").status_code == 200)
        wait_until_back(node, WORKER, dead)


def test_an_engine_whose_coordinator_does_not_answer_is_ended(
    node: LendingNode, defects: Path, reference: Reference
) -> None:
    """Its step loop goes on, so only the silence tells."""
    node.wait_until_lent(WORKER, MASTER)
    dead, borrower = node.process.engines()[WORKER], node.process.engines()[MASTER]
    (defects / WORKER).touch()
    wait_for("it to be seen", lambda: node.process.ready()[WORKER] != "ready")
    node.process.wait_line(rf"{WORKER}: the engine did not answer about lending for \d+ s and was ended; starting it")
    (defects / WORKER).unlink()
    wait_until_back(node, WORKER, dead)
    assert node.metric("swiftkv:engine_restarts_total", model_name=WORKER, reason="coordinator_hung") == 1
    assert node.process.engines()[MASTER].pid == borrower.pid
    assert node.hold_all(MASTER, CONVERSATIONS) == reference.answers(MASTER, CONVERSATIONS)
    node.assert_at_rest(MASTER, WORKER)


@pytest.mark.slow
def test_a_borrower_in_the_middle_of_a_copy_is_not_blamed_for_its_stopped_lender(
    checkpoints: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    """A two-sided copy waits for the lender, so the borrower makes no progress either; only the lender is ended."""
    turns = [(Turn(tuple(3 + i * (i + seed) % 311 for i in range(1000)), 12),) for seed in range(2)]
    expected = reference.answers(MASTER, turns)
    with lending_node("p2p", "8s", checkpoints, tmp_path) as node, ThreadPoolExecutor(1) as clients:
        node.wait_until_lent(WORKER, MASTER)
        dead, borrower = node.process.engines()[WORKER], node.process.engines()[MASTER]
        answers = clients.submit(node.hold_all, MASTER, turns)
        wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"] or answers.done())
        assert not answers.done()
        dead.send_signal(signal.SIGSTOP)
        assert answers.result() == expected
        wait_until_back(node, WORKER, dead)
        assert node.process.engines()[MASTER].pid == borrower.pid
