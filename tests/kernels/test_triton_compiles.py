"""Every kernel compiles for a GPU as the host launches it; Triton's interpreter accepts more than a GPU does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

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


def test_every_kernel_compiles_for_an_h100_as_it_is_launched(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_for_gpu", str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == sorted(launched_kernels())
