"""The table of the objects in a directory, which all processes that use the directory share."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_FORMAT = 1
_MAX_NAMED = 500
"""The most keys that one query names."""
_MAX_TOUCHED = 4096
"""The most times of last use that are kept in memory until they are written. A process that is killed loses them."""
_OPENING_WAIT_S = 60.0
_LOCK_WAIT_S = 1.0

_BY_USE = "CREATE INDEX by_use ON objects (used_ns)"
_ADDED = """CREATE TRIGGER added AFTER INSERT ON objects BEGIN
    UPDATE total SET objects = objects + 1, num_bytes = num_bytes + NEW.num_bytes; END"""
_TABLES = (
    "CREATE TABLE objects (key BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL, used_ns INTEGER NOT NULL) WITHOUT ROWID",
    _BY_USE,
    "CREATE TABLE total (objects INTEGER NOT NULL, num_bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0, 0)",
    _ADDED,
    """CREATE TRIGGER changed AFTER UPDATE OF num_bytes ON objects BEGIN
        UPDATE total SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes; END""",
    """CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
        UPDATE total SET objects = objects - 1, num_bytes = num_bytes - OLD.num_bytes; END""",
    f"PRAGMA user_version = {_FORMAT}",
)


class DamagedIndexError(OSError):
    """The table cannot be read, or has another version: it must be rebuilt from the directory."""


class FileIndex:
    """Keys, sizes and times of last use in SQLite, whose write lock is also the lock of the directory.

    Objects are renamed and removed only inside `changing`. So table and directory differ only if a process was killed
    within it, and only until the next process opens the directory. Times of last use are written with the next change.

    Look-ups have a connection of their own, and do not wait for changes. A change that reaches the disk may take a
    second, because the file system writes new objects of other processes along with it.

    All methods raise `OSError` if SQLite fails, `TimeoutError` if another process keeps the lock.
    """

    def __init__(self, path: Path) -> None:
        """Open the table, or make it. Raises `DamagedIndexError` if it cannot be used."""
        self._write_lock, self._read_lock, self._touch_lock = (threading.Lock() for _ in range(3))
        self._touched: dict[bytes, None] = {}  # under `_touch_lock`; the latest used is last
        with _translated():
            self._db = _connect(path)
            self._reader = _connect(path)
        try:
            self._prepare()
        except BaseException:
            self._close()
            raise

    def _prepare(self) -> None:
        with _translated():
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the latest changes, and damages nothing
        with self.changing():
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found == 0:
                for statement in _TABLES:
                    self._db.execute(statement)
            elif found != _FORMAT:
                raise DamagedIndexError(f"format {found}")

    @contextmanager
    def changing(self) -> Iterator[Changes]:
        """Hold the lock of the directory against all processes. Commit at the end; after an error, change nothing."""
        with self._write_lock, _translated(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            with self._touch_lock:
                touched, self._touched = self._touched, {}
            changes = Changes(self._db)
            if touched:
                rows = enumerate(touched, changes.now_ns())
                self._db.executemany("UPDATE objects SET used_ns = ? WHERE key = ?", rows)
            yield changes

    def begin_use(self) -> None:
        """Limit waits for the lock to `_LOCK_WAIT_S` from now on: calls have deadlines, unlike the opening."""
        with self._write_lock, self._read_lock, _translated():
            for connection in (self._db, self._reader):
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * _LOCK_WAIT_S)}")

    def known(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that the table has."""
        found: set[bytes] = set()
        with self._read_lock, _translated():
            for begin in range(0, len(keys), _MAX_NAMED):
                named = keys[begin : begin + _MAX_NAMED]
                marks = ",".join("?" * len(named))
                rows = self._reader.execute(f"SELECT key FROM objects WHERE key IN ({marks})", named)
                found.update(key for (key,) in rows)
        return found

    def total(self) -> tuple[int, int]:
        """Return the number of objects and the sum of their bytes."""
        with self._read_lock, _translated():
            return Changes(self._reader).total()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that objects are used now."""
        with self._touch_lock:
            for key in keys:
                self._touched.pop(key, None)
                self._touched[key] = None
            is_full = len(self._touched) > _MAX_TOUCHED
        if is_full:
            with self.changing():
                pass

    def close(self) -> None:
        """Write the last uses if possible, and close the file."""
        with contextlib.suppress(OSError), self.changing():
            pass
        self._close()

    def _close(self) -> None:
        with self._write_lock, self._read_lock:  # closing during another thread's call would crash SQLite
            self._reader.close()
            self._db.close()


class Changes:
    """The table, while this process holds the lock of the directory."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def keys(self) -> set[bytes]:
        """Return all keys."""
        return {key for (key,) in self._db.execute("SELECT key FROM objects")}

    def add(self, objects: Iterable[tuple[bytes, int, int]]) -> None:
        """Enter objects, or replace them: key, bytes and last use in nanoseconds of `time.time_ns()`."""
        self._db.executemany(
            "INSERT INTO objects VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
            "SET num_bytes = excluded.num_bytes, used_ns = excluded.used_ns",
            objects,
        )

    def fill(self, objects: Iterable[tuple[bytes, int, int]]) -> None:
        """Enter objects, as `add` takes them, into an empty table.

        They are counted and ordered once at the end, which takes a third of the time.
        """
        self._db.execute("DROP TRIGGER added")
        self._db.execute("DROP INDEX by_use")
        self._db.executemany("INSERT INTO objects VALUES (?, ?, ?)", objects)
        self._db.execute("UPDATE total SET (objects, num_bytes) = (SELECT count(*), total(num_bytes) FROM objects)")
        self._db.execute(_BY_USE)
        self._db.execute(_ADDED)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget objects; keys that are not there are ignored."""
        self._db.executemany("DELETE FROM objects WHERE key = ?", ((key,) for key in keys))

    def now_ns(self) -> int:
        """Return the time for a use now: later than all times in the table, even if the clock has been set back."""
        (latest_ns,) = self._db.execute("SELECT max(used_ns) FROM objects").fetchone()
        return max(time.time_ns(), (latest_ns or 0) + 1)

    def oldest(self, limit: int) -> list[tuple[bytes, int]]:
        """Return key and bytes of up to `limit` of the least recently used objects."""
        return self._db.execute("SELECT key, num_bytes FROM objects ORDER BY used_ns LIMIT ?", (limit,)).fetchall()

    def total(self) -> tuple[int, int]:
        """Return the number of objects and the sum of their bytes."""
        objects, num_bytes = self._db.execute("SELECT objects, num_bytes FROM total").fetchone()
        return objects, num_bytes


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_OPENING_WAIT_S, isolation_level=None, check_same_thread=False)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise TimeoutError("another process holds the lock of the directory") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise DamagedIndexError(str(error)) from error
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, "the index cannot grow") from error
        raise OSError(f"index: {error}") from error
