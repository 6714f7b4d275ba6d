"""Files that are written before they get their names, and those of evicted objects that are overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv.storage.backend import Parts, Status
from swiftkv.storage.file_writing import UnpublishedFiles, disk_bytes
from tests.support.storage import check_got, key_of, opened, put
from tests.support.storage_writer import files_in, raw_options

PAGE = 4096


def object_of(byte: int, num_bytes: int = 3 * PAGE) -> Parts:
    return memoryview(bytes([byte]) * 100), memoryview(bytes([byte]) * (num_bytes - 100))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[UnpublishedFiles]:
    made = UnpublishedFiles(tmp_path / "new", 8 * PAGE, is_synced=False)
    yield made
    made.close()
    assert list((tmp_path / "new").iterdir()) == []


def publish(files: UnpublishedFiles, path: Path, byte: int, num_bytes: int = 3 * PAGE) -> None:
    """Write an object and name it."""
    os.rename(files.write(object_of(byte, num_bytes)), path)


def mark(path: Path) -> None:
    """Give a file a mode that no new one has. Its inode says nothing: a new file may get that of one that is gone."""
    path.chmod(0o640)


def is_marked(path: Path) -> bool:
    return path.stat().st_mode & 0o777 == 0o640


def left_in(tmp_path: Path) -> list[Path]:
    (own,) = (tmp_path / "new").iterdir()
    return list(own.iterdir())


@pytest.mark.parametrize("num_bytes", [2 * PAGE + 1, 3 * PAGE - 1, 3 * PAGE])
def test_the_file_of_an_evicted_object_is_overwritten(files: UnpublishedFiles, tmp_path: Path, num_bytes: int) -> None:
    """A shorter object may do so too: the rest of the last page is zeros."""
    publish(files, tmp_path / "old", 1)
    mark(tmp_path / "old")
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    assert not (tmp_path / "old").exists()
    publish(files, tmp_path / "new one", 2, num_bytes)
    assert is_marked(tmp_path / "new one")
    assert (tmp_path / "new one").read_bytes() == bytes([2]) * num_bytes + bytes(3 * PAGE - num_bytes)
    assert left_in(tmp_path) == []


def test_a_file_that_somebody_reads_is_not_overwritten(files: UnpublishedFiles, tmp_path: Path) -> None:
    """In this process or in another: the reader goes on to read what it opened."""
    publish(files, tmp_path / "old", 1)
    with (tmp_path / "old").open("rb", buffering=0) as reader:
        files.take_over(str(tmp_path / "old"), 3 * PAGE)
        publish(files, tmp_path / "new one", 2)
        assert reader.read() == bytes([1]) * 3 * PAGE
    assert left_in(tmp_path) == []


def test_a_file_that_is_linked_elsewhere_is_not_overwritten(files: UnpublishedFiles, tmp_path: Path) -> None:
    """A backup may consist of such links."""
    publish(files, tmp_path / "old", 1)
    os.link(tmp_path / "old", tmp_path / "backup")
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    publish(files, tmp_path / "new one", 2)
    assert (tmp_path / "backup").read_bytes() == bytes([1]) * 3 * PAGE


def test_a_file_of_another_size_makes_room_for_a_new_one(files: UnpublishedFiles, tmp_path: Path) -> None:
    publish(files, tmp_path / "old", 1)
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    publish(files, tmp_path / "new one", 2, 2 * PAGE)
    assert (tmp_path / "new one").stat().st_size == 2 * PAGE
    assert left_in(tmp_path) == []


def test_the_one_of_the_right_size_is_chosen(files: UnpublishedFiles, tmp_path: Path) -> None:
    for pages in (1, 2, 3):
        publish(files, tmp_path / str(pages), pages, pages * PAGE)
    mark(tmp_path / "2")
    for pages in (1, 2, 3):
        files.take_over(str(tmp_path / str(pages)), pages * PAGE)
    publish(files, tmp_path / "new one", 4, 2 * PAGE)
    assert is_marked(tmp_path / "new one")
    assert len(left_in(tmp_path)) == 2


def test_files_are_kept_up_to_a_bound(files: UnpublishedFiles, tmp_path: Path) -> None:
    """The oldest go first; one is kept however large it is."""
    for i in range(4):
        publish(files, tmp_path / str(i), i)
    publish(files, tmp_path / "large", 5, 20 * PAGE)
    for i in range(4):
        files.take_over(str(tmp_path / str(i)), 3 * PAGE)
    assert sorted(file.read_bytes()[0] for file in left_in(tmp_path)) == [2, 3]
    files.take_over(str(tmp_path / "large"), 20 * PAGE)
    assert [file.read_bytes()[0] for file in left_in(tmp_path)] == [5]
    files.free_spares()
    assert left_in(tmp_path) == []


def test_an_object_that_is_gone_cannot_be_taken_over(files: UnpublishedFiles, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.take_over(str(tmp_path / "nothing"), PAGE)
    publish(files, tmp_path / "new one", 1)


def test_a_full_cache_makes_no_files(tmp_path: Path) -> None:
    """Every object that is written lies in the file of one that was evicted, and is what was put."""
    block_bytes, num_blocks = 8000, 16
    on_disk = disk_bytes(block_bytes + 136)
    cache = tmp_path / "cache"
    with opened(raw_options(cache, num_blocks * on_disk)) as backend:
        keys = [key_of(i) for i in range(3 * num_blocks)]
        for key in keys[: num_blocks + 1]:
            put(backend, [key], block_bytes)
        for file in cache.glob("*/*/*"):
            mark(file)
        for key in keys[num_blocks + 1 :]:
            assert put(backend, [key], block_bytes) == [Status.OK]
        assert all(map(is_marked, cache.glob("*/*/*")))
        latest = keys[-num_blocks:]
        assert set(files_in(cache)) == set(latest)
        assert check_got(backend, latest, block_bytes) == [Status.OK] * num_blocks
