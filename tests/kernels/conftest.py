"""On a machine with a GPU, `tests/gpu` tests what Triton compiles; its interpreter then runs if TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from swiftkv import _cpu
from swiftkv.kernels import cpu


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Have our kernels use two threads and torch one, and draw the same random numbers in every run."""
    before, torch_before = _cpu.num_threads(), torch.get_num_threads()
    cpu.set_num_threads(2)
    torch.set_num_threads(1)  # the oracles' small tensors gain nothing from more, and torch's waiting threads spin
    torch.manual_seed(0)
    yield
    cpu.set_num_threads(before)
    torch.set_num_threads(torch_before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.path.name.startswith("test_triton_"):
                item.add_marker(pytest.mark.skip(reason="Triton compiles here: set TRITON_INTERPRET=1 to interpret"))
