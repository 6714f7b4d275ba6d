"""Every input of the fuzzer's corpus runs against the simulated engine, so mistakes that it has found do not return."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from core_build import HARNESS, replay_program
from mutants import MUTANTS

CORPUS = sorted((HARNESS / "corpus").iterdir())


def replay(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *CORPUS], capture_output=True, text=True, timeout=250)


def test_every_input_runs(tmp_path: Path) -> None:
    done = replay(replay_program(tmp_path / "replay"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["a recalled block is evicted to make room", "two blocks have one node"])
def test_a_mutant_breaks_some_input(name: str, tmp_path: Path) -> None:
    """The simulated engine notices a mistake."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    mutant.write(tmp_path / "sources")
    assert replay(replay_program(tmp_path / "replay", tmp_path / "sources")).returncode != 0
