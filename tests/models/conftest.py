from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swiftkv.kernels.dispatch import cpu_ops, reference_ops, select_ops
from swiftkv.kernels.ops import AnyOps


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are not worth waking threads for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def needs_cpu_ops() -> None:
    """Skip a test where the C++ kernels do not run."""
    if select_ops("cpu").name != "cpu":
        pytest.skip("the C++ kernels do not run on this machine")


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> AnyOps:
    """Run a test on plain torch, and on the C++ kernels where this machine can."""
    if request.param == "reference":
        return reference_ops()
    request.getfixturevalue("needs_cpu_ops")
    return cpu_ops()
