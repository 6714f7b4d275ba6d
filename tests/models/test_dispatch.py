from __future__ import annotations

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
