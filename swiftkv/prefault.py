"""Has the kernel map memory before it is needed: a first access to each page of 4 KiB takes as long as copying it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable

# Linux 5.14; older kernels answer EINVAL.
POPULATE_READ = 22
"""Map pages as a read does. Memory that does not exist yet is made, so only ask for what was written."""
POPULATE_WRITE = 23
"""Map pages as a write does, and have the kernel back them with memory."""
_SLICE_BYTES = 4 << 20


def prefault(owner: object, address: int, spans: Iterable[tuple[int, int]], advice: int) -> threading.Thread:
    """Map pages in a thread of low priority, which serving need not wait for.

    The thread ends with `owner`, which keeps the memory, and before the interpreter ends.

    Args:
        owner: The object whose memory it is.
        address: Where the memory begins.
        spans: Which bytes to map: begin and end, counted from there. Read in the thread.
        advice: `POPULATE_READ` or `POPULATE_WRITE`.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_map, args=(address, spans, advice, is_over), name="prefault", daemon=True)
    thread.start()
    weakref.finalize(owner, _end, thread, is_over)
    return thread


def _end(thread: threading.Thread, is_over: threading.Event) -> None:
    is_over.set()
    thread.join()


def _map(address: int, spans: Iterable[tuple[int, int]], advice: int, is_over: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: of this thread alone
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL meanwhile
    for begin, end in spans:
        for offset in range(begin, end, _SLICE_BYTES):
            if is_over.is_set():
                return
            length = min(_SLICE_BYTES, end - offset)
            if madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), advice) != 0:
                return  # the kernel cannot, or has no memory left: then pages come on first access
