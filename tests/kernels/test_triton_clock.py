"""Moments that a stream comes past, in order; compiled for a GPU, they are read from the clock of the device."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from swiftkv.kernels.triton_clock import stamp

# Where triton is imported before the interpreter is switched on: compiled for a GPU that need not be there.
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from swiftkv.kernels.triton_clock import _stamp
source = ASTSource(_stamp, {"times": "*i64", "index": "i32"}, {})
assembly = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
print(assembly.count("%globaltimer"), assembly.count("st.global.b64"))
"""


def test_without_a_gpu_the_hosts_clock() -> None:
    times = torch.zeros(4, dtype=torch.int64)
    before_ns = time.monotonic_ns()
    stamp(times, 2)
    stamp(times, 1)
    assert before_ns <= times[2] <= times[1] <= time.monotonic_ns()
    assert times[0] == times[3] == 0


def test_compiled_for_a_gpu_its_own() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1"]
