"""`tests/gpu` can be collected where torch and triton are installed and little else: on a GPU machine as it is lent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv import _core
from swiftkv.kernels.triton_layout import NO_BLOCK

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys
import pytest


class Nothing:
    def find_spec(self, name, path=None, target=None):
        if any(name == missing or name.startswith(f"{missing}.") for missing in sys.argv[1:]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "tests/gpu"]))
"""
EXTENSION = ("swiftkv._core", "swiftkv._cpu", "swiftkv._lease", "swiftkv._transport", "swiftkv._host", "swiftkv._files")
SERVER = ("fastapi", "pydantic")
MODELS = ("transformers", "tokenizers", "safetensors", "yaml")


@pytest.mark.parametrize(
    "missing",
    [
        ("msgspec", "zmq", *MODELS, *SERVER, *EXTENSION),
        ("zmq", *SERVER, *EXTENSION),
        EXTENSION,
        SERVER,
    ],
    ids=["nearly all", "server and extension", "extension", "server"],
)
def test_gpu_tests_are_collected_without_extension_and_server(missing: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, *missing],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "tests/gpu/test_gpu_attention.py" in run.stdout
    assert "tests/gpu/test_gpu_cuda_graphs.py" in run.stdout


def test_the_kernels_know_the_core_s_entry_of_no_block() -> None:
    assert NO_BLOCK == _core.NO_BLOCK
