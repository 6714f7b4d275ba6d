"""The time on the device, for use within a CUDA graph, whose events are not timed."""

from __future__ import annotations

import time

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


def stamp(times: Tensor, index: int) -> None:
    """Write the time in nanoseconds to `times[index]`, int64 and flat, when the current stream reaches this point.

    All streams of a device have one clock; it advances in steps of up to a microsecond, and differs from the host's.
    Without a GPU it is the host's.
    """
    if times.device.type == "cuda":
        _stamp[(1,)](times, index, num_warps=1)
    else:
        times[index] = time.monotonic_ns()


@triton.jit(do_not_specialize=["index"])
def _stamp(times, index):  # type: ignore[no-untyped-def]
    tl.store(times + index, globaltimer())
