"""The mark of a node that is stopping, so that a node started at the same port waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swiftkv.errors import ConfigError
from swiftkv.locks import is_private, is_still_at, make_private_directory, remove_if_unlocked, runtime_directories
from swiftkv.output import drain_output
from swiftkv.processes import exit_in

_SUFFIX = ".stopping"
_LOOK_S = 0.05


@contextlib.contextmanager
def end_hanging_threads(timeout_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """End this process `timeout_s` after the block, if it has not ended by itself.

    Python waits for the threads of its executors. One that hangs, for instance in a chat template that does not end,
    would keep alive a process that serves nobody.
    """
    code = 1
    try:
        yield
        code = 0
    finally:

        def tell() -> None:
            say(f"a thread still ran {timeout_s:g} s after the end of the node, and was ended")
            drain_output()

        exit_in(timeout_s, code, tell)


class StoppingMark:
    """A context manager for a file named by a node's port, which exists from `set` until the node has freed everything.

    The file is locked, so that no node waits for one that was killed.
    """

    def __init__(self, port: int) -> None:
        """`port` 0, any free port, is never marked: no other node is started at it."""
        self._port = port
        self._file: Path | None = None
        self._lock = -1

    def __enter__(self) -> StoppingMark:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            if is_still_at(self._file, self._lock):
                self._file.unlink()
            os.close(self._lock)

    def set(self) -> None:
        """Write the file, unless it is already written or no directory can hold it."""
        if self._file is not None or not self._port:
            return
        for directory in runtime_directories():
            with contextlib.suppress(OSError):
                make_private_directory(directory)
                self._file, self._lock = _write(directory / f"{self._port}{_SUFFIX}")
                return


def wait_for_stopping(port: int, timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait until no node of this user that had `port` is stopping; if one is, `say` so first.

    Raises `ConfigError` after `timeout_s`.
    """
    if _find_mark(port) is None:
        return
    say(f"waiting up to {timeout_s:g} s for the node that had port {port} to stop")
    deadline_s = time.monotonic() + timeout_s
    while (file := _find_mark(port)) is not None:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"node.port: the node that had port {port} is still stopping after {timeout_s:g} s: wait until "
                f"process {_read(file)} has ended, kill it, or choose another port"
            )
        time.sleep(_LOOK_S)


def _write(file: Path) -> tuple[Path, int]:
    """Write a locked file with the process id, in place of any stale one; return it and the lock."""
    lock, name = tempfile.mkstemp(dir=file.parent)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()}\n".encode())
        os.rename(name, file)
    except OSError:
        os.close(lock)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return file, lock


def _find_mark(port: int) -> Path | None:
    """Return the mark of a process that lives; remove those of others."""
    for directory in runtime_directories():
        with contextlib.suppress(OSError):
            if is_private(os.lstat(directory), stat.S_ISDIR):
                file = directory / f"{port}{_SUFFIX}"
                remove_if_unlocked(file)
                if file.exists():
                    return file
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # it has just been removed
        return "of it"
