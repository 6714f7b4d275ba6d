"""The key of `/admin` if none is configured: a node makes one, and programs of the same user find it by the port."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from swiftkv.errors import ConfigError
from swiftkv.locks import hold_lock, is_private, make_private_directory, remove_if_unlocked, runtime_directories
from swiftkv.node_config import is_loopback

_SUFFIX = ".key"
_MAX_KEY_BYTES = 1024
_CURE = "or export an admin key of your own and name its variable in node.admin_key_env"


@contextmanager
def generated_admin_key(port: int) -> Iterator[tuple[str, Path]]:
    """Make a key for the node at `port`; yield it and the file that holds it, which is removed in the end.

    The file is locked while in use; files of killed nodes are not, and are removed here. The directory stays, because
    another node may be about to write to it.
    Raises `ConfigError` if the file cannot be written.
    """
    key = secrets.token_urlsafe(32)
    file, lock = _write(port, key)
    try:
        yield key, file
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)


def find_admin_key(url: str) -> str | None:
    """Return the key that a node of this user on this machine made for the port of `url`, or `None`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    if host is None or port is None or not is_loopback(host):
        return None
    keys = (_read(directory / f"{port}{_SUFFIX}") for directory in runtime_directories())
    return next((key for key in keys if key is not None), None)


def _write(port: int, key: str) -> tuple[Path, int]:
    """Return the file and the descriptor that locks it."""
    reasons = []
    for directory in runtime_directories():
        if directory.parent.is_dir():
            try:
                return _write_in(directory, port, key)
            except OSError as error:
                reasons.append(f"{directory}: {error.strerror}")
    raise ConfigError(
        f"node.admin_key_env: the admin key cannot be written to a file ({'; '.join(reasons)}); fix that, {_CURE}"
    )


def _write_in(directory: Path, port: int, key: str) -> tuple[Path, int]:
    """Do as `_write` does, in one directory. Raises `OSError`, or `ConfigError` as `_write_new` does."""
    make_private_directory(directory)
    starting = hold_lock(directory)  # no other node looks at a stale file of this port while it is replaced
    try:
        for stale in directory.glob(f"*{_SUFFIX}"):
            remove_if_unlocked(stale)
        return _write_new(directory, port, key)
    finally:
        os.close(starting)


def _write_new(directory: Path, port: int, key: str) -> tuple[Path, int]:
    """Write and lock the file. Raises `OSError`, or `ConfigError` if a running node has it."""
    file = directory / f"{port}{_SUFFIX}"
    lock, name = tempfile.mkstemp(dir=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{key}\n".encode())
        os.link(name, file)
    except OSError as error:
        os.close(lock)
        if isinstance(error, FileExistsError):
            raise ConfigError(
                f"node.port: another node of this user has port {port} at another address, and both would keep their "
                f"admin keys in one file; choose another port, {_CURE}"
            ) from None
        raise
    finally:
        os.unlink(name)
    return file, lock


def _read(file: Path) -> str | None:
    try:
        if not is_private(os.lstat(file.parent), stat.S_ISDIR):
            return None
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it does not exist, or belongs to another user
        return None
    with open(descriptor, "rb") as opened:
        if not is_private(os.fstat(descriptor), stat.S_ISREG):
            return None
        return opened.read(_MAX_KEY_BYTES).decode("ascii", "replace").strip() or None
