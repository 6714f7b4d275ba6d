"""Models with window layers borrow and lend; their answers are those without lending, token for token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.lending_node import LendingNode, Reference, Turn, conversation, meanwhile, serving
from tests.support.node_process import remove, short_temporary_directory, wait_for

WINDOW = 40
CONVERSATIONS = [conversation(seed) for seed in range(6)]
SHORT_ONES = [conversation(seed, num_turns=1, question_tokens=(20, 40), max_tokens=(4, 8)) for seed in range(20, 140)]
LONG = (Turn(tuple(3 + i * i % 311 for i in range(700)), 12),)
LONG_ONES = [(Turn(tuple(3 + i * (i + seed) % 311 for i in range(900)), 4),) for seed in range(5)]
NAMES = ("hybrid", "windows")
on_shm_first = pytest.mark.parametrize(
    "node", ["shm", pytest.param("p2p", marks=pytest.mark.slow)], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("hybrids")
    shape: dict[str, Any] = {"tokenizer": True, "max_position_embeddings": 16384, "sliding_window": WINDOW}
    types = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    make_checkpoint(
        directory / "hybrid", "qwen3", num_hidden_layers=6, layer_types=types, use_sliding_window=True, **shape
    )
    make_checkpoint(directory / "windows", "mistral", seed=1, num_hidden_layers=3, **shape)
    make_checkpoint(
        directory / "worker",
        "qwen3",
        seed=2,
        num_hidden_layers=5,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        use_sliding_window=True,
        **shape,
    )
    return {name: directory / name for name in ("hybrid", "windows", "worker")}


def model(name: str, path: Path, memory: str, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(path),
        "dtype": "float32",
        "threads": 1,
        "kv_cache": {"memory": memory},
        **options,
    }


@pytest.fixture(scope="module")
def right(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    models = [model(name, path, "64MiB") for name, path in paths.items()]
    config = {"node": {"port": 0, "lending": "off"}, "models": models}
    temporary = short_temporary_directory()
    with serving(config, tmp_path_factory.mktemp("right"), temporary) as node:
        yield Reference(node)
    remove(temporary)


@pytest.fixture(scope="module", params=["shm", "p2p"])
def node(
    request: pytest.FixtureRequest, paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LendingNode]:
    small: dict[str, Any] = {"role": "master", "max_num_batched_tokens": 256, "max_num_seqs": 16}
    models = [
        model("hybrid", paths["hybrid"], "1152KiB", **small),
        model("windows", paths["windows"], "576KiB", **small),
        model("worker", paths["worker"], "10MiB", lending={"budget": "60%", "window": "200ms"}),
    ]
    config = {
        "node": {
            "port": 0,
            "restart": {"limit": 1000, "window": "1s", "backoff": "50ms"},
            "lending": {"transport": request.param, "max_wait": "100s"},
        },
        "models": models,
    }
    temporary = short_temporary_directory()
    with serving(config, tmp_path_factory.mktemp("node"), temporary) as node:
        yield node
    remove(temporary)


def test_hybrids_borrow_from_a_hybrid_and_answer_exactly(node: LendingNode, right: Reference) -> None:
    for name in NAMES:
        node.wait_until_lent("worker", name)
        for conversations in (CONVERSATIONS, [LONG], CONVERSATIONS):
            assert node.hold_all(name, conversations) == right.answers(name, conversations)
    assert node.blocks("hybrid")["borrowed_cached"] > 0
    assert node.hold_all("worker", CONVERSATIONS) == right.answers("worker", CONVERSATIONS)
    node.assert_at_rest("worker", *NAMES)


def extents_of(node: LendingNode, model: str) -> list[int]:
    """Return how many extents of its pool each KV group of a model has for itself: one full block of four, or one."""
    full, windows = (group["total"] - group["elsewhere"] - group["lent"] for group in node.pool(model)["groups"])
    return [full // 4, windows]


def lends_its_budget(node: LendingNode, model: str) -> bool:
    """Return whether no more than what is less than an extent of each link's share is left."""
    view = node.model(model)
    rounded_off_bytes = sum(link["extent_bytes"] for link in view["lends"])
    return bool((view["budget_bytes"] or math.inf) - (view["lent_bytes"] or 0) < rounded_off_bytes)


@on_shm_first
def test_extents_go_from_group_to_group_in_a_pool_that_lends(node: LendingNode, right: Reference) -> None:
    """Tails of short prompts make room for long histories, and come back, while masters hold the rest."""
    full, windows = [], []
    for conversations in (SHORT_ONES[:60], LONG_ONES, SHORT_ONES[60:]):
        wait_for("the idle worker to lend what it may", lambda: lends_its_budget(node, "worker"))
        assert [node.hold("worker", turns) for turns in conversations] == right.answers("worker", conversations)
        for of_group, count in zip((full, windows), extents_of(node, "worker"), strict=True):
            of_group.append(count)
    assert full[0] < full[1] > full[2]
    assert windows[0] > windows[1] < windows[2]
    node.assert_at_rest("worker", *NAMES)


@on_shm_first
def test_a_hybrid_dies_while_hybrids_stream_from_it(node: LendingNode, right: Reference) -> None:
    expected = right.answers("hybrid", [LONG, *CONVERSATIONS])
    node.wait_until_lent("worker", "hybrid")
    dead = node.process.engines()["worker"]

    def hold() -> None:
        assert node.hold_all("hybrid", [LONG, *CONVERSATIONS]) == expected

    with meanwhile(hold, 0.0):
        wait_for("borrowed memory to be in use", lambda: node.blocks("hybrid")["borrowed_used"])
        dead.kill()
    wait_for("the restart", node.is_ready)
    node.wait_until_lent("worker", "hybrid")
    node.assert_at_rest("worker", *NAMES)
