"""The memory that processes of this machine may use together."""

from __future__ import annotations

import os
from pathlib import Path

from swiftkv.system_files import read_system_file


def machine_memory_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the machine's memory, or the fewer that the control groups of this process allow."""
    return min([machine_memory_bytes(), *_limits_bytes(root)])


def _limits_bytes(root: Path) -> list[int]:
    """Return the limits of our control group and of those above it, as far as they are visible."""
    groups = root / "sys/fs/cgroup"
    own = groups / _own_group(root).lstrip("/")
    texts = [read_system_file(group / "memory.max") for group in (own, *own.parents) if group.is_relative_to(groups)]
    return [int(text) for text in texts if text.isdigit()]


def _own_group(root: Path) -> str:
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return ""
