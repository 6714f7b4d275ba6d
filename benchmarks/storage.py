"""Time storage backends beside plain programs that move the same bytes at the same depth and state of the cache:

    python benchmarks/storage.py file --directory /somewhere/on/a/disk
    python benchmarks/storage.py full --directory /somewhere/on/a/disk
    python benchmarks/storage.py redis --url unix:///run/redis.sock
    python benchmarks/storage.py mooncake --url 127.0.0.1:50051
    python benchmarks/storage.py opening --directory /somewhere/on/a/disk

The plain program opens a file, writes or reads with one vector, and closes it; for Redis it sends the same commands in
pipelines of as many bytes; for Mooncake it makes the store's own zero-copy calls, in batches of as many bytes, from and
to registered memory, as ours are. It has no checksums, names or index, and a bound only in *full*. The two run in turn;
a ratio is ours over plain within a round, and the median of the rounds is printed. Cold: the kernel was told to forget
the files (`POSIX_FADV_DONTNEED`). Full: the directory is at its bound, so old objects are evicted; the plain program
removes its oldest file for each that it makes. On a machine that others use, `--processor-time` counts the processor
time of this process instead: how much work a call is, not how long it waits for a disk or a server.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from swiftkv.storage.backend import Status, StorageBackend
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage

FINGERPRINT = bytes(16)
BATCH_BYTES = 8 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


@dataclass
class Case:
    """One size of blocks, as many as make up the bytes of a round, with a buffer for each."""

    block_bytes: int
    num_blocks: int
    clock: Callable[[], float]
    memory: memoryview = field(init=False)
    sources: list[memoryview] = field(init=False)
    into: list[memoryview] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = memoryview(bytearray(secrets.token_bytes(self.num_bytes)) + bytearray(self.num_bytes))
        blocks = [self.memory[i * self.block_bytes :][: self.block_bytes] for i in range(2 * self.num_blocks)]
        self.sources, self.into = blocks[: self.num_blocks], blocks[self.num_blocks :]

    def keys(self) -> list[bytes]:
        """Return keys that were never used before."""
        return [secrets.token_bytes(32) for _ in range(self.num_blocks)]

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def batches(self, depth: int) -> list[range]:
        """Return the blocks in runs of at most `BATCH_BYTES`, at least one run for each thread."""
        length = max(1, min(BATCH_BYTES // self.block_bytes, -(-self.num_blocks // depth)))
        return [range(i, min(i + length, self.num_blocks)) for i in range(0, self.num_blocks, length)]


def cases_of(
    sizes: Sequence[int], depths: Sequence[int], round_bytes: int, clock: Callable[[], float]
) -> Iterator[tuple[Case, int]]:
    """Yield each size of blocks, as many as make up a round, with each number of threads."""
    for block_bytes in sizes:
        case = Case(block_bytes, round_bytes // block_bytes, clock)
        for depth in depths:
            yield case, depth


class Plain:
    """Plain files of a directory, with a bound on their number, if any."""

    def __init__(self, directory: Path, max_files: int | None = None) -> None:
        self.directory = directory
        self.max_files = max_files
        self.files: deque[str] = deque()
        directory.mkdir()

    def path(self, key: bytes) -> str:
        return f"{self.directory}/{key.hex()}"

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        for key, source in zip(keys, sources, strict=True):
            path = self.path(key)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            assert os.pwrite(fd, source, 0) == len(source)
            os.close(fd)
            if self.max_files is None:
                continue
            self.files.append(path)
            if len(self.files) > self.max_files:
                os.unlink(self.files.popleft())

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, into, strict=True):
            fd = os.open(self.path(key), os.O_RDONLY)
            assert os.preadv(fd, [buffer], 0) == len(buffer)
            os.close(fd)


class PlainRedis:
    """Pipelines of plain commands."""

    def __init__(self, url: str, depth: int) -> None:
        from redis import Redis

        self.client = Redis.from_url(url, max_connections=depth)

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for key, source in zip(keys, sources, strict=True):
                pipeline.set(key, source, px=3_600_000)
            assert all(pipeline.execute())

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.get(key)
            for buffer, value in zip(into, pipeline.execute(), strict=True):
                buffer[:] = value


class PlainMooncake:
    """The zero-copy calls of Mooncake's own client."""

    def __init__(self, address: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.client = MooncakeDistributedStore()
        assert self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0

    def register(self, memory: memoryview) -> None:
        assert self.client.register_buffer(address_of(memory), len(memory)) == 0

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        names, places, sizes = [key.hex() for key in keys], list(map(address_of, sources)), list(map(len, sources))
        assert not any(self.client.batch_put_from(names, places, sizes))

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        names, places, sizes = [key.hex() for key in keys], list(map(address_of, into)), list(map(len, into))
        assert self.client.batch_get_into(names, places, sizes) == sizes


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class Ours:
    """A backend all of whose calls must succeed."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend

    def put(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        assert set(self.backend.put(keys, sources, time.monotonic() + 600)) == {Status.OK}

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        assert set(self.backend.get(keys, into, time.monotonic() + 600)) == {Status.OK}


def timed(case: Case, depth: int, move: Callable[[range], None]) -> float:
    """Return the bytes per second at which `depth` threads do all batches."""
    batches = case.batches(depth)
    with ThreadPoolExecutor(depth) as pool:
        begin_s = case.clock()
        list(pool.map(move, batches))
        return case.num_bytes / (case.clock() - begin_s)


Side = Ours | Plain | PlainRedis | PlainMooncake


def put_rate(side: Side, case: Case, depth: int, keys: Sequence[bytes]) -> float:
    """Put blocks under these keys; return bytes per second."""
    return timed(case, depth, lambda r: side.put(keys[r.start : r.stop], case.sources[r.start : r.stop]))


def measure(side: Side, case: Case, depth: int, directory: Path | None) -> list[float]:
    """Put new blocks, get them, and get them again after the kernel forgot them; return bytes per second of each."""
    keys = case.keys()
    rates = [put_rate(side, case, depth, keys)]

    def get(run: range) -> None:
        side.get(keys[run.start : run.stop], case.into[run.start : run.stop])

    rates.append(timed(case, depth, get))
    if directory is not None:
        forget_files(directory)
        rates.append(timed(case, depth, get))
    assert case.into[-1] == case.sources[-1]
    return rates


def forget_files(directory: Path) -> None:
    """Write everything to the disk, and have the kernel drop it from memory."""
    os.sync()
    for file in directory.rglob("*"):
        if file.is_file() and not file.name.startswith("index"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def report(block_bytes: int, depth: int, ours: list[list[float]], plain: list[list[float]]) -> None:
    """Print one row for each kind of call."""
    kinds = zip(zip(*ours, strict=True), zip(*plain, strict=True), strict=True)
    for kind, (mine, theirs) in zip(("put", "get warm", "get cold"), kinds, strict=False):
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        rates = " | ".join(f"{statistics.median(rates) / 1e9:.2f}" for rates in (mine, theirs))
        print(f"| {block_bytes >> 10} KiB | {depth} | {kind} | {rates} | {ratio:.2f} |", flush=True)


def compare_files(directory: Path, cases: Iterable[tuple[Case, int]], rounds: int) -> None:
    """Measure the file backend. Files stay until the end, because ext4 is slow to make files after removing some."""
    with tempfile.TemporaryDirectory(prefix="swiftkv-bench-", dir=directory) as parent:
        for case, depth in cases:
            ours, plain = [], []
            for number in range(rounds):
                cache = Path(parent) / f"cache-{case.block_bytes}-{depth}-{number}"
                backend = open_files(cache, 4 * case.num_bytes)
                files = Plain(cache.with_name(cache.name.replace("cache", "plain")))
                ours.append(measure(Ours(backend), case, depth, cache))
                plain.append(measure(files, case, depth, files.directory))
                backend.close()
            report(case.block_bytes, depth, ours, plain)


def compare_full(directory: Path, cases: Iterable[tuple[Case, int]], rounds: int) -> None:
    """Measure writing into a directory that is full."""
    with tempfile.TemporaryDirectory(prefix="swiftkv-bench-", dir=directory) as parent:
        for case, depth in cases:
            cache = Path(parent) / f"cache-{case.block_bytes}-{depth}"
            backend = open_files(cache, case.num_bytes)
            ours, plain = Ours(backend), Plain(cache.with_name(cache.name.replace("cache", "plain")), case.num_blocks)
            # The first round fills both directories; in the second they evict for the first time.
            rates = [[[put_rate(side, case, depth, case.keys())] for side in (ours, plain)] for _ in range(rounds + 2)]
            backend.close()
            mine, theirs = (list(of_side) for of_side in zip(*rates[2:], strict=True))
            report(case.block_bytes, depth, mine, theirs)


def open_files(cache: Path, size_bytes: int) -> StorageBackend:
    raw = {"path": str(cache), "size": size_bytes, "min_free": 0}
    return open_backend(parse_storage(raw, "file", cache.parent), FINGERPRINT)


def compare_redis(url: str, cases: Iterable[tuple[Case, int]], rounds: int) -> None:
    """Measure the Redis backend."""
    for case, depth in cases:
        raw = {"backend": "redis", "url": url, "timeout": "60s", "max_calls": depth}
        backend = open_backend(parse_storage(raw, "redis", Path.cwd()), FINGERPRINT)
        plain = PlainRedis(url, depth)
        results = [
            (measure(Ours(backend), case, depth, None), measure(plain, case, depth, None)) for _ in range(rounds)
        ]
        backend.close()
        report(case.block_bytes, depth, [ours for ours, _ in results], [theirs for _, theirs in results])


def compare_mooncake(address: str, cases: Iterable[tuple[Case, int]], rounds: int) -> None:
    """Measure the Mooncake backend, whose store must have room for two rounds."""
    for case, depth in cases:
        raw = {"backend": "mooncake", "master_server_address": address, "timeout": "60s", "max_calls": depth}
        backend = open_backend(parse_storage(raw, "mooncake", Path.cwd()), FINGERPRINT)
        plain = PlainMooncake(address)
        assert backend.capabilities.register is not None
        for register in (backend.capabilities.register, plain.register):
            register(case.memory)
        results = [
            (measure(Ours(backend), case, depth, None), measure(plain, case, depth, None)) for _ in range(rounds)
        ]
        backend.close()
        plain.client.close()
        report(case.block_bytes, depth, [ours for ours, _ in results], [theirs for _, theirs in results])


def share_of_checksums(directory: Path, sizes: Sequence[int], round_bytes: int, clock: Callable[[], float]) -> None:
    """Print the checksums' part of the time of a plain load with its checksums, computed right after each read."""
    for block_bytes in sizes:
        case = Case(block_bytes, round_bytes // block_bytes, clock)
        with tempfile.TemporaryDirectory(prefix="swiftkv-bench-", dir=directory) as parent:
            files, keys = Plain(Path(parent) / "plain"), case.keys()
            files.put(keys, case.sources)
            shares = []
            for is_cold in (False, True):
                if is_cold:
                    forget_files(files.directory)
                read_s = hash_s = 0.0
                for key, buffer in zip(keys, case.into, strict=True):
                    begin_s = clock()
                    files.get([key], [buffer])
                    read_at_s = clock()
                    xxhash.xxh3_64_intdigest(buffer)
                    hash_s += clock() - read_at_s
                    read_s += read_at_s - begin_s
                shares.append(hash_s / (read_s + hash_s))
            rate = case.num_bytes / hash_s / 1e9
            print(f"| {block_bytes >> 10} KiB | {shares[0]:.1%} | {shares[1]:.1%} | {rate:.1f} |", flush=True)


def time_opening(directory: Path, num_blocks: int, clock: Callable[[], float]) -> None:
    """Print how long it takes to open a directory of `num_blocks` blocks, with its index and without one."""
    with tempfile.TemporaryDirectory(prefix="swiftkv-bench-", dir=directory) as parent:
        cache = Path(parent) / "cache"
        options = parse_storage({"path": str(cache), "size": "1TiB", "min_free": 0}, "file", directory)

        def opened() -> tuple[StorageBackend, float]:
            begin_s = clock()
            backend = open_backend(options, FINGERPRINT)
            return backend, clock() - begin_s

        backend, _ = opened()
        block = memoryview(bytes(1000))
        for begin in range(0, num_blocks, 1000):
            keys = [secrets.token_bytes(32) for _ in range(min(1000, num_blocks - begin))]
            Ours(backend).put(keys, [block] * len(keys))
        backend.close()
        for kind in ("with its index", "without an index"):
            times_s = []
            for _ in range(5):
                if kind == "without an index":
                    for file in cache.glob("index*"):
                        file.unlink()
                backend, taken_s = opened()
                backend.close()
                times_s.append(taken_s)
            print(f"{num_blocks:,} blocks, {kind}: {statistics.median(times_s):.2f} s ({max(times_s):.2f} at most)")
        shutil.rmtree(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["file", "full", "redis", "mooncake", "checksums", "opening"])
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to measure"
    )
    parser.add_argument("--url", default="redis://127.0.0.1:6379/0", help="address of Redis, or of Mooncake's master")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 4], metavar="THREADS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="MiB that each round moves")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the directory, for opening")
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.processor_time else time.perf_counter
    round_bytes = arguments.mib << 20
    if arguments.what == "opening":
        time_opening(arguments.directory, arguments.blocks, clock)
        return
    if arguments.what == "checksums":
        print("| block | of a warm load | of a cold load | GB/s |\n| ---: | ---: | ---: | ---: |")
        share_of_checksums(arguments.directory, arguments.sizes, round_bytes, clock)
        return
    print("| block | threads | call | ours, GB/s | plain, GB/s | ratio |\n| ---: | ---: | --- | ---: | ---: | ---: |")
    cases = cases_of(arguments.sizes, arguments.depth, round_bytes, clock)
    if arguments.what == "file":
        compare_files(arguments.directory, cases, arguments.rounds)
    elif arguments.what == "full":
        compare_full(arguments.directory, cases, arguments.rounds)
    elif arguments.what == "mooncake":
        compare_mooncake(arguments.url, cases, arguments.rounds)
    else:
        compare_redis(arguments.url, cases, arguments.rounds)


if __name__ == "__main__":
    main()
