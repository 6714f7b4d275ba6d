"""The ports that a node listens on, and the directory of the sockets that its processes share."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.locks import hold_lock, remove_if_unlocked

BACKLOG = 2048
"""The most connections to one port that wait to be accepted."""

LONGEST_TMPDIR = 60
"""The most characters of TMPDIR: the whole path of a socket may have 107 bytes."""

_IPC_PREFIX = "swiftkv-"


@contextmanager
def listen(config: Config) -> Iterator[list[socket.socket]]:
    """Take the node's port, then those of the models that have one, in order.

    Raises `ConfigError`, and keeps none, if one cannot be had.
    """
    ports = [("node.port", config.node.port)]
    ports += [(f"models[{i}].endpoint.port", m.endpoint.port) for i, m in enumerate(config.models) if m.endpoint]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(listen_on(config.node.host, port, key)) for key, port in ports]


def listen_on(host: str, port: int, key: str) -> socket.socket:
    """Return a socket that listens. Raises `ConfigError` about `key` if the port cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"node.host: {host!r} is not an address of this machine: {reason}") from None
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"node.host: {host!r} is not an address of this machine: {reason}") from None
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port}: {reason}; choose another port or free this one"
        ) from None


def host_in_url(host: str) -> str:
    """Return a host or address as a URL has it: an address of IPv6 stands in brackets."""
    return f"[{host}]" if ":" in host else host


@contextmanager
def ipc_directory() -> Iterator[Path]:
    """Make a directory of mode 0700 for this node's sockets, and remove it when the node ends.

    It is locked while in use; directories of killed nodes are not, and are removed here.

    Raises `ConfigError` if it cannot be made.
    """
    try:
        directory, lock = _make_ipc_directory()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"TMPDIR: cannot make a directory for the node's sockets: {reason}; free space, or set TMPDIR elsewhere"
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _make_ipc_directory() -> tuple[Path, int]:
    """Return a new directory and the descriptor that holds its lock."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_TMPDIR:
        parent = Path("/tmp")
    for stale in parent.glob(f"{_IPC_PREFIX}*.ipc"):
        remove_if_unlocked(stale)
    unlocked = Path(tempfile.mkdtemp(prefix=_IPC_PREFIX, dir=parent))
    lock = hold_lock(unlocked)
    return unlocked.rename(unlocked.with_suffix(".ipc")), lock
