"""Ask the kernel about processes, and tell it about this one."""

from __future__ import annotations

import asyncio.subprocess
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swiftkv.system_files import read_system_file

logger = logging.getLogger(__name__)

WANTED_OPEN_FILES = 65536
"""The open files to allow: every connection is one, and a shell allows only 1024."""

_SET_PDEATHSIG = 1  # prctl(2)
_ARENA_MAX = -8  # mallopt(3)
_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
_MORE_EXPENDABLE = 300
_MOST_EXPENDABLE = 1000
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR")
_STOPPED_STATES = frozenset("Tt")  # by a signal, by a debugger


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package and imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def fix_search_paths() -> None:
    """Make the relative paths absolute by which processes find modules, libraries and compiled kernels.

    The processes of a node run in `/`.
    """
    for variable in _PATHS:
        if paths := os.environ.get(variable):
            os.environ[variable] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))


def how_it_ended(returncode: int) -> str:
    """Return how a process ended, as the rest of a sentence, from its `Popen.returncode`."""
    return f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"ended with code {returncode}"


def kill_child(process: asyncio.subprocess.Process) -> None:
    """Kill a process of asyncio's, or do nothing if it has ended.

    Its own `kill` asks first whether it has ended. That answer can be had only once, and the thread of the loop that
    waits for the process then never learns how it ended: it says code 255.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return a signal's name; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"real-time signal {number}"


def share_one_heap() -> None:
    """Have all threads of this process allocate from one heap, where the C library is glibc.

    Otherwise threads get heaps of their own, up to eight a core. Memory that one thread allocates and another frees
    leaves holes in all of them, so a process with many threads and short allocations grows for hours. Threads hardly
    ever wait for the lock of the one heap, because each keeps small pieces in a cache of its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send `by` to this process when the thread that started it ends.

    Returns whether the parent still lives. This works however the parent ends, and with SIGKILL also while this process
    is stopped or stuck in a call.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent  # it may have ended before the call, which sends no signal then


def exit_in(patience_s: float, code: int, last: Callable[[], object] = lambda: None) -> None:
    """Exit after `patience_s` if this process, which waits for all its threads, has not ended by then.

    `last` is called before it exits.
    """

    def end() -> None:
        last()
        os._exit(code)

    timer = threading.Timer(patience_s, end)
    timer.daemon = True
    timer.start()


def be_killed_first() -> None:
    """Have the kernel kill this process before its parent when memory runs out."""
    try:
        score = int(_OOM_SCORE_ADJ.read_text())
        _OOM_SCORE_ADJ.write_text(str(min(_MOST_EXPENDABLE, score + _MORE_EXPENDABLE)))
    except OSError as error:  # some containers mount /proc read-only
        logger.info("cannot change oom_score_adj: %s", error.strerror)


def allow_open_files() -> int:
    """Raise this process's limit of open files to `WANTED_OPEN_FILES`, as far as it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class ProcessVitals:
    """A process as the kernel sees it."""

    is_stopped: bool
    """Whether it or one of its children, such as a rank, is stopped."""
    cpu_s: float
    """The processor time that all of its threads have used so far."""


def read_vitals(pid: int) -> ProcessVitals | None:
    """Read the state of a process and of those that its first thread has started.

    Returns `None` if it cannot be read, as that of a process that is gone.
    """
    fields = _read_stat(pid)
    if not fields:
        return None
    children = read_system_file(Path(f"/proc/{pid}/task/{pid}/children")).split()
    is_stopped = any(of[:1] and of[0] in _STOPPED_STATES for of in (fields, *map(_read_stat, children)))
    cpu_ticks = int(fields[14 - 3]) + int(fields[15 - 3])
    return ProcessVitals(is_stopped, cpu_ticks / os.sysconf("SC_CLK_TCK"))


def _read_stat(pid: int | str) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third on, the state, see proc_pid_stat(5); none if it is gone."""
    return read_system_file(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
