"""Needs CUDA, torch, triton and no extension: `PYTHONPATH=. python -m pytest tests/gpu -rs -p no:cacheprovider`."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
