"""The threads of the kernels, where the system gives a process only some of them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from pathlib import Path

import torch

from swiftkv.kernels import cpu

weights = cpu.pack_linear([torch.eye(64, dtype=torch.bfloat16)])
x = torch.arange(64.0).reshape(1, 64).bfloat16()
pages = int(Path("/proc/self/statm").read_text().split()[0])
allowed = pages * resource.getpagesize() + (100 << 20)  # each thread maps a stack of some MiB
resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
try:
    cpu.set_num_threads(500)
except OSError as error:
    print(error)
assert torch.equal(cpu.linear(x, weights), x)
cpu.set_num_threads(2)
assert torch.equal(cpu.linear(x, weights), x)
print("computed")
"""


def test_threads_that_the_system_refuses_are_an_error_and_not_an_abort() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, computed = done.stdout.splitlines()
    assert said.startswith("of 500 threads for computing, thread ")
    assert "cannot be started" in said
    assert computed == "computed"
