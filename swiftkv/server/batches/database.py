"""The SQLite database of files and batches: its tables, and how it is opened."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftkv.errors import ConfigError

_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, purpose TEXT NOT NULL, object BLOB NOT NULL
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, object BLOB NOT NULL
);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    custom_id TEXT NOT NULL, model TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)
);
CREATE INDEX pending_lines ON lines (model, batch, number) WHERE state = 0;
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Open or create a database. Commits survive the death of the process, but do not wait for the disk.

    Raises:
        ConfigError: the database is damaged, cannot be written, or was written by a later version.
    """
    database = None
    try:
        database = sqlite3.connect(path, isolation_level=None)
        version = _prepare(database)
    except sqlite3.DatabaseError as error:
        if database is not None:
            database.close()
        if isinstance(error, sqlite3.OperationalError):  # the disk is full or fails, or forbids it
            raise ConfigError(
                f"node.state_dir: {path} cannot be used: {error}; free space for it, or name another directory"
            ) from None
        raise ConfigError(
            f"node.state_dir: {path} cannot be read: {error}; move it away to start with an empty one"
        ) from None
    if version > _VERSION:
        database.close()
        raise ConfigError(f"node.state_dir: {path} was written by a later version of swiftkv; name another directory")
    os.chmod(path, 0o600)
    return database


def _prepare(database: sqlite3.Connection) -> int:
    """Set the database up, and return its version."""
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before there are tables
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    return version


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit the statements inside, or none of them if the block fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")
