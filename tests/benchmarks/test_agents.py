"""`benchmarks/agents.py` fits the simulator that is there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "agents.py"


def test_conversations_that_do_not_fit_are_found_in_the_cache_by_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--clients", "20", "--conversations", "40", "--pool-tokens", "80000", "--seqs", "4"]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    runpy.run_path(str(PROGRAM), run_name="__main__")
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cached = {row[0]: float(row[6].rstrip("%")) for row in rows if row[0] in ("fcfs", "spf", "hrrn", "turns")}
    longest = {row[0]: float(row[5].split()[0]) for row in rows if row[0] in cached}
    assert cached["fcfs"] < cached["hrrn"] < cached["turns"] < cached["spf"]
    assert longest["turns"] < 2 * longest["fcfs"] < longest["spf"]
