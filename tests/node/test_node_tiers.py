"""Conversations that survive the end of their engine: a real node with storage below its pools."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for

MAX_TOKENS = 24


def model(name: str, path: Path, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(path),
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 2048,
        "kv_cache": {"memory": "16MiB"},
        "tiers": {"storage": "off"},
        **options,
    }


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Each architecture once with storage, and once without."""
    directory = tmp_path_factory.mktemp("tiers")
    shape = {"tokenizer": True, "max_position_embeddings": 2048}
    make_checkpoint(directory / "dense", "llama", **shape)
    make_checkpoint(directory / "hybrid", "gemma3", **shape)
    storage = {"backend": "file", "path": "kv", "size": "64MiB", "min_free": 0}
    storage |= {"prefetch_threshold": 64, "prefetch_policy": "wait_complete"}
    models = [
        model(f"{kind}{suffix}", directory / kind, **options)
        for kind in ("dense", "hybrid")
        for suffix, options in (("", {"tiers": {"storage": storage}}), ("-plain", {}))
    ]
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": models}, directory, temporary) as node:
        yield node
    remove(temporary)


def complete(node: NodeProcess, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy answer, and how much of the prompt was cached."""
    body = {"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{node.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content["choices"][0]["token_ids"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(node: NodeProcess, name: str, model: str) -> float:
    text = httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and f'model_name="{model}"' in line]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def kill_engine(node: NodeProcess, name: str) -> None:
    """Kill an engine that has written all of its blocks, and wait for the next one."""
    wait_for("blocks to be written", lambda: metric(node, "swiftkv:tier_stored_blocks_total", name))
    wait_for("all of them", lambda: metric(node, "swiftkv:tier_blocks_to_store", name) == 0)
    node.engines()[name].send_signal(signal.SIGKILL)
    wait_for("the engine to be gone", lambda: node.engine_views()[name]["restarts"] == 1)
    wait_for("the engine to be back", lambda: node.ready()[name] == "ready")


def test_what_a_node_has_not_written_back_is_written_when_it_ends(tmp_path: Path, temporary: Path) -> None:
    """While it runs its pool has room for everything."""
    make_checkpoint(tmp_path / "hybrid", "gemma3", tokenizer=True, max_position_embeddings=2048)
    storage = {"backend": "file", "path": "kv", "size": "64MiB", "min_free": 0, "write_policy": "write_back"}
    storage |= {"prefetch_threshold": 64, "prefetch_policy": "wait_complete"}
    config = {"node": {"port": 0}, "models": [model("chat", tmp_path / "hybrid", tiers={"storage": storage})]}
    history = [random.Random(7).randrange(3, 320) for _ in range(300)]
    with NodeProcess(config, tmp_path, temporary) as node:
        answer, _ = complete(node, "chat", history)
        assert metric(node, "swiftkv:tier_stored_blocks_total", "chat") == 0
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(DEADLINE_S) == 0
    history += [*answer, 5, 6, 7]
    with NodeProcess(config, tmp_path, temporary) as node:
        _, cached_tokens = complete(node, "chat", history)
    assert cached_tokens == (len(history) - 4) // 16 * 16


def test_storage_that_fails_is_seen_by_who_watches_and_in_no_answer(tmp_path: Path, temporary: Path) -> None:
    make_checkpoint(tmp_path / "dense", "llama", tokenizer=True, max_position_embeddings=2048)
    file = {"backend": "file", "path": "kv", "size": "64MiB", "min_free": 0}
    tiers = {"storage": {"backend": "fault", "inner": file, "fail": 1.0, "prefetch_threshold": 64}}
    models = [model("chat", tmp_path / "dense", tiers=tiers), model("plain", tmp_path / "dense")]
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 320) for _ in range(150)] for _ in range(6)]
    with NodeProcess({"node": {"port": 0}, "models": models}, tmp_path, temporary) as node:
        assert node.engine_views()["chat"]["storage"] == "ok"
        found = [complete(node, "chat", prompt) for prompt in prompts]
        wait_for("storage to be left alone", lambda: node.engine_views()["chat"]["storage"] == "degraded")
        assert metric(node, "swiftkv:tier_degraded", "chat") == 1
        assert node.ready() == {"chat": "ready", "plain": "ready"}
        assert found == [complete(node, "plain", prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_conversation_survives_the_kill_of_its_engine(node: NodeProcess, name: str) -> None:
    rng = random.Random(name)
    history: list[int] = []
    for turn in range(4):
        history += [rng.randrange(3, 320) for _ in range(150)]
        right, _ = complete(node, f"{name}-plain", history)
        answer, cached_tokens = complete(node, name, history)
        assert answer == right
        assert (cached_tokens > 0) == (turn > 0)
        history += answer
        if turn == 1:
            in_blocks = (len(history) - 1) // 16
            kill_engine(node, name)
        if turn == 2:
            assert cached_tokens == in_blocks * 16
            assert wait_for("its report", lambda: metric(node, "swiftkv:tier_hit_tokens_total", name)) == cached_tokens
    assert node.engine_views()[name]["storage"] == "ok"
    assert node.engine_views()[f"{name}-plain"]["storage"] is None
