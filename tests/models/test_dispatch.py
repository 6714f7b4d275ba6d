from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv.kernels.dispatch import OPS_VARIABLE, select_ops


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "reference")
    assert select_ops("cpu").name == "reference"


def test_other_devices_run_the_reference() -> None:
    assert select_ops("meta").name == "reference"


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_older_instruction_sets_are_as_exact(isa: str) -> None:
    """In a process of its own: the extension chooses once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu and (qwen3-yarn or depend and qwen3)"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("test_parity.py"))],
        env=os.environ | {"SWIFTKV_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout
