"""A master on two ranks borrows from a worker on one and from a worker on two: answers are those without lending."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.lending_node import (
    BUDGET_INTERVAL_S,
    Answers,
    Conversation,
    LendingNode,
    Turn,
    conversation,
    meanwhile,
    serving,
)
from tests.support.node_process import remove, short_temporary_directory, wait_for

MASTER, WORKERS = "divided", ("whole", "halves")
CONVERSATIONS = [conversation(seed) for seed in range(4)]
LONG = [(Turn(tuple(3 + i * (i + seed) % 311 for i in range(700)), 40, seed or None),) for seed in range(2)]
"""Each is longer than the master's pool."""
WORKER_CONVERSATIONS = [conversation(seed, num_turns=2, max_tokens=(4, 12)) for seed in range(100, 103)]
HELD: dict[str, list[Conversation]] = {
    MASTER: [*LONG, *CONVERSATIONS],
    **dict.fromkeys(WORKERS, WORKER_CONVERSATIONS),
}
Right = dict[str, list[Answers]]


def models(checkpoints: dict[str, Path]) -> list[dict[str, Any]]:
    """The pool of a rank of the master has 384 tokens."""
    of_each: list[dict[str, Any]] = [
        {"name": MASTER, "path": str(checkpoints["master"]), "dtype": "float32", "tensor_parallel_size": 2},
        {"name": "whole", "path": str(checkpoints["broad"])},
        {"name": "halves", "path": str(checkpoints["odd"]), "tensor_parallel_size": 2},
    ]
    return [{"threads": 2, "max_num_batched_tokens": 256, **model} for model in of_each]


@pytest.fixture(scope="module")
def right(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Right:
    """The answers of the same ranks with room for everything."""
    roomy = [{**model, "kv_cache": {"memory": "32MiB"}} for model in models(checkpoints)]
    temporary = short_temporary_directory()
    config = {"node": {"port": 0, "lending": "off"}, "models": roomy}
    with serving(config, tmp_path_factory.mktemp("roomy"), temporary) as node:
        answers = {name: node.hold_all(name, turns) for name, turns in HELD.items()}
    remove(temporary)
    return answers


@pytest.fixture(scope="module")
def node(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingNode]:
    directory = tmp_path_factory.mktemp("ranks")
    master, *workers = models(checkpoints)
    file = {"backend": "file", "path": str(directory / "kv"), "size": "256MiB", "min_free": 0}
    storage = {**file, "prefetch_policy": "wait_complete", "prefetch_threshold": 64}
    lending = {"budget": "100%", "window": "200ms"}
    config = {
        "node": {
            "port": 0,
            "restart": {"limit": 1000, "window": "1s", "backoff": "50ms"},
            "lending": {"max_wait": "100s"},
        },
        "models": [
            {**master, "role": "master", "kv_cache": {"memory": "576KiB"}, "tiers": {"storage": storage}},
            # The budgets are not larger, so that the master keeps blocks of its own, into which storage is read.
            *(
                {**worker, "kv_cache": {"memory": memory}, "lending": lending}
                for worker, memory in zip(workers, ("1536KiB", "1MiB"), strict=True)
            ),
        ],
    }
    temporary = short_temporary_directory()
    with serving(config, directory, temporary) as node:
        yield node
    remove(temporary)


def wait_until_lent(node: LendingNode) -> None:
    wait_for("all engines to serve", node.is_ready)
    for worker in WORKERS:
        node.wait_until_lent(worker, MASTER)


def rank(node: LendingNode, model: str, number: int) -> psutil.Process:
    rank_0 = node.process.engines()[model]
    return [rank_0, *rank_0.children()][number]


@contextmanager
def streaming(node: LendingNode, right: Right) -> Iterator[None]:
    """Conversations that are longer than the pool go on, and their answers are right in the end."""
    wait_until_lent(node)
    with ThreadPoolExecutor(1) as clients:
        answers = clients.submit(node.hold_all, MASTER, HELD[MASTER])
        wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"] or answers.done())
        yield
        assert answers.result() == right[MASTER]


def test_answers_are_those_without_lending_while_extents_come_and_go(node: LendingNode, right: Right) -> None:
    """Blocks are stored from the lenders' pools meanwhile."""
    wait_until_lent(node)
    assert [node.hold(MASTER, turns) for turns in HELD[MASTER]] == right[MASTER]
    for worker in WORKERS:
        assert node.metric("swiftkv:borrowed_bytes", borrower=MASTER, lender=worker) > 0
    assert node.blocks(MASTER)["borrowed_cached"] > 0
    assert node.metric("swiftkv:tier_dropped_stores_total", model_name=MASTER) == 0
    budgets = iter(range(1 << 30))

    def change_budget() -> None:
        node.set_budget(WORKERS[next(budgets) % 2], f"{(0, 100, 40, 70)[next(budgets) % 4]}%")

    with meanwhile(change_budget, BUDGET_INTERVAL_S), ThreadPoolExecutor(2) as clients:
        held = {name: clients.submit(node.hold_all, name, HELD[name]) for name in WORKERS}
        assert node.hold_all(MASTER, HELD[MASTER]) == right[MASTER]
        assert {name: answers.result() for name, answers in held.items()} == {name: right[name] for name in WORKERS}
    for worker in WORKERS:
        assert node.set_budget(worker, "100%").status_code == 200
    wait_until_lent(node)
    node.assert_at_rest(MASTER, *WORKERS)


@pytest.mark.parametrize(("worker", "number"), [("whole", 0), ("halves", 0), ("halves", 1)])
def test_a_killed_lender_costs_no_answer(worker: str, number: int, node: LendingNode, right: Right) -> None:
    with streaming(node, right):
        rank(node, worker, number).kill()
    wait_until_lent(node)
    assert node.hold_all(worker, HELD[worker]) == right[worker]
    node.assert_at_rest(MASTER, *WORKERS)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_of_the_borrower_harms_no_lender_and_storage_has_every_part(
    number: int, node: LendingNode, right: Right
) -> None:
    wait_until_lent(node)
    to_store = partial(node.metric, "swiftkv:tier_blocks_to_store", model_name=MASTER)
    with ThreadPoolExecutor(1) as clients:
        held = clients.submit(node.hold_all, MASTER, HELD[MASTER])
        assert held.result() == right[MASTER]
        wait_for("all blocks to be written", lambda: not to_store())
        bodies = [turns[0].body(MASTER, []) | {"max_tokens": 200} for turns in LONG]
        answers = [clients.submit(node.complete, body) for body in bodies]
        wait_for("borrowed memory to be in use", lambda: node.blocks(MASTER)["borrowed_used"])
        dead = rank(node, MASTER, 0)
        rank(node, MASTER, number).kill()
        for name in WORKERS:
            assert node.hold_all(name, HELD[name]) == right[name]
        assert all(answer.result().status_code in (200, 503) for answer in answers)
    wait_for("the restart", lambda: node.process.engines().get(MASTER, dead).pid != dead.pid)
    wait_until_lent(node)
    assert [node.hold(MASTER, turns) for turns in HELD[MASTER]] == right[MASTER]
    wait_for("its report", lambda: node.metric("swiftkv:tier_hit_tokens_total", model_name=MASTER))
    node.assert_at_rest(MASTER, *WORKERS)
