from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.node_process import remove, short_temporary_directory


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """The oracle's matrices are tiny, and its threads would wait for each other while engines use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A temporary directory for sockets: the paths of pytest's own are too long for them."""
    directory = short_temporary_directory()
    yield directory
    remove(directory)


@pytest.fixture(scope="module")
def reached() -> dict[int, set[str]]:
    """The rare states that a module's random histories so far came to, by seed."""
    return {}
