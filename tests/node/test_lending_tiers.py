"""A master that borrows, with storage below its pool: answers are those without both, whoever dies or takes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.lending_node import (
    BUDGET_INTERVAL_S,
    LendingNode,
    Reference,
    Turn,
    conversation,
    meanwhile,
    serving,
)
from tests.support.node_process import remove, short_temporary_directory, wait_for

MASTER, WORKER = "float32", "broad"
LONG = [(Turn(tuple(3 + i * (i + seed) % 311 for i in range(1000)), 24, seed or None),) for seed in range(3)]
"""Any two of them exceed the pool and all that is lent."""


@pytest.fixture(scope="module")
def node(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingNode]:
    """A master with a pool of 384 tokens, beside a worker that lends it 1,400. Every call of its storage takes long."""
    directory = tmp_path_factory.mktemp("lending-tiers")
    file = {"backend": "file", "path": str(directory / "kv"), "size": "256MiB", "min_free": 0}
    storage = {
        "backend": "fault",
        "inner": file,
        "delay": 1.0,
        "delay_time": "300ms",
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": 64,
    }
    shared: dict[str, Any] = {"threads": 1, "max_num_batched_tokens": 256}
    models = [
        {
            "name": MASTER,
            "role": "master",
            "path": str(checkpoints["master"]),
            "dtype": "float32",
            "kv_cache": {"memory": "1152KiB"},
            "tiers": {"storage": storage},
        },
        {
            "name": WORKER,
            "path": str(checkpoints["broad"]),
            "kv_cache": {"memory": "4MiB"},
            "lending": {"budget": "100%", "window": "200ms"},
        },
    ]
    config = {
        "node": {
            "port": 0,
            "restart": {"limit": 1000, "window": "1s", "backoff": "50ms"},
            "lending": {"max_wait": "100s"},
        },
        "models": [{**shared, **model} for model in models],
    }
    temporary = short_temporary_directory()
    with serving(config, directory, temporary) as node:
        yield node
    remove(temporary)


def kill(node: LendingNode, model: str) -> psutil.Process:
    process = node.process.engines()[model]
    process.kill()
    process.wait()
    return process


def restart_master(node: LendingNode) -> None:
    """Kill the master once storage has all that it computed; the next one knows nothing, not even how slow storage is.

    It is back when it may borrow again.
    """
    wait_for("blocks to be written", lambda: node.metric("swiftkv:tier_stored_blocks_total", model_name=MASTER))
    wait_for("all of them", lambda: not node.metric("swiftkv:tier_blocks_to_store", model_name=MASTER))
    dead = kill(node, MASTER)
    wait_for("the restart", lambda: node.process.engines().get(MASTER, dead).pid != dead.pid and node.is_ready())
    node.wait_until_lent(WORKER, MASTER)


@contextmanager
def loading(node: LendingNode, reference: Reference) -> Iterator[None]:
    """A conversation of the last life of the master goes on, and storage is being read; in the end all are right."""
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(node.hold, MASTER, LONG[0])
        wait_for("loads", lambda: node.metric("swiftkv:tier_requests_loading", model_name=MASTER) or answer.done())
        yield
        assert [answer.result()] == reference.answers(MASTER, LONG[:1])
    wait_for("its report", lambda: node.metric("swiftkv:tier_hit_tokens_total", model_name=MASTER))
    assert node.hold_all(MASTER, LONG) == reference.answers(MASTER, LONG)


def test_conversations_beyond_all_memory_survive_kills_of_master_and_lender(
    node: LendingNode, reference: Reference
) -> None:
    """Most of their blocks are written to storage from the lender's pool."""
    node.wait_until_lent(WORKER, MASTER)
    assert [node.hold(MASTER, turns) for turns in LONG] == reference.answers(MASTER, LONG)
    assert node.metric("swiftkv:tier_dropped_stores_total", model_name=MASTER) == 0
    restart_master(node)
    with loading(node, reference):
        kill(node, WORKER)
    wait_for("the restart", node.is_ready)
    node.assert_at_rest(MASTER, WORKER)


@pytest.mark.slow
def test_a_lender_takes_everything_back_while_storage_is_read(node: LendingNode, reference: Reference) -> None:
    node.wait_until_lent(WORKER, MASTER)
    assert node.hold_all(MASTER, LONG) == reference.answers(MASTER, LONG)
    restart_master(node)
    with loading(node, reference):
        assert node.set_budget(WORKER, 0).json()["lent_bytes"] == 0
        assert node.set_budget(WORKER, "100%").status_code == 200
    node.assert_at_rest(MASTER, WORKER)


@pytest.mark.slow
def test_what_was_stored_while_extents_came_and_went_is_right(node: LendingNode, reference: Reference) -> None:
    """Budgets change every 50 ms, and the lender is killed twice; then everything is read from storage."""
    rng = random.Random(3)
    conversations = [conversation(seed) for seed in range(700, 706)]

    def change_budget() -> None:
        node.set_budget(WORKER, f"{rng.choice((0, rng.randint(1, 99), 100))}%")

    def hold_while_the_lender_dies() -> None:
        with ThreadPoolExecutor(1) as clients:
            answers = clients.submit(node.hold_all, MASTER, conversations)
            wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"] or answers.done())
            kill(node, WORKER)
            assert answers.result() == reference.answers(MASTER, conversations)
        wait_for("the restart", node.is_ready)

    with meanwhile(change_budget, BUDGET_INTERVAL_S):
        for _ in range(2):
            hold_while_the_lender_dies()
    assert node.set_budget(WORKER, "100%").status_code == 200
    for _ in range(2):
        node.wait_until_lent(WORKER, MASTER)
        restart_master(node)
        assert node.hold_all(MASTER, conversations) == reference.answers(MASTER, conversations)
        wait_for("its report", lambda: node.metric("swiftkv:tier_hit_tokens_total", model_name=MASTER))
    node.assert_at_rest(MASTER, WORKER)
