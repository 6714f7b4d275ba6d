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


def published(files: UnpublishedFiles, path: Path, byte: int, num_bytes: int = 3 * PAGE) -> int:
    """Write an object and name it; return its inode."""
    os.rename(files.write(object_of(byte, num_bytes)), path)
    return path.stat().st_ino


def left_in(tmp_path: Path) -> list[Path]:
    (own,) = (tmp_path / "new").iterdir()
    return list(own.iterdir())


@pytest.mark.parametrize("num_bytes", [2 * PAGE + 1, 3 * PAGE - 1, 3 * PAGE])
def test_the_file_of_an_evicted_object_is_overwritten(files: UnpublishedFiles, tmp_path: Path, num_bytes: int) -> None:
    """A shorter object may do so too: the rest of the last page is zeros."""
    inode = published(files, tmp_path / "old", 1)
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    assert not (tmp_path / "old").exists()
    assert published(files, tmp_path / "new one", 2, num_bytes) == inode
    assert (tmp_path / "new one").read_bytes() == bytes([2]) * num_bytes + bytes(3 * PAGE - num_bytes)
    assert left_in(tmp_path) == []


def test_a_file_that_somebody_reads_is_not_overwritten(files: UnpublishedFiles, tmp_path: Path) -> None:
    """In this process or in another: the reader goes on to read what it opened."""
    inode = published(files, tmp_path / "old", 1)
    with (tmp_path / "old").open("rb", buffering=0) as reader:
        files.take_over(str(tmp_path / "old"), 3 * PAGE)
        assert published(files, tmp_path / "new one", 2) != inode
        assert reader.read() == bytes([1]) * 3 * PAGE
    assert left_in(tmp_path) == []


def test_a_file_that_is_linked_elsewhere_is_not_overwritten(files: UnpublishedFiles, tmp_path: Path) -> None:
    """A backup may consist of such links."""
    published(files, tmp_path / "old", 1)
    os.link(tmp_path / "old", tmp_path / "backup")
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    published(files, tmp_path / "new one", 2)
    assert (tmp_path / "backup").read_bytes() == bytes([1]) * 3 * PAGE


def test_a_file_of_another_size_makes_room_for_a_new_one(files: UnpublishedFiles, tmp_path: Path) -> None:
    published(files, tmp_path / "old", 1)
    files.take_over(str(tmp_path / "old"), 3 * PAGE)
    published(files, tmp_path / "new one", 2, 2 * PAGE)
    assert (tmp_path / "new one").stat().st_size == 2 * PAGE
    assert left_in(tmp_path) == []


def test_the_one_of_the_right_size_is_chosen(files: UnpublishedFiles, tmp_path: Path) -> None:
    inodes = [published(files, tmp_path / str(pages), pages, pages * PAGE) for pages in (1, 2, 3)]
    for pages in (1, 2, 3):
        files.take_over(str(tmp_path / str(pages)), pages * PAGE)
    assert published(files, tmp_path / "new one", 4, 2 * PAGE) == inodes[1]
    assert len(left_in(tmp_path)) == 2


def test_files_are_kept_up_to_a_bound(files: UnpublishedFiles, tmp_path: Path) -> None:
    """The oldest go first; one is kept however large it is."""
    for i in range(4):
        published(files, tmp_path / str(i), i)
    published(files, tmp_path / "large", 5, 20 * PAGE)
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
    assert published(files, tmp_path / "new one", 1) > 0


def test_a_full_cache_makes_no_files(tmp_path: Path) -> None:
    """Every object that is written lies in the file of one that was evicted, and is what was put."""
    block_bytes, num_blocks = 8000, 16
    on_disk = disk_bytes(block_bytes + 136)
    cache = tmp_path / "cache"
    with opened(raw_options(cache, num_blocks * on_disk)) as backend:
        keys = [key_of(i) for i in range(3 * num_blocks)]
        for key in keys[: num_blocks + 1]:
            put(backend, [key], block_bytes)

        def inodes() -> set[int]:
            return {
                file.stat().st_ino
                for file in cache.rglob("*/*")
                if len(file.parts) > len(cache.parts) + 2 and file.is_file()
            }

        before = inodes()
        for key in keys[num_blocks + 1 :]:
            assert put(backend, [key], block_bytes) == [Status.OK]
            assert inodes() == before
        latest = keys[-num_blocks:]
        assert set(files_in(cache)) == set(latest)
        assert check_got(backend, latest, block_bytes) == [Status.OK] * num_blocks
