"""Batches of a real node: kill -9 in the middle, SIGTERM, and a directory that another node has."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.node_process import (
    DEADLINE_S,
    MAX_MODEL_LEN,
    NodeProcess,
    remove,
    short_temporary_directory,
    small_models,
    wait_for,
)


def config(checkpoint: Path, state: Path, *names: str) -> dict[str, Any]:
    models = [{**model, "max_num_seqs": 8} for model in small_models(checkpoint, *names)]
    return {"node": {"port": 0, "state_dir": str(state)}, "models": models}


def client_of(node: NodeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def bodies(count: int, max_tokens: int, *names: str) -> list[dict[str, Any]]:
    """Requests with greedy answers, which the kernels of the CPU compute the same whatever runs beside them."""
    return [
        {
            "model": names[i % len(names)],
            "prompt": f"def number_{i}(",
            "max_tokens": max_tokens + i % 5,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


def start_batch(client: openai.OpenAI, requests: list[dict[str, Any]]) -> str:
    lines = [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(requests)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


def num_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


@pytest.mark.parametrize("way", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_every_line_is_answered_once_whatever_ends_the_node(
    checkpoint: Path, tmp_path: Path, way: signal.Signals
) -> None:
    temporary, state = short_temporary_directory(), tmp_path / "deep" / "state"
    setup, requests = config(checkpoint, state, "chat"), bodies(40, 60, "chat")
    requests[-1]["max_tokens"] = 3000  # the batch outlasts the question how far it is
    with NodeProcess(setup, tmp_path, temporary) as node:
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        with client_of(node) as client:
            batch_id = start_batch(client, requests)
            wait_for("some lines", lambda: num_completed(client, batch_id) >= 3)
            before = num_completed(client, batch_id)
            assert before < 40
        node.process.send_signal(way)
        node.process.wait(DEADLINE_S)
        if way == signal.SIGTERM:
            assert node.process.returncode == 0
            node.assert_nothing_left()
    with NodeProcess(setup, tmp_path, temporary) as node, client_of(node) as client:
        assert num_completed(client, batch_id) >= before
        wait_for("the end", lambda: client.batches.retrieve(batch_id).status == "completed")
        batch = client.batches.retrieve(batch_id)
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"line-{i}" for i in range(40)]
        for answer, body in list(zip(answers, requests, strict=True))[::7]:
            alone = httpx.post(f"{node.url}/v1/completions", json=body, timeout=DEADLINE_S).json()
            assert answer["response"]["body"]["choices"] == alone["choices"]
    remove(temporary)


@pytest.mark.slow
def test_an_engine_that_is_killed_costs_a_batch_nothing_but_time(checkpoint: Path, tmp_path: Path) -> None:
    temporary = short_temporary_directory()
    setup = config(checkpoint, tmp_path / "state", "chat", "code")
    setup["node"]["restart"] = {"backoff": "50ms"}
    with NodeProcess(setup, tmp_path, temporary) as node, client_of(node) as client:
        batch_id = start_batch(client, bodies(40, 60, "chat", "code"))
        wait_for("some lines", lambda: num_completed(client, batch_id) >= 2)
        node.engines()["chat"].send_signal(signal.SIGKILL)
        wait_for("the end", lambda: client.batches.retrieve(batch_id).status == "completed")
        batch = client.batches.retrieve(batch_id)
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        answers = client.files.content(batch.output_file_id).text.splitlines()
        assert [json.loads(answer)["custom_id"] for answer in answers] == [f"line-{i}" for i in range(40)]
        # A client's request goes before the lines of a batch that wait, and finds a slot before any line has ended.
        batch_id = start_batch(client, bodies(60, MAX_MODEL_LEN - 100, "chat"))
        wait_for("some lines to run", lambda: node.engine_views()["chat"]["in_flight"] >= 2)
        body = {"model": "chat", "prompt": "def", "max_tokens": 4, "ignore_eos": True}
        for _ in range(3):
            assert httpx.post(f"{node.url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
        assert num_completed(client, batch_id) == 0
        client.batches.cancel(batch_id)
        wait_for("its end", lambda: client.batches.retrieve(batch_id).status == "cancelled")
    remove(temporary)


@pytest.mark.slow
def test_a_disk_that_hangs_does_not_keep_the_node_from_stopping(checkpoint: Path, tmp_path: Path) -> None:
    temporary, state = short_temporary_directory(), tmp_path / "state"
    with NodeProcess(config(checkpoint, state, "chat"), tmp_path, temporary) as node, client_of(node) as client:
        file = client.files.create(file=("requests.jsonl", b"{}\n"), purpose="batch")
        content = state / "files" / file.id
        content.unlink()
        os.mkfifo(content)  # who reads it waits for ever
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        silent = wait_for("a thread to read it", lambda: writer_of(content))
        node.process.send_signal(signal.SIGTERM)
        node.wait_line("the disk of node.state_dir hangs")
        assert node.process.wait(DEADLINE_S) == 1
        node.assert_nothing_left()
    os.close(silent)
    remove(temporary)


def writer_of(fifo: Path) -> int | None:
    """Return a descriptor that writes to `fifo`, `None` as long as nobody reads it."""
    with suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return None


@pytest.mark.slow
def test_a_node_whose_state_was_removed_stops_in_order(checkpoint: Path, tmp_path: Path) -> None:
    temporary, state = short_temporary_directory(), tmp_path / "state"
    with NodeProcess(config(checkpoint, state, "chat"), tmp_path, temporary) as node:
        remove(state)
        node.process.send_signal(signal.SIGTERM)
        node.wait_line(" stopped$")
        assert node.process.wait(DEADLINE_S) == 0
        node.assert_nothing_left()
    remove(temporary)


def test_a_directory_that_another_node_has_is_named_at_the_start(checkpoint: Path, tmp_path: Path) -> None:
    temporary, state = short_temporary_directory(), tmp_path / "state"
    state.mkdir(mode=0o700)
    lock = os.open(state, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with NodeProcess(
        config(checkpoint, state, "chat"), tmp_path, temporary, wait=False, stderr=subprocess.STDOUT
    ) as node:
        node.wait_line("node.state_dir: another node uses")
        assert node.process.wait(DEADLINE_S) == 2
    os.close(lock)
    remove(temporary)
