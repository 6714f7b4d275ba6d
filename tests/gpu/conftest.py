"""Needs CUDA, torch, triton, hypothesis and no extension.

`PYTHONPATH=. python -m pytest tests/gpu -rs -p no:cacheprovider`
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _device_answers() -> Iterator[None]:
    """End the run once a CUDA error has occurred, in the test that caused it: all later calls of the process fail."""
    yield
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            pytest.exit(f"this process can no longer use the GPU: {reason}", returncode=pytest.ExitCode.TESTS_FAILED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
