"""The modules of `benchmarks/`, which are no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Import a program without running it, and forget it afterwards."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(PROGRAMS))
    yield module
    sys.modules.pop(name)
