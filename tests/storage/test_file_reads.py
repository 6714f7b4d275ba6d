"""Files that two threads read: bytes, errors, order and what is left afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from swiftkv._files import FileReads

HEADER_BYTES = 128
SHARED_BYTES = 4 << 20
"""More than one thread reads alone."""

Buffers = tuple[memoryview, memoryview]


def buffers(block_bytes: int, header_bytes: int = HEADER_BYTES) -> Buffers:
    return memoryview(bytearray(header_bytes)), memoryview(bytearray(block_bytes))


def write(path: Path, num_bytes: int, seed: int) -> bytes:
    content = random.Random(seed).randbytes(num_bytes)
    path.write_bytes(content)
    return content


def begin(paths: Sequence[Path], into: Sequence[Buffers], num_more: int = 1) -> contextlib.closing[FileReads]:
    return contextlib.closing(FileReads([str(path) for path in paths], into, [num_more] * len(paths)))


def forget(paths: Sequence[Path]) -> None:
    """Have the kernel drop the files from its page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("block_bytes", [1, 4096 - HEADER_BYTES, 100_000, SHARED_BYTES // 4])
def test_the_bytes_of_all_files_come(tmp_path: Path, block_bytes: int, is_cached: bool) -> None:
    paths = [tmp_path / str(i) for i in range(30)]
    contents = [write(path, HEADER_BYTES + block_bytes, seed) for seed, path in enumerate(paths)]
    if not is_cached:
        forget(paths)
    into = [buffers(block_bytes) for _ in paths]
    with begin(paths, into) as reads:
        for i, (content, (header, block)) in enumerate(zip(contents, into, strict=True)):
            assert reads.wait(i) == len(content)
            assert (bytes(header), bytes(block)) == (content[:HEADER_BYTES], content[HEADER_BYTES:])


@pytest.mark.parametrize("seed", range(30))
def test_files_of_any_length_may_be_waited_for_in_any_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    paths = [tmp_path / str(i) for i in range(rng.randrange(1, 60))]
    sizes = [rng.choice([0, 1, 127, 128, 129, 5000, 300_000]) for _ in paths]
    contents = [write(path, size, seed) for path, size in zip(paths, sizes, strict=True)]
    forget([path for path in paths if rng.random() < 0.3])
    into = [buffers(rng.choice([1, 4000, 200_000]), rng.choice([1, 128])) for _ in paths]
    num_more = rng.choice([0, 1, 4096])
    with begin(paths, into, num_more) as reads:
        for i in rng.sample(range(len(paths)), rng.randrange(len(paths) + 1)):
            header, block = into[i]
            assert reads.wait(i) == min(sizes[i], len(header) + len(block) + num_more)
            kept = contents[i][: len(header) + len(block)]
            assert (bytes(header) + bytes(block))[: len(kept)] == kept
            assert reads.wait(i) >= 0, "it may be asked again"


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    content = write(path, HEADER_BYTES + 1, 0)
    with begin([path], [buffers(1)]) as reads:
        assert reads.wait(0) == len(content)


def test_files_that_cannot_be_read_give_errors_and_others_their_bytes(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    content = write(first, HEADER_BYTES + SHARED_BYTES, 0)
    write(last, HEADER_BYTES + SHARED_BYTES, 0)
    (tmp_path / "link").symlink_to(first)
    paths = [first, tmp_path / "missing", tmp_path, tmp_path / "link", last]
    into = [buffers(SHARED_BYTES) for _ in paths]
    with begin(paths, into) as reads:
        told = [reads.wait(i) for i in range(len(paths))]
    assert told == [len(content), -errno.ENOENT, -errno.EISDIR, -errno.ELOOP, len(content)]
    assert all(bytes(header) + bytes(block) == content for header, block in (into[0], into[-1]))


def test_closed_reads_leave_memory_files_and_threads_alone(tmp_path: Path) -> None:
    """Seconds of reading are left, of one file into one buffer."""
    path, num_reads = tmp_path / "file", 100_000
    write(path, HEADER_BYTES + SHARED_BYTES // 8, 0)
    into = [buffers(SHARED_BYTES // 8)]
    fds, threads = len(os.listdir("/proc/self/fd")), num_threads()
    with begin(num_reads * [path], num_reads * into) as reads:
        reads.wait(3)
    assert reads.wait(num_reads - 1) == -errno.ECANCELED
    assert len(os.listdir("/proc/self/fd")) == fds
    assert num_threads() == threads
    for _, block in into:
        block[:] = bytes(len(block))
    assert not any(any(block) for _, block in into)


def test_reads_that_are_not_closed_end_with_their_object(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(16)]
    for path in paths:
        write(path, HEADER_BYTES + SHARED_BYTES // 8, 0)
    threads = num_threads()
    reads = FileReads([str(path) for path in paths], [buffers(SHARED_BYTES // 8) for _ in paths], [1] * len(paths))
    assert reads.wait(0) > 0
    del reads
    assert num_threads() == threads


def test_nothing_is_read_of_no_files() -> None:
    with begin([], []) as reads, pytest.raises(IndexError):
        reads.wait(0)


def test_mistakes_are_told(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    with pytest.raises(ValueError, match="one for each path"):
        FileReads([path], [], [1])
    with pytest.raises(ValueError, match="one for each path"):
        FileReads([path], [buffers(1)], [])
    with pytest.raises(BufferError):
        FileReads([path], [(memoryview(bytes(1)), memoryview(bytes(1)))], [1])
