"""Make Triton work without a GPU: launches compile kernels, or are only noted, and nothing runs.

Import this before anything switches Triton's interpreter on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.runtime.driver
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_run = JITFunction.run


class _Driver:
    """A driver with the answers that Triton needs before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead_of_launching(compiled: Callable[[str, Any], None], capability: int = 90) -> None:
    """Compile every kernel from now on for a GPU of `capability`; `compiled(name, kernel)` is called per launch."""
    triton.runtime.driver.set_active(_Driver(capability))

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        result = _run(kernel, *args, grid=grid, warmup=True, **options)
        compiled(kernel.__name__, result)
        return result

    JITFunction.run = compile_only


def note_instead_of_compiling(capability: int = 90) -> set[tuple[str, str]]:
    """Return a set that gets the name and key of every variant of a kernel that would be compiled from now on."""
    noted: set[tuple[str, str]] = set()
    compile_instead_of_launching(lambda name, kernel: None, capability)

    def note(*, key: str, repr: str, **_: Any) -> bool:
        noted.add((repr, key))
        return True  # do not compile it

    triton.knobs.runtime.jit_cache_hook = note
    return noted
