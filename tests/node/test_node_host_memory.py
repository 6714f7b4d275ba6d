"""Engines with equal weights share host memory, which outlives each of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv._host import MAX_MEMBERS
from swiftkv.storage.host_medium import HostMedium
from tests.node.test_node_tiers import complete, metric
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for

TURN_TOKENS = 300


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One checkpoint, twice with host memory and once without."""
    directory = tmp_path_factory.mktemp("host")
    make_checkpoint(directory / "weights", request.param, tokenizer=True, max_position_embeddings=2048)
    host: dict[str, Any] = {"tiers": {"host": {"size": "16MiB"}}}
    common = {"path": "weights", "dtype": "float32", "threads": 1, "max_model_len": 2048}
    models = [
        {"name": name, "kv_cache": {"memory": "4MiB"}, **common, **options}
        for name, options in (("one", host), ("two", host), ("plain", {}))
    ]
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": models}, directory, temporary) as node:
        yield node
    remove(temporary)


def wait_until_written(node: NodeProcess, name: str) -> None:
    wait_for("blocks to be written", lambda: metric(node, "swiftkv:tier_stored_blocks_total", name))
    wait_for("all of them", lambda: metric(node, "swiftkv:tier_blocks_to_store", name) == 0)


def kill_engine(node: NodeProcess, name: str) -> None:
    """Kill an engine, and wait for the next one."""
    restarts = node.engine_views()[name]["restarts"]
    node.engines()[name].send_signal(signal.SIGKILL)
    wait_for("the engine to be gone", lambda: node.engine_views()[name]["restarts"] == restarts + 1)
    wait_for("the engine to be back", lambda: node.ready()[name] == "ready")


def pinned_by(node: NodeProcess, member: int) -> int:
    """Return how many chunks of the node's host memory a member pins."""
    files = Path(f"/proc/{node.process.pid}/fd").iterdir()
    file = next(each for each in files if "swiftkv-host" in os.readlink(each))
    with closing(os.fdopen(os.open(file, os.O_RDWR), "r+b")) as opened:
        medium = HostMedium.of(opened.fileno(), MAX_MEMBERS - 1)
    return sum(members >> member & 1 for members in medium._memory.pinned_by(range(medium.num_chunks)))


def test_a_conversation_goes_on_in_another_engine_and_after_a_crash(node: NodeProcess) -> None:
    rng = random.Random(5)
    history: list[int] = []
    cached, expected = [], [0]
    for turn, name in enumerate(("one", "two", "two", "one")):
        history += [rng.randrange(3, 320) for _ in range(TURN_TOKENS)]
        right, _ = complete(node, "plain", history)
        answer, cached_tokens = complete(node, name, history)
        assert answer == right
        cached.append(cached_tokens)
        history += answer
        wait_until_written(node, name)
        if turn == 1:
            kill_engine(node, "two")
        expected.append((len(history) - 1) // 16 * 16)
    assert cached == expected[:-1]
    assert node.engine_views()["one"]["storage"] == "ok"


def test_storage_comes_and_goes_below_host_memory_also_for_engines_that_are_started_again(node: NodeProcess) -> None:
    history = [random.Random(6).randrange(3, 320) for _ in range(TURN_TOKENS)]
    whole = TURN_TOKENS // 16 * 16
    complete(node, "one", history)
    wait_until_written(node, "one")
    answer, cached_tokens = complete(node, "two", [*history, 5])
    assert cached_tokens == whole
    assert pinned_by(node, 1) >= whole // 16
    assert change_storage(node, "attach", {"backend": "file", "path": "kv", "size": "64MiB"})["backend"] == "file"
    assert complete(node, "two", [*history, 5]) == (answer, whole)
    kill_engine(node, "two")
    assert pinned_by(node, 1) == 0
    assert complete(node, "two", [*history, 5]) == (answer, whole)
    assert pinned_by(node, 1) >= whole // 16
    assert node.engine_views()["two"]["storage_backend"] == "file"
    assert change_storage(node, "detach")["backend"] == "host"
    assert complete(node, "two", [*history, 5]) == (answer, whole)
    assert change_storage(node, "detach")["error"]["message"] == "no storage is attached"
    kill_engine(node, "two")
    assert complete(node, "two", [*history, 5]) == (answer, whole)
    assert pinned_by(node, 1) >= whole // 16


def change_storage(node: NodeProcess, change: str, section: dict[str, Any] | None = None) -> dict[str, Any]:
    """Attach storage to model `two`, or detach it, and return the answer."""
    url = f"{node.url}/admin/storage/two/{change}"
    answer: dict[str, Any] = httpx.post(url, headers=node.admin_headers(), json=section, timeout=DEADLINE_S).json()
    return answer
