from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import temporary as temporary


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """The oracle's matrices are tiny, and its threads would wait for each other while engines use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reached() -> dict[int, set[str]]:
    """The rare states that a module's random histories so far came to, by seed."""
    return {}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dense model and a hybrid one, by architecture."""
    directory = tmp_path_factory.mktemp("tiers")
    for arch in ("llama", "gemma3"):
        make_checkpoint(directory / arch, arch)
    return {arch: directory / arch for arch in ("llama", "gemma3")}


@pytest.fixture(params=["llama", "gemma3"], ids=["dense", "hybrid"])
def checkpoint(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return checkpoints[request.param]


@pytest.fixture
def dense(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]
