"""`benchmarks/step.py` fits the engine that is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "step.py"


def test_a_few_steps_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--seqs", "2", "--context", "40", "--steps", "20"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert capsys.readouterr().out.startswith("2 sequences of 40 tokens: median ")
