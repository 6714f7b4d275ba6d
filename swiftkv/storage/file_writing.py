"""Files that are being written: new ones, or files of evicted objects, whose disk blocks and pages are reused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import signal
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from swiftkv.arithmetic import ceil_div
from swiftkv.locks import hold_lock, remove_if_unlocked
from swiftkv.storage.backend import Parts

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a disk, or of a quota, that has no room."""
_PAGE_BYTES = 4096


def disk_bytes(num_bytes: int) -> int:
    """Return the size of a file that holds `num_bytes`: whole pages, which can be overwritten without being read."""
    return ceil_div(num_bytes, _PAGE_BYTES) * _PAGE_BYTES


class UnpublishedFiles:
    """A directory of this process alone, in which objects are written before they get their names.

    Files of evicted objects come here to be overwritten, so that a full cache makes no new files and takes no more
    memory for them. If a process is killed, the next one removes its files.
    """

    def __init__(self, parent: Path, max_spare_bytes: int, *, is_synced: bool) -> None:
        """Make the directory in `parent`, and remove those of dead processes. Raises `OSError`.

        At most `max_spare_bytes` of evicted files are kept, or one. With `is_synced` each file is synced to the disk.
        """
        parent.mkdir(mode=0o700, exist_ok=True)
        for left in parent.iterdir():
            remove_if_unlocked(left)
        self.is_alone = not any(parent.iterdir())
        """Whether no other process used the cache when this object was made."""
        self._directory = parent / secrets.token_hex(8)
        self._directory.mkdir(mode=0o700)
        self._lock = hold_lock(self._directory)
        self._names = itertools.count()
        self._max_spare_bytes = max_spare_bytes
        self._is_synced = is_synced
        self._spares: deque[tuple[str, int]] = deque()  # path and bytes; the first has been here for the longest
        self._spare_bytes = 0
        self._changing_spares = threading.Lock()

    def write(self, parts: Parts) -> str:
        """Write an object to a file, and return its path. Raises `OSError`, and then leaves no file."""
        num_bytes = sum(map(len, parts))
        file_bytes = disk_bytes(num_bytes)
        path, fd = self._open(file_bytes)
        try:
            try:
                padded: list[memoryview | bytes] = [*parts, bytes(file_bytes - num_bytes)]
                if os.pwritev(fd, padded, 0) != file_bytes:
                    raise OSError(errno.ENOSPC, "there is room for only a part of it")
                if self._is_synced:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        except BaseException:
            self.discard([path])
            raise
        return path

    def take_over(self, path: str, num_bytes: int) -> None:
        """Move the file of an evicted object here, to overwrite it. Raises `FileNotFoundError`."""
        spare = self._new_path()
        os.rename(path, spare)
        with self._changing_spares:
            self._spares.append((spare, num_bytes))
            self._spare_bytes += num_bytes
            excess = []
            while len(self._spares) > 1 and self._spare_bytes > self._max_spare_bytes:
                excess.append(self._take_spare(0)[0])
        self.discard(excess)

    def free_spares(self) -> None:
        """Remove the files of evicted objects, to free their disk space."""
        with self._changing_spares:
            spares = [self._take_spare(0)[0] for _ in range(len(self._spares))]
        self.discard(spares)

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    def _open(self, num_bytes: int) -> tuple[str, int]:
        """Open a spare file of this size. If there is none, make a new file in place of another spare, if any."""
        with self._changing_spares:
            index = next((i for i, (_, spare_bytes) in enumerate(self._spares) if spare_bytes == num_bytes), 0)
            spare = self._take_spare(index) if self._spares else None
        if spare is not None:
            path, spare_bytes = spare
            if spare_bytes == num_bytes and (fd := _open_unused(path)) is not None:
                return path, fd
            self.discard([path])
        path = self._new_path()
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def _take_spare(self, index: int) -> tuple[str, int]:
        path, num_bytes = self._spares[index]
        del self._spares[index]
        self._spare_bytes -= num_bytes
        return path, num_bytes

    def _new_path(self) -> str:
        return f"{self._directory}/{next(self._names)}"


def _open_unused(path: str) -> int | None:
    """Open a file for writing, or return `None` if it is still being read or is linked elsewhere.

    The kernel grants a write lease only on a file that is not open elsewhere. Nobody can open it afterwards, because it
    no longer has its old name.
    """
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored; the default signal of a lease break ends the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        if os.fstat(fd).st_nlink == 1:
            return fd
    except OSError:  # it is being read, or this file system has no leases
        pass
    os.close(fd)
    return None
