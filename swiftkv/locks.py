"""Files and directories that are locked while their process lives, so that other processes can tell."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path


def hold_lock(path: Path) -> int:
    """Lock a file or directory; return the descriptor that holds the lock until it is closed."""
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def try_lock(path: Path) -> int | None:
    """Lock a file or directory like `hold_lock`, or return `None` if another process holds the lock."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def is_still_at(path: Path, descriptor: int) -> bool:
    """Return whether the path still names the file of this descriptor: it may have been removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a file is of a kind, belongs to this user, and no other user may read or change it."""
    return is_kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def runtime_directories() -> list[Path]:
    """Return the directories in which this user's nodes may leave files for each other, the best first.

    Programs may have different environments, so a reader must look in all of them.
    """
    user = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(runtime, "swiftkv")] if runtime else []
    return [*places, Path(f"/run/user/{user}/swiftkv"), Path(f"/tmp/swiftkv-{user}")]


def make_private_directory(directory: Path) -> None:
    """Make a directory with mode 0700 if need be. Raises `OSError` for one that others may touch."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_private(os.lstat(directory), stat.S_ISDIR):
        raise PermissionError(0, "it is not a directory that belongs to this user alone")


def remove_if_unlocked(path: Path) -> None:
    """Remove a file or a directory of this user's, with its content, unless its process still holds the lock.

    If another process has replaced it meanwhile, the replacement stays.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # it may be a pipe of another user
    except OSError:  # another user's, or gone meanwhile
        return
    try:
        status = os.fstat(lock)
        if status.st_uid != os.getuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_still_at(path, lock):
            return
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
