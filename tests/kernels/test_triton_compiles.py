"""Every kernel compiles for a GPU as the host launches it; Triton's interpreter accepts more than a GPU does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv.kernels import triton_copy

ROOT = Path(__file__).parents[2]


def launched_kernels() -> set[str]:
    """Return the names of everything that is called as `kernel[grid](...)`."""
    return {
        call.func.value.id
        for source in Path(triton_copy.__file__).parent.glob("triton_*.py")
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)
    }


def run_without_interpreter(module: str, tmp_path: Path) -> list[str]:
    """Run a module of `tests.support`; return the words that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_every_kernel_compiles_for_an_h100_as_it_is_launched(tmp_path: Path) -> None:
    assert run_without_interpreter("compile_for_gpu", tmp_path) == sorted(launched_kernels())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["80", "89", "90", "120"])
def test_no_loop_spills_and_every_configuration_fits(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/compile_report.py", "--targets", target],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_kernel_is_compiled_after_the_warm_up(tmp_path: Path) -> None:
    assert run_without_interpreter("note_compilations", tmp_path) == []
