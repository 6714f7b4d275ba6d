from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
