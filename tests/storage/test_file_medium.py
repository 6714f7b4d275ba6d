"""The directory: spoiled objects, leftovers, full disks, other processes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftkv.errors import ConfigError
from swiftkv.locks import hold_lock
from swiftkv.storage.backend import Status, StorageBackend
from swiftkv.storage.envelope import HEADER_BYTES
from swiftkv.storage.file_index import Changes, FileIndex
from tests.support.storage import BLOCK_BYTES, check_got, key_of, opened, put, soon
from tests.support.storage_small_disk import NO_NAMESPACE
from tests.support.storage_writer import (
    event,
    files_in,
    put_beyond_a_limit,
    raw_options,
    start,
    wait_for,
    write_some,
)

KEYS = [key_of(i) for i in range(10)]
REGIONS = {"magic": 0, "version": 4, "fingerprint": 8, "key": 24, "length": 56, "checksum": 120, "block": HEADER_BYTES}
ON_DISK = 8192
"""Bytes that an object of `BLOCK_BYTES` takes."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def path_of(cache: Path, key: bytes) -> Path:
    return cache / "objects" / key.hex()[:2] / key.hex()


def check_agreement(cache: Path, backend: StorageBackend) -> None:
    """The index says exactly what is on disk."""
    files = files_in(cache)
    usage = backend.usage()
    assert usage is not None
    assert usage.objects == len(files)
    assert usage.num_bytes == sum(-(-size // 4096) * 4096 for size in files.values())
    assert usage.bound_bytes is None or usage.num_bytes <= usage.bound_bytes
    assert all(backend.exists(list(files), soon()))


@pytest.mark.parametrize("region", REGIONS)
def test_a_byte_that_changes_on_disk_is_noticed(cache: Path, region: str) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:2])
        with path_of(cache, KEYS[0]).open("r+b") as file:
            file.seek(REGIONS[region])
            byte = file.read(1)[0]
            file.seek(REGIONS[region])
            file.write(bytes([byte ^ 1]))
        assert check_got(backend, KEYS[:2]) == [Status.CORRUPT, Status.OK]
        assert not path_of(cache, KEYS[0]).exists()
        check_agreement(cache, backend)


@pytest.mark.parametrize("length", [0, *(offset + 1 for offset in REGIONS.values()), HEADER_BYTES + BLOCK_BYTES - 1])
def test_a_file_that_is_cut_is_noticed(cache: Path, length: int) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:2])
        os.truncate(path_of(cache, KEYS[1]), length)
        assert check_got(backend, KEYS[:2]) == [Status.OK, Status.CORRUPT]
        check_agreement(cache, backend)


def test_a_file_of_zeros_or_with_more_behind_it_is_noticed(cache: Path) -> None:
    """A power cut leaves such files where renames reach the disk before bytes."""
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:2])
        path_of(cache, KEYS[0]).write_bytes(bytes(HEADER_BYTES + BLOCK_BYTES))
        with path_of(cache, KEYS[1]).open("ab") as file:
            file.write(b"x")
        assert check_got(backend, KEYS[:2]) == [Status.CORRUPT] * 2


def test_an_object_under_another_name_is_noticed(cache: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:2])
        shutil.copyfile(path_of(cache, KEYS[0]), path_of(cache, KEYS[1]))
        assert check_got(backend, KEYS[:2]) == [Status.OK, Status.CORRUPT]


def test_a_file_that_somebody_removed_is_missing(cache: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:2])
        path_of(cache, KEYS[0]).unlink()
        assert check_got(backend, KEYS[:2]) == [Status.MISSING, Status.OK]
        assert backend.exists(KEYS[:2], soon()) == [False, True]
        check_agreement(cache, backend)


def test_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:1])
        path_of(cache, KEYS[0]).rename(tmp_path / "elsewhere")
        path_of(cache, KEYS[0]).symlink_to(tmp_path / "elsewhere")
        assert check_got(backend, KEYS[:1]) == [Status.FAILED]


def test_the_whole_directory_may_go(cache: Path) -> None:
    """Everything is missing then, or fails; nobody waits."""
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:3])
        shutil.rmtree(cache)
        assert set(check_got(backend, KEYS[:3])) <= {Status.MISSING, Status.FAILED}
        assert set(put(backend, KEYS[4:6])) <= {Status.FAILED}


def test_reading_leaves_no_file_open(cache: Path) -> None:
    """Neither what was read nor what was opened ahead of a read that ended before."""
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS)
        check_got(backend, KEYS)
        num_open = len(os.listdir("/proc/self/fd"))
        assert check_got(backend, KEYS) == [Status.OK] * len(KEYS)
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in KEYS]
        assert backend.get(KEYS, into, time.monotonic() - 1.0) == [Status.LATE] * len(KEYS)
        assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("use", [check_got, put])
def test_the_least_recently_used_makes_room(
    cache: Path, use: Callable[[StorageBackend, Sequence[bytes]], list[Status]]
) -> None:
    """The order outlives a restart; getting is using, and so is putting again."""
    with opened(raw_options(cache, 4 * ON_DISK)) as backend:
        for key in KEYS[:4]:
            put(backend, [key])
        assert use(backend, KEYS[:1]) == [Status.OK]
    with opened(raw_options(cache, 4 * ON_DISK)) as backend:
        put(backend, [KEYS[4]])
        put(backend, [KEYS[5]])
        assert backend.exists(KEYS[:6], soon()) == [True, False, False, True, True, True]
        check_agreement(cache, backend)


def test_a_clock_that_is_set_back_changes_no_order(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that was put or got last stays, and one that lay there before gives way."""
    with opened(raw_options(cache, 4 * ON_DISK)) as backend:
        put(backend, KEYS[:4])
        past_ns = time.time_ns() - 10**15
        monkeypatch.setattr(time, "time_ns", lambda: past_ns)
        check_got(backend, KEYS[1:2])
        for key in KEYS[4:7]:
            put(backend, [key])
        assert backend.exists(KEYS[:7], soon()) == [False, True, False, False, True, True, True]


def test_a_batch_larger_than_the_bound_leaves_its_end(cache: Path) -> None:
    with opened(raw_options(cache, 4 * ON_DISK)) as backend:
        assert put(backend, KEYS) == [Status.OK] * len(KEYS)
        assert backend.exists(KEYS, soon()) == [False] * 6 + [True] * 4


def test_an_object_larger_than_the_bound_is_left_out(cache: Path) -> None:
    with opened(raw_options(cache, 4 * ON_DISK)) as backend:
        put(backend, KEYS[:2])
        assert put(backend, KEYS[2:3], 5 * ON_DISK) == [Status.MISSING]
        assert backend.exists(KEYS[:2], soon()) == [True, True]


def test_a_lower_bound_holds_from_the_start(cache: Path) -> None:
    with opened(raw_options(cache, 8 * ON_DISK)) as backend:
        put(backend, KEYS[:8])
    with opened(raw_options(cache, 3 * ON_DISK)) as backend:
        check_agreement(cache, backend)
        assert len(files_in(cache)) == 3


def test_objects_without_an_index_are_found_again(cache: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS)
    (cache / "index.sqlite").unlink()
    with opened(raw_options(cache, "1MiB")) as backend:
        assert check_got(backend, KEYS) == [Status.OK] * len(KEYS)
        check_agreement(cache, backend)


@pytest.mark.parametrize("damage", ["text", "zeros", "format"])
def test_a_damaged_index_is_made_again(cache: Path, damage: str) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS)
    index = cache / "index.sqlite"
    if damage == "format":
        with sqlite3.connect(index) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    else:
        index.write_bytes(b"not a database" * 1000 if damage == "text" else bytes(index.stat().st_size))
    with opened(raw_options(cache, "1MiB")) as backend:
        assert check_got(backend, KEYS) == [Status.OK] * len(KEYS)
        check_agreement(cache, backend)


def test_a_table_that_is_filled_at_once_is_like_one_that_grew(tmp_path: Path) -> None:
    """In what it has, in what it does with later changes, and in every trigger."""
    objects = [(key, 4096 * (i + 1), 1000 - i) for i, key in enumerate(sorted(KEYS))]
    outcomes = []
    for enter in (Changes.add, Changes.fill):
        path = tmp_path / enter.__name__
        index = FileIndex(path)
        with index.changing() as changes:
            enter(changes, objects[1:])
        with index.changing() as changes:
            changes.add(objects[:1])
            changes.remove([objects[2][0]])
            oldest = changes.oldest(len(objects))
        with sqlite3.connect(path) as db:
            schema = db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        db.close()
        outcomes.append((index.total(), oldest, schema))
        index.close()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == (len(objects) - 1, sum(num_bytes for _, num_bytes, _ in objects) - objects[2][1])


def test_an_index_that_others_use_is_not_removed(cache: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS)
    (cache / "index.sqlite").write_bytes(b"not a database" * 1000)
    (cache / "new" / "of another process").mkdir()
    lock = hold_lock(cache / "new" / "of another process")
    with pytest.raises(ConfigError, match="cannot be used"), opened(raw_options(cache, "1MiB")):
        pass
    os.close(lock)
    with opened(raw_options(cache, "1MiB")) as backend:
        assert check_got(backend, KEYS) == [Status.OK] * len(KEYS)


def test_the_journal_of_an_index_that_is_being_made_is_known(cache: Path) -> None:
    """Another process may be making it just now, or was killed there."""
    cache.mkdir(mode=0o700)
    with sqlite3.connect(cache / "index.sqlite", isolation_level=None) as db:
        db.execute("BEGIN")
        db.execute("CREATE TABLE objects (key BLOB)")
        journal = (cache / "index.sqlite-journal").read_bytes()
    db.close()
    (cache / "index.sqlite").unlink()
    (cache / "index.sqlite-journal").write_bytes(journal)
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS)
        check_agreement(cache, backend)


def test_files_that_came_and_went_while_nobody_looked(cache: Path, tmp_path: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:4])
    shutil.copyfile(path_of(cache, KEYS[0]), tmp_path / "kept")
    path_of(cache, KEYS[0]).unlink()
    with opened(raw_options(cache, "1MiB")) as backend:
        check_agreement(cache, backend)
    shutil.copyfile(tmp_path / "kept", path_of(cache, KEYS[0]))
    with opened(raw_options(cache, "1MiB")) as backend:
        check_agreement(cache, backend)
        assert check_got(backend, KEYS[:4]) == [Status.OK] * 4


def test_only_its_owner_may_look(cache: Path) -> None:
    with opened(raw_options(cache, "1MiB")) as backend:
        put(backend, KEYS[:1])
        modes = {os.stat(path).st_mode & 0o077 for path in [cache, *(cache / "objects").iterdir()]}
        assert modes == {0}
        assert path_of(cache, KEYS[0]).stat().st_mode & 0o777 == 0o600


def test_a_directory_that_others_may_use_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"), opened(raw_options(cache, "1MiB")):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_a_mistake_of_its_own(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 0)
    why = "belongs to user 12345, and the node runs as 0; .* run chown 0 "
    with pytest.raises(ConfigError, match=why), opened(raw_options(cache, "1MiB")):
        pass


def test_a_directory_with_other_files_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    (cache / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex.*empty directory"), opened(raw_options(cache, "1MiB")):
        pass


def test_a_path_that_is_a_file_is_refused(cache: Path) -> None:
    cache.touch()
    with pytest.raises(ConfigError, match="name another directory"), opened(raw_options(cache, "1MiB")):
        pass


def test_a_disk_that_is_too_full_already_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="min_free"), opened(raw_options(cache, "1MiB", min_free="1000000TiB")):
        pass


def test_on_a_small_disk_old_objects_give_way_and_nothing_fails(tmp_path: Path) -> None:
    """Above the floor, at the floor, and full to the last byte; see the program for each."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    program = [*unshare, sys.executable, "-m", "tests.support.storage_small_disk", str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    if run.returncode == NO_NAMESPACE or "unshare" in run.stderr:
        pytest.skip(f"no mount namespace for a small file system here: {run.stderr.strip()[-200:]}")
    assert run.returncode == 0, run.stderr


def test_files_that_may_not_grow_are_left_out(cache: Path) -> None:
    process = start(put_beyond_a_limit, raw_options(cache, "100MiB"), 4 << 20)
    process.join(60)
    assert process.exitcode == 0
    with opened(raw_options(cache, "100MiB")) as backend:
        check_agreement(cache, backend)
        assert len(files_in(cache)) == 1
        assert len(list((cache / "new").iterdir())) == 1  # this process's own


def test_two_processes_use_one_directory(cache: Path) -> None:
    """Each finds what the other put; together they keep within the bound."""
    raw = raw_options(cache, 40 * ON_DISK)
    with opened(raw) as backend:
        begun = [event(), event()]
        writers = [start(write_some, raw, seed, 60, has_begun) for seed, has_begun in enumerate(begun)]
        for has_begun in begun:
            wait_for(has_begun)
        put(backend, [key_of(1000 + i) for i in range(10)])
        for writer in writers:
            writer.join(60)
        assert [writer.exitcode for writer in writers] == [0, 0]
        check_agreement(cache, backend)


def test_what_another_process_evicted_is_missing(cache: Path) -> None:
    raw = raw_options(cache, 4 * ON_DISK)
    with opened(raw) as ours, opened(raw) as theirs:
        put(ours, KEYS[:2])
        assert theirs.exists(KEYS[:2], soon()) == [True, True]
        put(theirs, KEYS[2:6])
        assert ours.exists(KEYS[:6], soon()) == [False] * 2 + [True] * 4
        assert check_got(ours, KEYS[:3]) == [Status.MISSING] * 2 + [Status.OK]


def test_a_write_that_gets_no_lock_leaves_what_another_process_wrote(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one model write the same blocks at the same time, and one of them may be slow to reach the disk."""
    monkeypatch.setattr("swiftkv.storage.file_index._LOCK_WAIT_S", 0.05)
    raw = raw_options(cache, 40 * ON_DISK)
    has_renamed, may_commit = threading.Event(), threading.Event()

    def commit_late(self: Changes, objects: Iterable[tuple[bytes, int, int]]) -> None:
        has_renamed.set()
        may_commit.wait(60)
        add(self, objects)

    with opened(raw) as ours, opened(raw) as theirs, ThreadPoolExecutor(1) as thread:
        add = Changes.add
        monkeypatch.setattr(Changes, "add", commit_late)
        written = thread.submit(put, theirs, KEYS[:1])
        assert has_renamed.wait(60)
        assert put(ours, KEYS[:1]) == [Status.LATE]
        may_commit.set()
        assert written.result(60) == [Status.OK]
        assert check_got(theirs, KEYS[:1]) == [Status.OK]
        check_agreement(cache, theirs)


def test_a_look_up_waits_for_no_change(cache: Path) -> None:
    """A change that reaches the disk may take long, and a prompt waits for the look-up."""
    cache.mkdir()
    index = FileIndex(cache / "index.sqlite")
    with ThreadPoolExecutor(1) as others:
        with index.changing() as changes:
            changes.add([(KEYS[0], ON_DISK, 1)])
            assert others.submit(index.known, KEYS).result(60) == set()
            assert others.submit(index.total).result(60) == (0, 0)
            others.submit(index.touch, KEYS).result(60)
        assert others.submit(index.known, KEYS).result(60) == {KEYS[0]}
    index.close()
