"""The directory for data that outlives a node: files and batches. One node at a time has it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.locks import is_private, is_still_at, try_lock


@contextmanager
def state_directory(config: Config) -> Iterator[tuple[Path | None, str | None]]:
    """Make `node.state_dir` with mode 0700, or use the existing one, and keep other nodes out of it.

    Without the key it is a directory under the user's state home, named by the node's port, which is removed if it is
    empty at the end. If that cannot be used, yield the reason. A node that takes any free port has no directory,
    because its next start would not find it again.

    Raises `ConfigError` if the directory that the key names cannot be used.
    """
    if config.node.state_dir is None and config.node.port == 0:
        yield None, None
        return
    try:
        directory = _place(config)
        lock = _take(directory)
    except ConfigError as error:
        if config.node.state_dir is not None:
            raise
        yield None, str(error)
        return
    try:
        yield directory, None
    finally:
        if config.node.state_dir is None:
            with suppress(OSError):  # there is something in it
                directory.rmdir()
        os.close(lock)


def _place(config: Config) -> Path:
    written = config.node.state_dir
    try:
        if written is not None:
            return config.directory / Path(written).expanduser()
        home = os.environ.get("XDG_STATE_HOME", "")
        state_home = Path(home) if os.path.isabs(home) else Path("~/.local/state").expanduser()
    except RuntimeError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"node.state_dir: {reason}; name a directory that does not begin with ~") from None
    return state_home / "swiftkv" / str(config.node.port)


def _take(directory: Path) -> int:
    """Make the directory if need be, and return the descriptor that locks it."""
    lock = None
    try:
        while lock is None:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                lock = _lock(directory)
    except OSError as error:
        raise ConfigError(
            f"node.state_dir: {directory} cannot be used: {error.strerror}; name one that this user can write to"
        ) from None
    return lock


def _lock(directory: Path) -> int | None:
    """Return the descriptor that locks the directory.

    A node that just ends may have removed it: then return `None`, or raise `FileNotFoundError`.
    """
    status = os.stat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not is_private(status, stat.S_ISDIR):
        raise ConfigError(
            f"node.state_dir: other users can read or change {directory}, where prompts and answers are kept; "
            f"chmod 700 it, or name a new directory in it"
        )
    lock = try_lock(directory)
    if lock is None:
        raise ConfigError(f"node.state_dir: another node uses {directory}; give each node its own")
    if is_still_at(directory, lock):
        return lock
    os.close(lock)
    return None
