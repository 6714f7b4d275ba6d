"""Fill the file backend on a file system of a few MiB; to be run in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from swiftkv.storage.backend import Status, StorageBackend
from tests.support.storage import check_got, key_of, opened, put
from tests.support.storage_writer import files_in, raw_options

NO_NAMESPACE = 77
"""The exit status where nothing can be mounted."""

_DISK = 8 << 20
_BLOCK = 100_000
_NUM_BLOCKS = 200  # more than twice what fits


def _fill(backend: StorageBackend) -> set[Status]:
    return {status for i in range(_NUM_BLOCKS) for status in put(backend, [key_of(i)], _BLOCK)}


def _latest_are_there(backend: StorageBackend, count: int) -> bool:
    keys = [key_of(_NUM_BLOCKS - 1 - i) for i in range(count)]
    return check_got(backend, keys, _BLOCK) == [Status.OK] * count


def _check_floor(cache: Path) -> None:
    floor = 2 << 20
    with opened(raw_options(cache, "1GiB", min_free=floor)) as backend:
        assert _fill(backend) == {Status.OK}
        assert _latest_are_there(backend, 10)
        disk = os.statvfs(cache)
        assert disk.f_bavail * disk.f_frsize >= floor - (1 << 20)  # the index and its log are not counted
    assert len(files_in(cache)) < _NUM_BLOCKS


def _check_full(cache: Path) -> None:
    """Check that without a floor a full cache keeps its blocks, that no call fails and that no block is wrong."""
    with opened(raw_options(cache, "1GiB")) as backend:
        assert _fill(backend) <= {Status.OK, Status.MISSING}
        found = check_got(backend, [key_of(i) for i in range(_NUM_BLOCKS)], _BLOCK)
        assert set(found) == {Status.OK, Status.MISSING}
        assert not backend.is_degraded


def main() -> int:
    """Return 0 if all is well."""
    disk = Path(sys.argv[1]) / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode != 0:
        return NO_NAMESPACE
    _check_floor(disk / "floor")
    subprocess.run(["rm", "-r", str(disk / "floor")], check=True)
    _check_full(disk / "full")
    return 0


if __name__ == "__main__":
    sys.exit(main())
