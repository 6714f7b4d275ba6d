"""The tests kill every mutant, and nothing but mutants.

.venv/bin/python -m pytest -m slow -s tests/core/mutants       # names the test that killed each
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from core_build import ROOT, SOURCES, extension_build
from mutants import MUTANTS, Mutant

# In the order in which they cost time: most mutants die early.
TESTS = {
    "core": [
        f"tests/core/test_{name}.py"
        for name in (
            "host_blocks",
            "pins",
            "storage",
            "room_of_loads",
            "lending",
            "lending_shared",
            "scheduler",
            "host_moves",
            "windows",
            "step_time",
            "prompt_queue",
            "forecast_errors",
            "bounded_steps",
            "admission_order",
            "displacement",
            "fair_share",
            "prompt_lookup",
            "refusal",
            "bindings",
            "house",
            "lending_storage",
            "storage_states",
            "lending_states",
            "lending_random",
            "scheduler_states",
        )
    ]
    + ["tests/core/parts"],
    "lease": ["tests/lease/test_ledgers.py", "tests/lease/test_ledger_states.py"],
    "tier": [
        "tests/tier/test_rates.py",
        "tests/tier/test_loads.py",
        "tests/tier/test_host_loads.py",
        "tests/tier/test_reach.py",
        "tests/tier/test_storage_threads.py",
        "tests/engine/test_engine_tier.py",
        "tests/engine/test_engine_host.py",
        "tests/engine/test_engine_host_moves.py",
    ],
    "storage": [
        f"tests/storage/test_{name}.py"
        for name in (
            "levels",
            "envelope",
            "breaker",
            "storage_contract",
            "host_medium",
            "file_writing",
            "file_medium",
            "file_states",
        )
    ],
    "files": ["tests/storage/test_file_reads.py"],
    "host": ["tests/storage/test_host_medium.py", "tests/storage/test_host_states.py"],
    "server": ["tests/server/test_sent_prefixes.py"],
    "engine": [f"tests/engine/test_{name}.py" for name in ("engine_rules", "engine_drafts", "engine", "histories")],
}

PYTHON_ROOMS = {mutant.room for mutant in MUTANTS if mutant.is_python}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_sources_have_what_a_mutant_changes(mutant: Mutant) -> None:
    for edit in mutant.edits:
        assert (mutant.sources / edit.file).read_text().count(edit.old) == 1, edit.old


def run_tests(files: Sequence[str], built: Path, sources: Path = SOURCES) -> subprocess.CompletedProcess[str]:
    """Run tests so that they, and the processes that they start, take what is built from its directory.

    C++ tests are built from `sources`.
    """
    site = built / "site"
    site.mkdir()
    shutil.copyfile(ROOT / "tests/support/extensions.py", site / "sitecustomize.py")
    environment = os.environ | {
        "SWIFTKV_EXTENSIONS": str(built),
        "SWIFTKV_SOURCES": str(sources),
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CI": "1",  # the same examples each time
    }
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [*TESTS])
def test_the_sources_pass(room: str, tmp_path: Path) -> None:
    if room not in PYTHON_ROOMS:
        extension_build().extension(room, tmp_path)
    done = run_tests(TESTS[room], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    mutant.write(sources)
    if mutant.is_python:
        done = run_tests(TESTS[mutant.room], sources)
    else:
        extension_build(sources).extension(mutant.room, tmp_path)
        done = run_tests(TESTS[mutant.room], tmp_path, sources)
    assert done.returncode != 0, "no test notices"
    begun = re.findall(r"^(tests/\S+::\S+)", done.stdout, re.MULTILINE)
    assert begun, f"no test began:\n{done.stdout}{done.stderr}"
    print(f"\n{mutant.name}: {begun[-1]}")
