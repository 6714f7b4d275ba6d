"""Defers kernel calls, so that several kernels run one after the other without Python between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swiftkv import _cpu


class _Results(threading.local):
    """The results of a thread's deferred kernels; `None` while no calls are deferred."""

    tensors: list[Tensor] | None = None


_results = _Results()


@contextmanager
def deferred() -> Iterator[None]:
    """Defer the kernels that this thread calls inside, and run them at the end (`Ops.deferred`)."""
    _cpu.begin_deferral()
    _results.tensors = []
    try:
        yield
        _cpu.run_deferred()
    finally:
        _cpu.end_deferral()
        _results.tensors = None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor for a kernel's result. It lives until the kernel has run, even if its caller drops it."""
    return held(torch.empty(shape, dtype=dtype))


def held(tensor: Tensor) -> Tensor:
    """Return `tensor`, and keep it alive until the deferred kernels have run."""
    if _results.tensors is not None:
        _results.tensors.append(tensor)
    return tensor
