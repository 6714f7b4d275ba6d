"""Models with window layers borrow and lend; their answers are those without lending, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.lending_node import LendingNode, Reference, Turn, conversation, serving
from tests.support.node_process import remove, short_temporary_directory

WINDOW = 40
CONVERSATIONS = [conversation(seed) for seed in range(6)]
LONG = (Turn(tuple(3 + i * i % 311 for i in range(700)), 12),)
NAMES = ("hybrid", "windows")


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
        model("worker", paths["worker"], "12MiB", lending={"budget": "100%", "window": "200ms"}),
    ]
    config = {"node": {"port": 0, "lending": {"transport": request.param, "max_wait": "100s"}}, "models": models}
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
