"""A node that lends, from its YAML to its leases: real engines, tiny random models."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from swiftkv.config import load_config
from swiftkv.planning.lending import BorrowerRoom, plan_lending
from swiftkv.planning.node import plan_node
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """`long` has a pool of 128 tokens; `idle` has twenty times as much, and lends three times that."""
    directory = tmp_path_factory.mktemp("lending")
    make_checkpoint(directory / "tiny", "llama", tokenizer=True, num_hidden_layers=6, max_position_embeddings=8192)
    models: list[dict[str, Any]] = [
        {"name": "long", "role": "master", "kv_cache": {"memory": "400KiB"}},
        {"name": "idle", "kv_cache": {"memory": "8MiB"}, "lending": {"budget": "15%", "window": "200ms"}},
    ]
    models = [{"path": str(directory / "tiny"), "dtype": "float32", "threads": 1, **model} for model in models]
    settings = {"port": 0, "restart": {"limit": 2, "backoff": "50ms"}, "request_log": str(directory / "requests")}
    config = {"node": settings, "models": models}
    with NodeProcess(config, directory, short_temporary_directory()) as node:
        yield node
    remove(node.temporary)


def room(node: NodeProcess) -> BorrowerRoom:
    (room,) = plan_lending(plan_node(load_config(node.file), need_weights=True))
    return room


def admin(node: NodeProcess, path: str) -> dict[str, Any]:
    answer = httpx.get(f"{node.url}/admin/{path}", headers=node.admin_headers(), timeout=DEADLINE_S)
    return answer.json() if answer.status_code == 200 else {}


def borrowed_bytes(node: NodeProcess) -> int | None:
    models = admin(node, "lending").get("models", [])
    return next((model["borrowed_bytes"] for model in models if model["model"] == "long"), None)


def is_borrowed(node: NodeProcess, num_bytes: int) -> bool:
    return borrowed_bytes(node) == num_bytes


def set_budget(node: NodeProcess, budget: str | int) -> dict[str, Any]:
    url = f"{node.url}/admin/lending/idle"
    answer = httpx.patch(url, json={"budget": budget}, headers=node.admin_headers(), timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    change: dict[str, Any] = answer.json()
    return change


def assert_pools_add_up(node: NodeProcess) -> None:
    for name in ("long", "idle"):
        for group in wait_for("an answer", lambda name=name: admin(node, f"pools/{name}"))["groups"]:
            states = ("free", "used", "cached", "lent", "in_flight", "staging")
            assert sum(group[state] for state in states) == group["total"]


def test_what_the_plan_promises_is_lent_and_serves_max_model_len(node: NodeProcess) -> None:
    promised = room(node)
    wait_for("all that is promised", lambda: borrowed_bytes(node) == promised.lent_bytes)
    longest = promised.longest_context
    assert longest > 2 * promised.borrower.pool_tokens
    body = {"model": "long", "prompt": [5] * (longest - 4), "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{node.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.json()["usage"]["completion_tokens"] == 4
    longer = httpx.post(f"{node.url}/v1/completions", json={**body, "max_tokens": 5}, timeout=DEADLINE_S)
    assert longer.status_code == 400
    assert_pools_add_up(node)


def test_metrics_show_what_engines_at_rest_have_lent_and_borrowed(node: NodeProcess) -> None:
    def metrics() -> dict[str, float]:
        samples = (line.rpartition(" ") for line in httpx.get(f"{node.url}/metrics").text.splitlines())
        return {name: float(value) for name, _, value in samples if name.startswith("swiftkv:kv_blocks{")}

    def are_right() -> bool:
        (group,) = admin(node, "pools/idle")["groups"]
        shown = metrics()
        states = ("free", "used", "cached", "lent")
        return all(
            shown[f'swiftkv:kv_blocks{{group="0",model_name="idle",state="{state}"}}'] == group[state]
            for state in states
        )

    for budget in ("0", "15%"):
        set_budget(node, budget)
        expected = 0 if budget == "0" else room(node).lent_bytes
        wait_for("blocks to change hands", partial(is_borrowed, node, expected))
        wait_for("metrics that say so", are_right)


def test_the_line_of_a_request_says_what_changed_hands_meanwhile(node: NodeProcess) -> None:
    promised = room(node)
    prompt = [5] * 2 * promised.borrower.pool_tokens

    def asked(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return {"url": f"{node.url}/v1/completions", "json": body, "headers": {"X-Request-Id": f"leases-{model}"}}

    wait_for("all that is promised", lambda: borrowed_bytes(node) == promised.lent_bytes)
    with ThreadPoolExecutor() as threads, httpx.stream("POST", **asked("idle", [5], 2000), timeout=DEADLINE_S) as idle:
        tokens = idle.iter_lines()
        next(tokens)
        recalled = set_budget(node, "0")["recalled_bytes"]
        long = threads.submit(httpx.post, **asked("long", prompt, 4), timeout=DEADLINE_S)
        wait_for("a request that waits for memory", lambda: node.engine_views()["long"]["in_flight"] == 1)
        set_budget(node, "15%")
        assert long.result().status_code == 200
        assert list(tokens)[-2] == "data: [DONE]"
    lines = wait_for("both lines", lambda: lines_of(node, "leases-"))
    assert recalled == promised.lent_bytes <= lines["leases-idle"]["taken_back"]
    assert 0 < lines["leases-long"]["borrowed"] <= lines["leases-idle"]["lent"]
    assert lines["leases-long"]["given_back"] == 0


def lines_of(node: NodeProcess, request_id: str) -> dict[str, dict[str, int]]:
    """Return `leased_bytes` of the two requests whose ids begin so, once both have a line."""
    lines = map(json.loads, (node.file.parent / "requests").read_text().splitlines())
    found = {line["request_id"]: line["leased_bytes"] for line in lines if line["request_id"].startswith(request_id)}
    return found if len(found) == 2 else {}


def test_a_budget_that_was_set_outlives_the_engine(node: NodeProcess) -> None:
    extent_bytes = room(node).pairs[0].extent.num_bytes
    wait_for("something to be lent", lambda: (borrowed_bytes(node) or 0) > 2 * extent_bytes)
    lowered = set_budget(node, f"{2 * extent_bytes}B")
    assert lowered["lent_bytes"] == 2 * extent_bytes
    assert lowered["recalled_bytes"] > 0
    assert borrowed_bytes(node) == 2 * extent_bytes
    assert_pools_add_up(node)
    dead = node.engines()["idle"]
    dead.send_signal(signal.SIGKILL)
    wait_for("the engine to be back", lambda: node.engines().get("idle", dead).pid != dead.pid and node_is_up(node))
    wait_for("lending to go on", lambda: borrowed_bytes(node) == 2 * extent_bytes)
    (idle,) = (m for m in admin(node, "lending")["models"] if m["model"] == "idle")
    assert (idle["budget_bytes"], idle["lent_bytes"]) == (2 * extent_bytes, 2 * extent_bytes)
    assert_pools_add_up(node)


def node_is_up(node: NodeProcess) -> bool:
    return set(node.ready().values()) == {"ready"}
