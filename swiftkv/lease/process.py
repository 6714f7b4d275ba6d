"""Processes that are identified without doubt, even if pids are reused, and whose end is noticed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
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
    others: tuple[tuple[int, int], ...] = ()  # pid and start ticks of the engine's other processes, which copy as well

    @classmethod
    def of_this_process(cls, name: str, other_pids: Sequence[int] = ()) -> Self:
        others = tuple((pid, start_ticks(pid)) for pid in other_pids)
        return cls(name, secrets.randbits(64), os.getpid(), start_ticks(os.getpid()), others)


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

    @classmethod
    def find_all(cls, processes: Sequence[tuple[int, int]]) -> list[Self]:
        """Return the live ones of an engine's `processes` (pid, start ticks); none if the first has ended.

        Raises `OSError` if one of them cannot be watched.
        """
        found: list[Self] = []
        try:
            for pid, ticks in processes:
                process = cls.find(pid, ticks)
                if process is not None:
                    found.append(process)
                elif not found:
                    break
        except OSError:
            for process in found:
                process.close()
            raise
        return found

    def close(self) -> None:
        os.close(self.fd)
