"""Processes that are identified beyond doubt, even if pids are reused, and watched for their end."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the latter two: the number is that of a thread


@dataclass(frozen=True, slots=True)
class Identity:
    """One engine process, as it introduces itself."""

    name: str
    incarnation: int  # uint64, random
    pid: int
    start_ticks: int

    @classmethod
    def of_this_process(cls, name: str) -> Self:
        return cls(name, secrets.randbits(64), os.getpid(), start_ticks(os.getpid()))


def start_ticks(pid: int) -> int:
    """Return the start of a process, in clock ticks since boot: field 22 of proc_pid_stat(5).

    Raises `FileNotFoundError` or `ProcessLookupError` if it is gone.
    """
    fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields_after_name[22 - 3])


class PeerProcess:
    """A process that is watched: `fd` becomes readable when it is gone, and never before."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def find(cls, pid: int, ticks: int) -> Self | None:
        """Return the process that started at `ticks`; `None` if it is gone, even if another one has the pid.

        Raises `OSError` if it cannot be watched, as where no file descriptor is left.
        """
        try:
            process = cls(os.pidfd_open(pid))
        except OSError as error:
            if error.errno in _NO_PROCESS:
                return None
            raise
        is_found = False
        try:
            is_found = start_ticks(pid) == ticks
        except (FileNotFoundError, ProcessLookupError):
            pass
        finally:
            if not is_found:
                process.close()
        return process if is_found else None

    def close(self) -> None:
        os.close(self.fd)
