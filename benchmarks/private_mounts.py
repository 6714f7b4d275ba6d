"""Small file systems for /dev/shm and TMPDIR, visible to this program only, so that they can be filled up."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_INSIDE = "SWIFTKV_PRIVATE_MOUNTS"
_SIZE = "64m"
_PIECE = b"\0" * (1 << 20)
SHARED_MEMORY = Path("/dev/shm")


def enter() -> bool:
    """Start the program again in a mount namespace of its own, with a TMPDIR and a /dev/shm of 64 MiB each.

    Returns whether it runs in one; `False` where the system does not permit such namespaces.
    """
    if _INSIDE not in os.environ:
        _start_again_inside()
        return False
    _mount(Path(os.environ[_INSIDE]))
    return True


def _start_again_inside() -> None:
    """Run this program again in a namespace of its own. Returns only if that is not possible."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY)]
    try:
        if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
            return
    except FileNotFoundError:  # the programs that this needs are not installed
        return
    directory = tempfile.mkdtemp(prefix="swiftkv-full-")
    os.environ[_INSIDE] = os.environ["TMPDIR"] = directory
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def _mount(directory: Path) -> None:
    for target in (directory, SHARED_MEMORY):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=1777", "tmpfs", str(target)], check=True)
    atexit.register(_unmount, directory)


def _unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=False)
    with suppress(OSError):
        directory.rmdir()


class Filled:
    """A file system without a free byte, until `empty` is called."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "swiftkv-chaos-fill"
        with suppress(OSError), self._file.open("wb", buffering=0) as file:
            while True:
                file.write(_PIECE)

    def empty(self) -> None:
        self._file.unlink()
