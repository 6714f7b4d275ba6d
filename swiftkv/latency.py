"""Use short scheduler slices for latency-sensitive threads, which mostly wait and should wake at once."""

from __future__ import annotations

import ctypes
import os
import platform

_SLICE_NS = 100_000  # the shortest that Linux accepts
_RESET_ON_FORK = 1  # not for the threads and processes that the thread starts
_SYSCALL = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # sched_setattr


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),  # 0: SCHED_OTHER
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("slice_ns", ctypes.c_uint64),  # `sched_runtime`
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def prefer_latency() -> bool:
    """Give the calling thread short time slices. Returns whether the system took it.

    If every core computes, a thread that wakes waits for the slice of another to end, milliseconds each time. Since
    Linux 6.12 a thread with a shorter slice interrupts at once (EEVDF; it gets no larger share). Older kernels ignore
    the slice.
    """
    if _SYSCALL is None or platform.system() != "Linux":
        return False
    calling_thread = 0
    nice = os.getpriority(os.PRIO_PROCESS, calling_thread)  # stays as it is
    attributes = _SchedAttr(size=ctypes.sizeof(_SchedAttr), flags=_RESET_ON_FORK, nice=nice, slice_ns=_SLICE_NS)
    result: int = ctypes.CDLL(None).syscall(_SYSCALL, calling_thread, ctypes.byref(attributes), 0)
    return result == 0
