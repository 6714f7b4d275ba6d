from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swiftkv.errors import ConfigError
from swiftkv.kernels.dispatch import INTERPRET_VARIABLE, OPS_VARIABLE, select_ops


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "reference")
    assert select_ops("cpu").name == "reference"


def test_other_devices_run_the_reference() -> None:
    assert select_ops("meta").name == "reference"


def test_kernels_of_gpus_run_on_the_cpu_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "triton")
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1"):
        select_ops("cpu")
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    assert select_ops("cpu").name == "triton"


def test_a_kind_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "refernce")
    with pytest.raises(ConfigError, match="SWIFTKV_OPS=refernce"):
        select_ops("cpu")


def test_an_instruction_set_that_there_is_not_is_refused() -> None:
    """It is read once in a process."""
    program = "from swiftkv.kernels.dispatch import select_ops; select_ops('cpu')"
    environment = {**os.environ, "SWIFTKV_CPU_ISA": "avx3"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "ConfigError: SWIFTKV_CPU_ISA=avx3: use avx2, avx512, avx512_bf16 or amx; or unset it" in run.stderr
