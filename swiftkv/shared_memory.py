"""Memory that processes share: made without a name, mapped where it can have huge pages, and filled ahead of its use.

Linux gives huge pages to private memory that asks for them, and to shared memory only if an administrator allows it.
But since Linux 6.1 a process may have pages of its own replaced by huge ones (`MADV_COLLAPSE`), whatever the memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

HUGE_PAGE_BYTES = 2 << 20
"""With small pages of more than 4 KiB, as on some ARM machines, huge pages are larger: there, memory has none."""

# Older kernels than these answer EINVAL.
_POPULATE_WRITE = 23  # Linux 5.14
_COLLAPSE = 25  # Linux 6.1

# Linux has the same numbers on x86 and ARM; Python has no names for them.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_SLICE_BYTES = 8 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)  # once: binding it takes ten times as long as a call
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def make_memory(name: str, nbytes: int) -> int:
    """Return a descriptor of new memory, all zeros, that another process can map by a copy of the descriptor.

    The memory has no name in any file system, so the kernel frees it when the last process that has it ends, however
    it ends. Its size is sealed, because SIGBUS would kill a process that touched memory beyond a new end.

    Raises `OSError`.

    Args:
        name: Shows in `/proc/<pid>/maps`.
        nbytes: The size; the kernel provides memory for a page when it is first touched.
    """
    fd = os.memfd_create(f"swiftkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True, slots=True)
class PlacedMemory:
    """Memory whose first `nbytes` are mapped at an offset, a multiple of a huge page, from the begin of a range."""

    fd: int
    nbytes: int
    offset_bytes: int = 0


def map_memory(fd: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` of memory, readable and writable. The mapping ends with the last view of it.

    It begins at a multiple of a huge page: nowhere else can a process have huge pages of a file. Raises `OSError`.
    """
    return map_memories([PlacedMemory(fd, nbytes)])


def map_memories(memories: Sequence[PlacedMemory]) -> memoryview:
    """Map memories into one range of addresses, readable and writable, as `map_memory` maps one.

    They must not overlap. The range ends with the last of them; a process that touches the holes between them is
    killed. Raises `OSError`.
    """
    assert all(memory.offset_bytes % HUGE_PAGE_BYTES == 0 for memory in memories)
    nbytes = max(memory.offset_bytes + memory.nbytes for memory in memories)
    # Address space that nobody may touch, so that it counts as no memory; the mappings replace parts of it.
    reserved_bytes = nbytes + HUGE_PAGE_BYTES
    reserved = _map(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    begin = reserved + -reserved % HUGE_PAGE_BYTES
    whole = (ctypes.c_ubyte * nbytes).from_address(begin)
    # The memories stay mapped while the interpreter ends, because a thread may still use them.
    weakref.finalize(whole, _LIBC.munmap, reserved, reserved_bytes).atexit = False
    for memory in memories:
        address = begin + memory.offset_bytes
        _map(address, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, memory.fd)
        _advise(address, memory.nbytes, mmap.MADV_HUGEPAGE)  # the kernel may have none
    return memoryview(whole).cast("B")


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def can_have_huge_pages() -> bool:
    """Return whether the kernel gives this process huge pages of shared memory, by asking for one."""
    fd = make_memory("trial", HUGE_PAGE_BYTES)
    try:
        mapping = map_memory(fd, HUGE_PAGE_BYTES)
    finally:
        os.close(fd)
    mapping[0] = 0
    return _collapse(address_of(mapping), HUGE_PAGE_BYTES)


def address_of(memory: memoryview) -> int:
    """Return where a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def fill_ahead(owner: object, memory: memoryview) -> threading.Thread:
    """Have the kernel back a mapping with memory, in a thread of low priority, which serving need not wait for.

    What the memory holds does not change. It gets huge pages if the kernel has them. The thread ends with `owner`,
    and before the interpreter ends.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_fill, args=(memory, is_over), name="fill-ahead", daemon=True)
    thread.start()
    weakref.finalize(owner, _end, thread, is_over)
    return thread


def _end(thread: threading.Thread, is_over: threading.Event) -> None:
    is_over.set()
    if thread is not threading.current_thread():  # the garbage collector may run there, too
        thread.join()


def _fill(memory: memoryview, is_over: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: of this thread alone
    address = address_of(memory)
    for begin in range(0, memory.nbytes, _SLICE_BYTES):
        if is_over.is_set() or not _back(address + begin, min(_SLICE_BYTES, memory.nbytes - begin)):
            return  # the kernel cannot: then pages come on first access


def _back(address: int, nbytes: int) -> bool:
    for page in range(address, address + nbytes, HUGE_PAGE_BYTES):  # where there is no page, none is replaced
        if not _advise(page, mmap.PAGESIZE, _POPULATE_WRITE):
            return False
    _collapse(address, nbytes)  # without huge pages, or on older kernels, the pages stay small
    return _advise(address, nbytes, _POPULATE_WRITE)


def _collapse(address: int, nbytes: int) -> bool:
    """Replace pages by huge ones. Return whether all of them were replaced."""
    if _advise(address, nbytes, _COLLAPSE):
        return True
    was_in_use = ctypes.get_errno() == errno.EAGAIN  # by another thread, for a moment
    return was_in_use and _advise(address, nbytes, _COLLAPSE)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Call `madvise` without the GIL, which Python's own would hold meanwhile. Return whether it succeeded."""
    return int(_LIBC.madvise(address, nbytes, advice)) == 0
