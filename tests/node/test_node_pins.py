"""Pins of a real node, as its administrator makes them: what they keep, and until when."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from swiftkv.cli import app
from tests.support.node_process import DEADLINE_S, NodeProcess

BLOCK = 16


@pytest.fixture
def node(checkpoint: Path, tmp_path: Path, temporary: Path) -> Iterator[NodeProcess]:
    """A model whose pool has room for 768 tokens."""
    model = {"name": "chat", "path": str(checkpoint), "dtype": "float32", "threads": 1, "max_model_len": 512}
    model |= {"kv_cache": {"memory": "768KiB", "max_pinned": "50%"}}
    with NodeProcess({"node": {"port": 0}, "models": [model]}, tmp_path, temporary) as node:
        yield node


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def ask(node: NodeProcess, tokens: list[int]) -> tuple[str, int]:
    """Return a request's id, and how much of its prompt was cached."""
    body = {"model": "chat", "prompt": tokens, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{node.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Request-Id"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def fill(node: NodeProcess, *seeds: int) -> None:
    """Ask for other prompts, of which two take more than the pool."""
    for seed in seeds:
        ask(node, prompt(400, seed))


def steer(node: NodeProcess, *command: str) -> str:
    done = CliRunner().invoke(app, ["cache", *command, "--url", node.url])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_pinned_prompt_stays_in_the_pool_until_it_is_unpinned(node: NodeProcess) -> None:
    kept, other = prompt(200, 1), prompt(200, 2)
    request_id, _ = ask(node, kept)
    ask(node, other)
    made = re.search(r"chat keeps 192 tokens for 28,800 s: pin (\d+)", steer(node, "pin", request_id, "--for", "8h"))
    assert made
    fill(node, 3, 4, 5)
    assert ask(node, kept)[1] == 200 // BLOCK * BLOCK
    assert ask(node, other)[1] == 0
    assert f"chat keeps 192 tokens: pin {made[1]}" in steer(node, "show")
    assert steer(node, "unpin", "chat", made[1]) == f"chat: pin {made[1]} is removed\n"
    fill(node, 6, 7, 8)
    assert ask(node, kept)[1] == 0
    assert "pin" not in steer(node, "show")


def test_a_chat_that_nobody_has_pinned_by_its_request_stays(node: NodeProcess, tmp_path: Path) -> None:
    """The node renders and tokenizes it as it did when it was asked for."""
    body = {"messages": [{"role": "system", "content": "be kind " * 30}, {"role": "user", "content": "hello"}]}
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(body))
    before = CliRunner().invoke(app, ["cache", "pin", "--model", "chat", "--prompt", str(file), "--url", node.url])
    assert before.exit_code == 1
    assert "no whole block of the prompt is in the model's own pool now" in before.stderr
    num_tokens = chat(node, body)[0]
    made = steer(node, "pin", "--model", "chat", "--prompt", str(file))
    num_kept = num_tokens // BLOCK * BLOCK
    assert made == f"chat keeps {num_kept} tokens for 3,600 s: pin 1\n"
    fill(node, 3, 4, 5)
    assert chat(node, body)[1] == (num_tokens - 1) // BLOCK * BLOCK


def chat(node: NodeProcess, body: dict[str, Any]) -> tuple[int, int]:
    """Return how long a chat is, and how much of it was cached."""
    answer = httpx.post(f"{node.url}/v1/chat/completions", json={**body, "max_tokens": 2}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_pin_names_a_request_that_the_node_remembers(node: NodeProcess) -> None:
    done = CliRunner().invoke(app, ["cache", "pin", "nobody", "--url", node.url])
    assert done.exit_code != 0
    assert "no recent request has the id 'nobody'" in done.stderr
