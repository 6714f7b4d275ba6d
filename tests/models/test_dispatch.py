from __future__ import annotations

import pytest

from swiftkv.kernels.dispatch import OPS_VARIABLE, select_ops


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "reference")
    assert select_ops("cpu").name == "reference"


def test_other_devices_run_the_reference() -> None:
    assert select_ops("meta").name == "reference"
