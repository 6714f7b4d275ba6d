"""Run programs with the kernels of another instruction set than the machine's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv import _cpu

ROOT = Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider")  # importing other plugins takes seconds

MODEL_OF_TILES = (pytest.mark.slow,) if _cpu.isa() == "amx" else ()
"""The marks of tests on a software model of the tiles: slow on a machine with tiles, where the same tests use these."""


def in_subprocess(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and wait for its end."""
    environment = os.environ | {
        "SWIFTKV_CPU_ISA": isa,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),  # a program among the tests imports this package, too
    }
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
