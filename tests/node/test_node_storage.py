"""Storage of a real node: attached while it runs, and still there after a restart; one store for two nodes."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.mooncake_store import mooncake_store
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for

pytestmark = pytest.mark.slow
FILE = {"backend": "file", "path": "kv", "size": "64MiB", "min_free": 0}
FILE |= {"prefetch_threshold": 64, "prefetch_policy": "wait_complete"}


def node_of(directory: Path, temporary: Path, tiers: dict[str, Any] | None = None) -> NodeProcess:
    options = {"dtype": "float32", "threads": 1, "max_model_len": 2048, "kv_cache": {"memory": "16MiB"}}
    model = {"name": "chat", "path": str(directory / "chat"), **options} | ({} if tiers is None else {"tiers": tiers})
    return NodeProcess({"node": {"port": 0}, "models": [model]}, directory, temporary)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "chat", "gemma3", tokenizer=True, max_position_embeddings=2048)
    return tmp_path


def change(node: NodeProcess, what: str, body: object = None) -> dict[str, Any]:
    url = f"{node.url}/admin/storage/chat/{what}"
    answer = httpx.post(url, json=body, headers=node.admin_headers(), timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(node: NodeProcess, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy answer, and how much of the prompt was cached."""
    body = {"model": "chat", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{node.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content["choices"][0]["token_ids"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(node: NodeProcess, name: str) -> float:
    text = httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def wait_until_stored(node: NodeProcess) -> None:
    wait_for("blocks to be written", lambda: metric(node, "swiftkv:tier_stored_blocks_total"))
    wait_for("all of them", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def test_what_was_attached_is_there_after_a_restart_until_it_is_detached(directory: Path) -> None:
    temporary = short_temporary_directory()
    with node_of(directory, temporary) as node:
        first, _ = complete(node, prompt(300, 1))
        assert change(node, "attach", FILE)["backend"] == "file"
        second, _ = complete(node, prompt(300, 2))
        wait_until_stored(node)
        node.engines()["chat"].send_signal(signal.SIGKILL)
        wait_for("the engine to be gone", lambda: node.engine_views()["chat"]["restarts"] == 1)
        wait_for("the engine to be back", lambda: node.ready()["chat"] == "ready")
        assert complete(node, prompt(300, 1)) == (first, 288)  # from before storage was attached
        assert complete(node, prompt(300, 2)) == (second, 288)
        assert change(node, "detach")["backend"] is None
        assert node.engine_views()["chat"]["storage_backend"] is None
        assert complete(node, prompt(300, 3))[1] == 0
    remove(temporary)


def test_two_nodes_share_a_mooncake_store(directory: Path) -> None:
    with mooncake_store() as store:
        backend = {"backend": "mooncake", "master_server_address": store.address, "timeout": "10s"}
        tiers = {"storage": {**backend, "prefetch_threshold": 64, "prefetch_policy": "wait_complete"}}
        temporaries = [short_temporary_directory() for _ in range(2)]
        with node_of(directory, temporaries[0], tiers) as first:
            right, _ = complete(first, prompt(300, 1))
            wait_until_stored(first)
            with node_of(directory, temporaries[1], tiers) as second:
                assert complete(second, prompt(300, 1)) == (right, 288)
                assert second.engine_views()["chat"]["storage_backend"] == "mooncake"
        for temporary in temporaries:
            remove(temporary)
