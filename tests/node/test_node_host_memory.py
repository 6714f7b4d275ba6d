"""Engines with equal weights share host memory, which outlives each of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.test_node_tiers import complete, metric
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import NodeProcess, remove, short_temporary_directory, wait_for

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
            node.engines()["two"].send_signal(signal.SIGKILL)
            wait_for("the engine to be gone", lambda: node.engine_views()["two"]["restarts"] == 1)
            wait_for("the engine to be back", lambda: node.ready()["two"] == "ready")
        expected.append((len(history) - 1) // 16 * 16)
    assert cached == expected[:-1]
    assert node.engine_views()["one"]["storage"] == "ok"
