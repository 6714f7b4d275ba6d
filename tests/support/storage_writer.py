"""Processes that use one directory of the file backend, or host memory, until they are killed."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from swiftkv.storage.backend import Status
from swiftkv.storage.host_medium import HostMedium
from tests.support.storage import block_of, check_got, key_of, opened, soon

NUM_KEYS = 200
SIZES = (100, 4000, 20_000, 70_000)
"""The sizes of blocks, in bytes; `size_of` says which one a key has."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def size_of(number: int) -> int:
    """Return the length of block `number`."""
    return SIZES[number % len(SIZES)]


def raw_options(directory: Path, size: int | str, **options: object) -> dict[str, object]:
    """Return the options of a file backend with a small bound."""
    return {"backend": "file", "path": str(directory), "size": size, "min_free": 0} | options


def start(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Start a process."""
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def event() -> Event:
    """Return an event that processes share."""
    return _CONTEXT.Event()


def write_for_ever(raw: dict[str, object], seed: int, has_begun: Event) -> None:
    """Put, get and drop blocks at random, and check the bytes of each get. Ends if they are wrong."""
    rng = random.Random(seed)
    with opened(raw) as backend:
        has_begun.set()
        for _ in itertools.count():
            numbers = rng.sample(range(NUM_KEYS), rng.randint(1, 12))
            sources = [memoryview(block_of(key_of(n), size_of(n))) for n in numbers]
            statuses = backend.put([key_of(n) for n in numbers], sources, soon())
            assert set(statuses) <= {Status.OK, Status.LATE}, statuses
            number = rng.randrange(NUM_KEYS)
            (status,) = check_got(backend, [key_of(number)], size_of(number))
            assert status in (Status.OK, Status.MISSING), status


def write_some(raw: dict[str, object], seed: int, rounds: int, has_begun: Event) -> None:
    """Put and get blocks at random for `rounds` rounds; exits with 0 if nothing was wrong."""
    rng = random.Random(seed)
    with opened(raw) as backend:
        has_begun.set()
        for _ in range(rounds):
            numbers = rng.sample(range(NUM_KEYS), 6)
            sources = [memoryview(block_of(key_of(n), size_of(n))) for n in numbers]
            statuses = backend.put([key_of(n) for n in numbers], sources, soon())
            assert set(statuses) <= {Status.OK, Status.LATE}, statuses
            for n in numbers:
                (status,) = check_got(backend, [key_of(n)], size_of(n))
                assert status in (Status.OK, Status.MISSING), status


def put_beyond_a_limit(raw: dict[str, object], limit_bytes: int) -> None:
    """Put blocks where no file can be larger than a limit; exits with 0 if the larger ones are left out."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with opened(raw) as backend:
        sources = [memoryview(block_of(key_of(n), n)) for n in (100, limit_bytes + 1)]
        statuses = backend.put([key_of(100), key_of(limit_bytes + 1)], sources, soon())
        assert statuses == [Status.OK, Status.MISSING], statuses
        assert not backend.is_degraded


def die_in_a_write(raw: dict[str, object], key: bytes, num_bytes: int, member: int) -> None:
    """Write to host memory from a file that has no bytes any more, which ends the process while it copies them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fd = os.open(str(raw["file"]), os.O_RDWR)
    medium = HostMedium.of(fd, member)
    medium.release_member(member, soon())
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        source = memoryview(mmap.mmap(file.fileno(), num_bytes))
        file.truncate(0)
        medium.write([key], [(memoryview(b""), source)], soon())


def stop_with_the_lock(process: ForkServerProcess, medium: HostMedium) -> None:
    """Stop a process that holds the lock of host memory again and again at a moment when it does."""
    assert process.pid is not None
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            medium.exists([key_of(0)], time.monotonic() + 0.05)
        except TimeoutError:
            return
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.001)


def stop_in_a_write(process: ForkServerProcess, medium: HostMedium) -> None:
    """Stop a process that writes one object again and again at a moment when it has taken chunks, and not the lock."""
    assert process.pid is not None
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            pass
        with suppress(TimeoutError):
            usage = medium.usage()
            if usage.num_bytes > 0 and usage.objects == 0:
                return
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.001)


def kill_after(process: ForkServerProcess, seconds: float) -> None:
    """Kill a process after `seconds`; it must not have ended by itself."""
    process.join(timeout=seconds)
    assert process.exitcode is None, f"the writer ended with {process.exitcode}"
    process.kill()
    process.join()


def files_in(directory: Path) -> dict[bytes, int]:
    """Return the keys and sizes of the objects in a cache directory."""
    found = {}
    for shard in (directory / "objects").iterdir():
        for file in shard.iterdir():
            with suppress(FileNotFoundError):
                found[bytes.fromhex(file.name)] = file.stat().st_size
    return found


def wait_for(happened: Event) -> None:
    """Wait for an event that another process sets."""
    assert happened.wait(60.0)
