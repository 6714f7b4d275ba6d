"""A directory with an object for each block, bounded in bytes, which several processes of one machine may share."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from swiftkv._files import FileReads
from swiftkv.errors import ConfigError
from swiftkv.locks import hold_lock
from swiftkv.storage.backend import KEY_BYTES, Capabilities, Parts, Status, Usage
from swiftkv.storage.file_index import Changes, DamagedIndexError, FileIndex
from swiftkv.storage.file_writing import FULL, UnpublishedFiles, disk_bytes
from swiftkv.storage_options import FileOptions
from swiftkv.units import format_size

_INDEX = "index.sqlite"
_ENTRIES = frozenset({"objects", "new", "opening", *(_INDEX + suffix for suffix in ("", "-wal", "-shm", "-journal"))})
_SHARDS = 256
_BATCH_BYTES = 32 << 20
"""The most bytes that a call writes before publishing them, and the most in evicted files kept to be overwritten."""
_VICTIMS = 64


class FileMedium:
    """Objects in `objects/XX/KEY`, written in `new/` and renamed; the index lists them.

    After a kill or a power cut, all objects are whole. The next process removes leftovers in `new/`. After a power cut
    without fsync, objects may have wrong bytes, which the envelope notices.
    """

    def __init__(self, options: FileOptions) -> None:
        """Open the directory, or make it. Raises `ConfigError` if it cannot be used."""
        self._options = options
        self._objects = str(options.directory / "objects")
        self._batch_bytes = min(_BATCH_BYTES, max(1, options.size // 8))
        with contextlib.ExitStack() as undo, _told_as_mistakes(options.directory):
            _make_directory(options.directory)
            opening = _hold(options.directory / "opening")
            try:
                self._files = UnpublishedFiles(
                    options.directory / "new", self._batch_bytes, is_synced=options.fsync == "batch"
                )
                undo.callback(self._files.close)
                self._index = _open_index(options.directory / _INDEX, self._files.is_alone)
                undo.callback(self._index.close)
                self._reconcile()
                self._check_room()
                self._index.begin_use()
            finally:
                os.close(opening)
            self._kept = undo.pop_all()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=True, is_shared=False, max_calls=self._options.max_calls)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return which keys the index has."""
        known = self._index.known(keys)
        return [key in known for key in keys]

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        """Read objects in order, and yield each status while the next object is being read."""
        statuses: list[Status] = []
        sizes_bytes = [sum(map(len, parts)) for parts in into]
        # After an object comes the padding of its last page; one byte more would mean that the file is too long.
        num_more = [disk_bytes(size) - size + 1 for size in sizes_bytes]
        with contextlib.closing(FileReads(list(map(self._path, keys)), into, num_more)) as reads:
            for i, size_bytes in enumerate(sizes_bytes):
                if time.monotonic() > deadline_s:
                    break
                statuses.append(_status_of(reads.wait(i), size_bytes))
                yield statuses[-1]
        self._note_reads(keys[: len(statuses)], statuses)
        yield from itertools.repeat(Status.LATE, len(keys) - len(statuses))

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write the objects that are not there yet, a bounded number of bytes at a time."""
        statuses = [Status.LATE] * len(keys)
        known = self._index.known(keys)
        self._note_uses(known)
        for i, key in enumerate(keys):
            if key in known:
                statuses[i] = Status.OK
        for batch in self._batches([i for i in range(len(keys)) if keys[i] not in known], sources):
            if time.monotonic() > deadline_s:
                break
            written = self._write_batch([keys[i] for i in batch], [sources[i] for i in batch])
            for i, status in zip(batch, written, strict=True):
                statuses[i] = status
        return statuses

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove objects."""
        with self._index.changing() as changes:
            self._remove(changes, keys)

    def usage(self) -> Usage:
        """Return the size of the whole directory, other processes' objects included, in pages of the file system."""
        objects, num_bytes = self._index.total()
        return Usage(objects, num_bytes, self._options.size)

    def close(self) -> None:
        """Write the last uses, and remove unpublished files."""
        self._kept.close()

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._objects}/{name[:2]}/{name}"

    def _note_reads(self, keys: Sequence[bytes], statuses: Sequence[Status]) -> None:
        self._note_uses(key for key, status in zip(keys, statuses, strict=True) if status is Status.OK)
        missing = [key for key, status in zip(keys, statuses, strict=True) if status is Status.MISSING]
        with contextlib.suppress(OSError):
            if missing and self._index.known(missing):  # the files were removed from outside
                with self._index.changing() as changes:
                    changes.remove(key for key in missing if not os.path.exists(self._path(key)))

    def _note_uses(self, keys: Iterable[bytes]) -> None:
        """Note uses. If a full disk prevents it, nothing else fails: the blocks were read all the same."""
        with contextlib.suppress(OSError):
            self._index.touch(keys)

    def _batches(self, chosen: Sequence[int], sources: Sequence[Parts]) -> Iterator[list[int]]:
        """Yield the `chosen` indices in runs of at most `_batch_bytes`, or of one object."""
        batch: list[int] = []
        num_bytes = 0
        for i in chosen:
            disk_bytes = _disk_bytes(sources[i])
            if batch and num_bytes + disk_bytes > self._batch_bytes:
                yield batch
                batch, num_bytes = [], 0
            batch.append(i)
            num_bytes += disk_bytes
        if batch:
            yield batch

    def _write_batch(self, keys: Sequence[bytes], sources: Sequence[Parts]) -> list[Status]:
        sizes_bytes = list(map(_disk_bytes, sources))
        num_bytes = sum(sizes_bytes)
        statuses = [Status.MISSING] * len(keys)
        written: list[tuple[bytes, str, int]] = []
        try:
            if num_bytes <= self._options.size and self._free_disk(num_bytes):
                for i, (key, parts, size_bytes) in enumerate(zip(keys, sources, sizes_bytes, strict=True)):
                    try:
                        written.append((key, self._files.write(parts), size_bytes))
                        statuses[i] = Status.OK
                    except OSError as error:
                        if error.errno not in FULL:
                            statuses[i] = Status.FAILED
                self._publish(written)
                written = []
        except OSError as error:
            if error.errno not in FULL:
                raise
            return [Status.MISSING] * len(keys)
        finally:
            self._files.discard(path for _, path, _ in written)
        return statuses

    def _publish(self, objects: Sequence[tuple[bytes, str, int]]) -> None:
        """Give new files (key, path, bytes) their names, after evicting others to stay within the bound."""
        named: list[bytes] = []
        try:
            with self._index.changing() as changes:
                now_ns = changes.now_ns()
                _, total_bytes = changes.total()
                excess_bytes = total_bytes + sum(num_bytes for _, _, num_bytes in objects) - self._options.size
                self._evict(changes, excess_bytes, self._files.take_over)
                for key, path, _ in objects:
                    os.rename(path, self._path(key))
                    named.append(key)
                changes.add((key, num_bytes, now_ns) for key, _, num_bytes in objects)
        except OSError:
            for key in named:  # the index lacks them; objects that were not renamed here belong to other processes
                with contextlib.suppress(OSError):
                    os.unlink(self._path(key))
            raise
        if self._options.fsync == "batch":
            for directory in {os.path.dirname(self._path(key)) for key, _, _ in objects}:
                _fsync_directory(directory)

    def _free_disk(self, num_bytes: int) -> bool:
        """Remove objects until the disk has `min_free` and `num_bytes` free, and return whether it has."""
        if self._lacking_bytes(num_bytes) <= 0:
            return True
        self._files.free_spares()
        if (lacking_bytes := self._lacking_bytes(num_bytes)) <= 0:
            return True
        with self._index.changing() as changes:
            _, total_bytes = changes.total()
            if total_bytes < lacking_bytes:
                return False
            self._evict(changes, lacking_bytes)
        return True

    def _lacking_bytes(self, num_bytes: int) -> int:
        disk = os.statvfs(self._objects)
        return self._options.min_free + num_bytes - disk.f_bavail * disk.f_frsize

    def _evict(
        self, changes: Changes, excess_bytes: int, take: Callable[[str, int], None] = lambda path, _: os.unlink(path)
    ) -> None:
        """Evict the least recently used objects until `excess_bytes` or all of them are gone.

        `take` is called with the path and bytes of each file; by default it removes the file.
        """
        while excess_bytes > 0 and (oldest := changes.oldest(_VICTIMS)):
            victims = []
            for key, num_bytes in oldest:
                if excess_bytes > 0:
                    victims.append(key)
                    excess_bytes -= num_bytes
                    with contextlib.suppress(FileNotFoundError):
                        take(self._path(key), num_bytes)
            changes.remove(victims)

    def _remove(self, changes: Changes, keys: Sequence[bytes]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))
        changes.remove(keys)

    def _reconcile(self) -> None:
        """Make the index match the directory, after any kill, and evict down to the bound."""
        found = set(self._list_objects())
        with self._index.changing() as changes:
            gone, added = [], []
            known = changes.keys()
            for key in known ^ found:  # includes changes that others made during the listing
                try:
                    status = os.stat(self._path(key))
                except FileNotFoundError:
                    gone.append(key)
                else:
                    added.append((key, disk_bytes(status.st_size), status.st_mtime_ns))
            changes.remove(gone)
            enter = changes.add if known else changes.fill
            enter(sorted(added))  # a table of hashes fills several times faster in their order
            _, total_bytes = changes.total()
            self._evict(changes, total_bytes - self._options.size)

    def _list_objects(self) -> Iterator[bytes]:
        for shard in range(_SHARDS):
            directory = f"{self._objects}/{shard:02x}"
            os.makedirs(directory, mode=0o700, exist_ok=True)
            for name in os.listdir(directory):
                if len(name) == 2 * KEY_BYTES:
                    with contextlib.suppress(ValueError):
                        yield bytes.fromhex(name)

    def _check_room(self) -> None:
        disk = os.statvfs(self._objects)
        free_bytes = disk.f_bavail * disk.f_frsize
        _, own_bytes = self._index.total()
        if free_bytes + own_bytes < self._options.min_free:
            raise ConfigError(
                f"min_free: of {self._options.directory} only {format_size(free_bytes)} are free, less than min_free "
                f"({format_size(self._options.min_free)}), so nothing would be stored; free space, or lower min_free"
            )


@contextlib.contextmanager
def _told_as_mistakes(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"path: {directory} cannot be used: {reason}; name another directory") from None


def _make_directory(directory: Path) -> None:
    """Make the directory if need be. Raises `ConfigError` if other users can use it, or if it has foreign files."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"path: {directory} belongs to user {status.st_uid}, and the node runs as {os.getuid()}; it holds what "
            f"users wrote, so run chown {os.getuid()} {directory}, or name another directory"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"path: {directory} can be used by others (mode {stat.S_IMODE(status.st_mode):o}); it holds what users "
            f"wrote, so run chmod 700 {directory}, or name another directory"
        )
    if others := sorted(set(os.listdir(directory)) - _ENTRIES):
        raise ConfigError(f"path: {directory} holds {others[0]}, which no cache has written; name an empty directory")


def _hold(path: Path) -> int:
    """Return the descriptor of a lock that one process holds while it opens the directory."""
    path.touch(mode=0o600)
    return hold_lock(path)


def _open_index(path: Path, is_alone: bool) -> FileIndex:
    """Open the index; make a new one if it is damaged and no other process uses it."""
    try:
        return FileIndex(path)
    except DamagedIndexError:
        if not is_alone:
            raise
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return FileIndex(path)


def _status_of(num_read: int, size_bytes: int) -> Status:
    """Return the status of an object of `size_bytes`, from the bytes of its file that were read, or minus an errno."""
    if num_read < 0:
        return Status.MISSING if num_read == -errno.ENOENT else Status.FAILED
    return Status.OK if num_read in (disk_bytes(size_bytes), size_bytes) else Status.CORRUPT  # older ones: no padding


def _disk_bytes(parts: Parts) -> int:
    return disk_bytes(sum(map(len, parts)))


def _fsync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
