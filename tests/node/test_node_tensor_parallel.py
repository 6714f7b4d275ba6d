"""A model on two ranks answers like the same model on one, and its ranks live and die together."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.node.test_node_tiers import metric
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for

MAX_MODEL_LEN = 8192
TIERS = {
    "host": {"size": "8MiB"},
    "storage": {"backend": "file", "path": "kv", "size": "64MiB", "prefetch_threshold": 16},
}
PROMPTS = ["def", "def f(x):", "import os\n" * 20, "class A:"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    directory = tmp_path_factory.mktemp("ranks")
    make_checkpoint(directory / "tiny", "llama", tokenizer=True, max_position_embeddings=MAX_MODEL_LEN)
    models: list[dict[str, Any]] = [
        {"path": str(directory / "tiny"), "dtype": "float32", "threads": 2, "kv_cache": {"memory": "8MiB"}, **model}
        for model in ({"name": "whole"}, {"name": "divided", "tensor_parallel_size": 2, "tiers": TIERS})
    ]
    settings = {"port": 0, "watchdog": "30s", "restart": {"limit": 5, "backoff": "50ms"}}
    with NodeProcess({"node": settings, "models": models}, directory, short_temporary_directory()) as node:
        yield node
        processes = ranks(node)
        assert list(node.temporary.glob("swiftkv-*.ipc/1.ranks"))
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(DEADLINE_S) == 0
        assert not psutil.wait_procs(processes, DEADLINE_S)[1]
        node.assert_nothing_left()
    remove(node.temporary)


def complete(node: NodeProcess, model: str, prompt: str = "def", **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "logprobs": 2, "temperature": 0, **fields}
    answer = httpx.post(f"{node.url}/models/{model}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def ranks(node: NodeProcess) -> list[psutil.Process]:
    """The processes of the model on two ranks, rank 0 first."""
    rank_0 = node.engines()["divided"]
    return [rank_0, *rank_0.children()]


def test_it_answers_like_a_model_on_one_rank(node: NodeProcess) -> None:
    requests = [
        {"prompt": prompt, **fields}
        for prompt in PROMPTS
        for fields in ({"temperature": 0}, {"temperature": 1, "seed": 3, "top_p": 0.9}, {"temperature": 0, "n": 2})
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        whole, divided = (
            list(pool.map(lambda fields, model=model: complete(node, model, **fields), requests))
            for model in ("whole", "divided")
        )
    for one, two in zip(whole, divided, strict=True):
        assert one["usage"]["total_tokens"] == two["usage"]["total_tokens"]
        for ours, theirs in zip(one["choices"], two["choices"], strict=True):
            assert ours["text"] == theirs["text"]
            assert ours["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_takes_the_others_along_and_the_model_comes_back(rank: int, node: NodeProcess) -> None:
    wait_for("the model to serve", lambda: node.ready()["divided"] == "ready")
    expected = complete(node, "divided")["choices"]
    before = ranks(node)
    assert len(before) == 2
    body = {"prompt": "def", "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True, "stream": True}
    url = f"{node.url}/models/divided/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        assert next(events)["choices"]
        before[rank].send_signal(signal.SIGKILL)
        *_, last = events
    assert "model 'divided' stopped" in last["error"]["message"]
    how = "was killed by SIGKILL" if rank == 0 else "ended with code 1"
    node.wait_line(rf"divided: the engine {how}; starting it again")
    assert not psutil.wait_procs(before, DEADLINE_S)[1]
    wait_for("the restart", lambda: node.ready()["divided"] == "ready")
    assert complete(node, "divided")["choices"] == expected
    assert complete(node, "whole")["choices"][0]["text"] == expected[0]["text"]
    assert not set(ranks(node)) & set(before)


def test_a_restarted_model_finds_what_all_of_its_ranks_had_computed(node: NodeProcess) -> None:
    wait_for("the model to serve", lambda: node.ready()["divided"] == "ready")
    stored = partial(metric, node, "swiftkv:tier_stored_blocks_total", "divided")
    already = stored()
    prompt = "import sys, json\n" * 40
    expected = complete(node, "divided", prompt)
    before = ranks(node)
    wait_for("blocks to be written", lambda: stored() > already)
    before[1].send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(before, DEADLINE_S)[1]
    wait_for("the restart", lambda: node.ready()["divided"] == "ready")
    again = complete(node, "divided", prompt, return_cached_tokens_details=True)
    assert again["choices"] == expected["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens_details"]["host"] > 0


def test_a_rank_that_is_stopped_without_work_is_shown(node: NodeProcess) -> None:
    before = ranks(node)
    before[1].send_signal(signal.SIGSTOP)
    try:
        wait_for("it to be seen", lambda: node.ready()["divided"] == "stopped")
    finally:
        before[1].send_signal(signal.SIGCONT)
    wait_for("it to go on", lambda: node.ready()["divided"] == "ready")
    assert ranks(node) == before


@pytest.mark.slow
def test_a_stopped_rank_is_a_hung_engine(node: NodeProcess) -> None:
    """Rank 0 says which one it was, or is itself ended as hung where the machine is too slow for that."""
    before = ranks(node)
    body = {"prompt": "def", "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True}
    url = f"{node.url}/models/divided/v1/completions"
    with ThreadPoolExecutor(1) as clients:
        before[1].send_signal(signal.SIGSTOP)
        answer = clients.submit(httpx.post, url, json=body, timeout=DEADLINE_S)
        wait_for("it to be seen", lambda: node.ready()["divided"] != "ready")
        assert answer.result().status_code == 503
    how = r"(ended with code 1|made no progress for \d+ s and was ended)"
    node.wait_line(rf"divided: the engine {how}; starting it again")
    assert not psutil.wait_procs(before, DEADLINE_S)[1]
    wait_for("the restart", lambda: node.ready()["divided"] == "ready")
    assert complete(node, "divided")["choices"]


def test_a_signal_while_ranks_load_leaves_nothing(node: NodeProcess, tmp_path: Path) -> None:
    models = [{"name": "m", "path": str(node.file.parent / "tiny"), "tensor_parallel_size": 2}]
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": models}, tmp_path, temporary, wait=False) as loading:
        wait_for("rank 0 to start the other", lambda: bool(list(temporary.glob("swiftkv-*.ipc/*.ranks"))))
        loading.process.send_signal(signal.SIGTERM)
        assert loading.process.wait(DEADLINE_S) == 0, "\n".join(loading.lines)
        loading.assert_nothing_left()
    remove(temporary)


def test_a_model_whose_rank_0_was_killed_can_be_removed(node: NodeProcess) -> None:
    """A killed rank 0 leaves the directory in which its ranks met."""
    url, headers = f"{node.url}/admin/models", node.admin_headers()
    section = {"name": "brief", "path": str(node.file.parent / "tiny"), "tensor_parallel_size": 2}
    added = httpx.post(url, json={**section, "kv_cache": {"memory": "8MiB"}}, headers=headers, timeout=DEADLINE_S)
    assert added.status_code == 201, added.text
    node.engines()["brief"].kill()
    wait_for("it to be seen", lambda: node.ready()["brief"] != "ready")
    removed = httpx.delete(f"{url}/brief", headers=headers, timeout=DEADLINE_S)
    assert removed.status_code == 200, removed.text
    assert "brief" not in node.ready()
    assert 'model_name="brief"' not in httpx.get(f"{node.url}/metrics").text


def test_a_size_that_does_not_divide_starts_nothing(node: NodeProcess, tmp_path: Path) -> None:
    config = json.loads(json.dumps({"models": [{"name": "m", "path": str(node.file.parent / "tiny")}]}))
    config["models"][0]["tensor_parallel_size"] = 3
    with NodeProcess(config, tmp_path, tmp_path, wait=False) as refused:
        assert refused.process.wait(DEADLINE_S) == 2
