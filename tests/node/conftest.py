"""Fixtures of tests of nodes: checkpoints, and the answers of a node that does not lend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.lending_node import Reference, make_checkpoints, make_hybrid_checkpoints, serving
from tests.support.node_process import MAX_MODEL_LEN, remove, short_temporary_directory
from tests.support.node_process import temporary as temporary


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, "llama", tokenizer=True, max_position_embeddings=MAX_MODEL_LEN)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by kind: `master`, and workers of other shapes."""
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def hybrid_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same of models with windows."""
    return make_hybrid_checkpoints(tmp_path_factory.mktemp("hybrids"))


@pytest.fixture(scope="session")
def reference(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with answering(checkpoints, tmp_path_factory.mktemp("reference")) as reference:
        yield reference


@pytest.fixture(scope="session")
def hybrid_reference(
    hybrid_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    with answering(hybrid_checkpoints, tmp_path_factory.mktemp("hybrid_reference")) as reference:
        yield reference


@contextmanager
def answering(checkpoints: dict[str, Path], directory: Path) -> Iterator[Reference]:
    models: list[dict[str, Any]] = [
        {"name": "float32", "path": str(checkpoints["master"]), "dtype": "float32"},
        {"name": "bfloat16", "path": str(checkpoints["master"]), "dtype": "bfloat16"},
        {"name": "broad", "path": str(checkpoints["broad"]), "dtype": "bfloat16"},
    ]
    models = [{**model, "threads": 1, "kv_cache": {"memory": "64MiB"}} for model in models]
    config = {"node": {"port": 0, "lending": "off"}, "models": models}
    temporary = short_temporary_directory()
    with serving(config, directory, temporary) as node:
        yield Reference(node)
    remove(temporary)
