"""Answers with lending are those without, token for token: on real nodes, whatever moves meanwhile.

Masters that plan no step ahead make drafts, which change no token either.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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

MASTERS = ("float32", "bfloat16")
CONVERSATIONS = [conversation(seed) for seed in range(6)]
WORKER_CONVERSATIONS = [conversation(seed, num_turns=2, max_tokens=(4, 12)) for seed in range(100, 106)]
LONG = (Turn(tuple(3 + i * i % 311 for i in range(1000)), 12),)
SHORT = [conversation(seed, num_turns=1) for seed in range(300, 304)]
THREE = ("broad", "odd", "deep")


def master(name: str, dtype: str, checkpoints: dict[str, Path], memory: str, is_ahead: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "role": "master",
        "path": str(checkpoints["master"]),
        "dtype": dtype,
        "threads": 1,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "async_scheduling": is_ahead,
        "speculative_config": "off" if is_ahead else {},
        "kv_cache": {"memory": memory},
    }


def worker(name: str, kind: str, checkpoints: dict[str, Path], memory: str, dtype: str = "bfloat16") -> dict[str, Any]:
    return {
        "name": name,
        "path": str(checkpoints[kind]),
        "dtype": dtype,
        "threads": 1,
        "kv_cache": {"memory": memory},
        "lending": {"budget": "100%", "window": "200ms"},
    }


@pytest.fixture(
    scope="module",
    params=[
        ("shm", 2, True),
        ("p2p", 1, False),
        pytest.param(("shm", 1, False), marks=pytest.mark.slow),
        pytest.param(("p2p", 2, True), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}-{'ahead' if param[2] else 'in-step'}",
)
def node(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendingNode]:
    """Two masters with pools of 384 tokens borrow from one worker with six times as many bytes."""
    transport, stream_buffers, is_ahead = request.param
    models = [
        master("float32", "float32", checkpoints, "1152KiB", is_ahead),
        master("bfloat16", "bfloat16", checkpoints, "576KiB", is_ahead),
        worker("broad", "broad", checkpoints, "12MiB"),
    ]
    lending = {"transport": transport, "stream_buffers": stream_buffers, "max_wait": "100s"}
    config = {"node": {"port": 0, "lending": lending}, "models": models}
    temporary = short_temporary_directory()
    with serving(config, tmp_path_factory.mktemp("exact"), temporary) as node:
        yield node
    remove(temporary)


def test_two_masters_borrow_from_one_worker_and_answer_exactly(
    node: LendingNode, reference: Reference, request: pytest.FixtureRequest
) -> None:
    _, _, is_ahead = request.node.callspec.params["node"]
    for name in MASTERS:
        node.wait_until_lent("broad", name)
        assert node.hold_all(name, CONVERSATIONS) == reference.answers(name, CONVERSATIONS)
        assert node.blocks(name)["borrowed_cached"] > 0
        assert node.metric("swiftkv:borrowed_bytes", borrower=name, lender="broad") > 0
    again = node.hold_all("float32", CONVERSATIONS)
    assert again == reference.answers("float32", CONVERSATIONS)
    for name in MASTERS:
        assert (node.metric("vllm:spec_decode_num_draft_tokens_total", model_name=name) > 0) == (not is_ahead)
    assert node.metric("swiftkv:prefix_hit_tokens_total", model_name="float32", tier="peer") > 0
    node.assert_at_rest("broad", *MASTERS)


def test_a_context_longer_than_the_pool(node: LendingNode, reference: Reference) -> None:
    for name in MASTERS:
        node.wait_until_lent("broad", name)
        assert node.hold_all(name, [LONG]) == reference.answers(name, [LONG])
    node.assert_at_rest("broad", *MASTERS)


def test_budgets_that_change_every_50_ms_and_recalls_for_demand(node: LendingNode, reference: Reference) -> None:
    """The worker's own users come at random moments, for whom it recalls what it needs."""
    rng = random.Random(7)

    def change_budget() -> None:
        assert node.set_budget("broad", f"{rng.choice((0, rng.randint(1, 99), 100))}%").status_code == 200

    rounds = range(3)
    conversations = [conversation(seed) for seed in range(200, 206)]
    with meanwhile(change_budget, BUDGET_INTERVAL_S), ThreadPoolExecutor(len(MASTERS) + 1) as clients:
        for _ in rounds:
            held = {name: clients.submit(node.hold_all, name, conversations) for name in MASTERS}
            held["broad"] = clients.submit(node.hold_all, "broad", WORKER_CONVERSATIONS)
            for name in MASTERS:
                assert held[name].result() == reference.answers(name, conversations)
            assert held["broad"].result() == reference.answers("broad", WORKER_CONVERSATIONS)
    assert node.set_budget("broad", "100%").status_code == 200
    assert node.metric("swiftkv:recalls_total", model_name="broad", reason="budget") > 0
    for name in MASTERS:
        node.wait_until_lent("broad", name)
    node.assert_at_rest("broad", *MASTERS)


def test_a_worker_takes_back_what_its_own_users_need(node: LendingNode, reference: Reference) -> None:
    everything = sum(group["total"] for group in node.pool("broad")["groups"])
    wait_for("the idle worker to lend all that it has", lambda: node.blocks("broad")["lent"] == everything)
    recalls = node.metric("swiftkv:recalls_total", model_name="broad", reason="demand")
    with ThreadPoolExecutor(len(MASTERS) + 1) as clients:
        held = {name: clients.submit(node.hold_all, name, CONVERSATIONS) for name in MASTERS}
        assert node.hold_all("broad", WORKER_CONVERSATIONS) == reference.answers("broad", WORKER_CONVERSATIONS)
        for name in MASTERS:
            assert held[name].result() == reference.answers(name, CONVERSATIONS)
    assert node.metric("swiftkv:recalls_total", model_name="broad", reason="demand") > recalls
    wait_for("the idle worker to lend it again", lambda: node.blocks("broad")["lent"] == everything)
    node.assert_at_rest("broad", *MASTERS)


def test_a_request_for_which_there_is_no_room_is_answered_when_more_is_lent(
    node: LendingNode, reference: Reference
) -> None:
    assert node.set_budget("broad", 0).status_code == 200
    assert node.blocks("float32")["borrowed_free"] == 0
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(node.hold, "float32", LONG)
        wait_for("it to wait", lambda: node.metric("vllm:num_requests_waiting", model_name="float32") == 1)
        assert node.hold_all("float32", SHORT) == reference.answers("float32", SHORT)  # others do not wait for it
        assert not answer.done()
        assert node.set_budget("broad", "100%").status_code == 200
        assert [answer.result()] == reference.answers("float32", [LONG])
    node.assert_at_rest("broad", *MASTERS)


@pytest.fixture(scope="module")
def three(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingNode]:
    """One master beside three workers whose blocks have other sizes than its own: extents of 1, 3 and 7 blocks."""
    models = [
        master("float32", "float32", checkpoints, "1152KiB"),
        worker("broad", "broad", checkpoints, "3MiB"),
        worker("odd", "odd", checkpoints, "3MiB"),
        worker("deep", "deep", checkpoints, "3MiB", dtype="float32"),
    ]
    config = {"node": {"port": 0, "lending": {"max_wait": "4s"}}, "models": models}
    temporary = short_temporary_directory()
    with serving(config, tmp_path_factory.mktemp("three"), temporary) as node:
        yield node
    remove(temporary)


def test_one_master_borrows_from_three_workers_of_different_shapes(three: LendingNode, reference: Reference) -> None:
    for name in THREE:
        three.wait_until_lent(name, "float32")
    conversations = [conversation(seed, num_turns=4) for seed in range(12)]
    assert three.hold_all("float32", conversations) == reference.answers("float32", conversations)
    with_each = {link["lender"]: link["extents"]["held"] * link["meu_m"] for link in three.model("float32")["borrows"]}
    assert set(with_each) == set(THREE)
    # More than any two of them have: there is something with each.
    assert three.blocks("float32")["borrowed_cached"] > sum(with_each.values()) - min(with_each.values())
    three.assert_at_rest("float32", *THREE)


def test_a_request_for_which_there_is_no_room_is_refused_in_time(three: LendingNode, reference: Reference) -> None:
    """However many others there are, whom it does not hold up."""
    for name in THREE:
        assert three.set_budget(name, 0).status_code == 200
    with ThreadPoolExecutor(4) as clients:
        refused = clients.submit(three.complete, LONG[0].body("float32", []))
        while not refused.done():
            assert three.hold_all("float32", SHORT) == reference.answers("float32", SHORT)
    answer = refused.result()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "not enough KV cache for this request at the moment" in answer.json()["error"]["message"]
    for name in THREE:
        assert three.set_budget(name, "100%").status_code == 200
        three.wait_until_lent(name, "float32")
    assert three.hold_all("float32", [LONG]) == reference.answers("float32", [LONG])
    three.assert_at_rest("float32", *THREE)
