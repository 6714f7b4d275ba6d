"""Processes that may open no more files."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_more_files() -> Iterator[None]:
    """Inside, whatever this process opens fails with EMFILE; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_file_descriptor_left(pid: int, num_left: int = 0) -> Iterator[None]:
    """Inside, a process has no file descriptor free, or the lowest few; unlike after `no_more_files`, it can poll."""
    listed = list(Path(f"/proc/{pid}/fd").iterdir())
    used = {int(path.name) for path in listed if path.is_symlink()}  # not the one that was open to list them
    free = (number for number in itertools.count() if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, num_left, None)), hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
