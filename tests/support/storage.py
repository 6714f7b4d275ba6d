"""Blocks with known bytes, media to keep them, and helpers for tests of storage backends."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from swiftkv.storage.backend import KEY_BYTES, Capabilities, Parts, Status, StorageBackend, Usage
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.host_medium import HostMedium, make_host_memory
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage

FINGERPRINT = b"weights-of-tests"
BLOCK_BYTES = 5000
"""A size that is not a whole number of pages or sectors."""
TIMEOUT_S = 60.0
"""A time that nothing here should take."""


def key_of(number: int) -> bytes:
    """Return the key of block `number`."""
    return hashlib.sha256(b"key %d" % number).digest()


def block_of(key: bytes, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes that belong to a key, and to no other."""
    return hashlib.shake_128(key).digest(num_bytes)


def soon() -> float:
    """Return a deadline that nothing here should reach."""
    return time.monotonic() + TIMEOUT_S


def put(backend: StorageBackend, keys: Sequence[bytes], num_bytes: int = BLOCK_BYTES) -> list[Status]:
    """Put the blocks of these keys."""
    return backend.put(keys, [memoryview(block_of(key, num_bytes)) for key in keys], soon())


def get(
    backend: StorageBackend, keys: Sequence[bytes], num_bytes: int = BLOCK_BYTES
) -> tuple[list[Status], list[bytes]]:
    """Get blocks into buffers with other contents, and return the statuses and the buffers."""
    into = [bytearray(b"\xa5" * num_bytes) for _ in keys]
    statuses = backend.get(keys, [memoryview(buffer) for buffer in into], soon())
    return statuses, [bytes(buffer) for buffer in into]


def check_got(backend: StorageBackend, keys: Sequence[bytes], num_bytes: int = BLOCK_BYTES) -> list[Status]:
    """Get blocks, check the bytes of those that are OK, and return the statuses."""
    statuses, blocks = get(backend, keys, num_bytes)
    for key, status, block in zip(keys, statuses, blocks, strict=True):
        assert status is not Status.OK or block == block_of(key, num_bytes)
    return statuses


def open_host(file: str, fingerprint: bytes = FINGERPRINT) -> SealedBackend:
    """Attach to host memory as an engine does."""
    fd = os.open(file, os.O_RDWR)
    try:
        return SealedBackend(GuardedMedium(HostMedium.of(fd), Breaker()), fingerprint)
    finally:
        os.close(fd)


@contextmanager
def host_memory(num_bytes: int, chunk_bytes: int) -> Iterator[dict[str, object]]:
    """Make host memory; yield the options by which this process and its children open it."""
    fd = make_host_memory(num_bytes, chunk_bytes)
    try:
        yield {"backend": "host", "file": f"/proc/{os.getpid()}/fd/{fd}"}
    finally:
        os.close(fd)


@contextmanager
def opened(raw: dict[str, object], fingerprint: bytes = FINGERPRINT) -> Iterator[StorageBackend]:
    """Open a backend by its options, or host memory by its `file`, and close it."""
    backend: StorageBackend
    if raw["backend"] == "host":
        backend = open_host(str(raw["file"]), fingerprint)
    else:
        backend = open_backend(parse_storage(raw, "storage", Path.cwd()), fingerprint)
    try:
        yield backend
    finally:
        backend.close()


class Owner:
    """The part of an engine that other threads wake."""

    def __init__(self) -> None:
        self._woken = threading.Condition()
        self.count = 0

    def wake(self) -> None:
        with self._woken:
            self.count += 1
            self._woken.notify_all()

    def wait_for_more(self, count: int) -> int:
        with self._woken:
            assert self._woken.wait_for(lambda: self.count > count, TIMEOUT_S)
            return self.count

    def until(self, holds: Callable[[], bool], take_over: Callable[[], object]) -> None:
        """Call `take_over` whenever another thread has done something, until this holds."""
        while True:
            count = self.count
            take_over()
            if holds():
                return
            self.wait_for_more(count)


class MemoryMedium:
    """A medium as a user might write one: a dictionary, shared by all media of the same name."""

    shared: ClassVar[dict[str, dict[bytes, bytes]]] = {}

    def __init__(self, name: str = "") -> None:
        self.objects = self.shared.setdefault(name, {})
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=False, is_shared=False, max_calls=4)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        return [key in self.objects for key in keys]

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        return [
            Status.LATE if time.monotonic() > deadline_s else self._read(key, *parts)
            for key, parts in zip(keys, into, strict=True)
        ]

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        if time.monotonic() > deadline_s:
            return [Status.LATE] * len(keys)
        with self._lock:
            for key, parts in zip(keys, sources, strict=True):
                self.objects.setdefault(key, b"".join(parts))
        return [Status.OK] * len(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self.objects), sum(map(len, self.objects.values())), None)

    def close(self) -> None:
        pass

    def _read(self, key: bytes, header: memoryview, block: memoryview) -> Status:
        found = self.objects.get(key)
        if found is None:
            return Status.MISSING
        if len(found) != len(header) + len(block):
            return Status.CORRUPT
        header[:], block[:] = found[: len(header)], found[len(header) :]
        return Status.OK


class Clock:
    """A clock that only the test advances; it can also replace the module `time`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class GatedMedium(MemoryMedium):
    """A medium that notes the keys of its reads, and answers only as many calls as the test permits."""

    def __init__(self) -> None:
        super().__init__(name=str(id(self)))
        self.asked: list[bytes] = []
        self.is_asked = threading.Event()
        self._may_answer = threading.Semaphore(0)

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.asked += keys
        self.wait()
        return super().read(keys, into, deadline_s)

    def wait(self) -> None:
        """Announce a call, and wait until it may be answered."""
        self.is_asked.set()
        assert self._may_answer.acquire(timeout=TIMEOUT_S)

    def let_answer(self, num_calls: int = 1000) -> None:
        """Permit `num_calls` answers, to waiting and later calls."""
        self._may_answer.release(num_calls)


class StuckMedium(MemoryMedium):
    """A medium whose reads do not return while a test holds them, not even when the medium is closed."""

    is_asked: ClassVar[threading.Event] = threading.Event()
    may_read: ClassVar[threading.Event] = threading.Event()

    @classmethod
    @contextmanager
    def stuck(cls) -> Iterator[None]:
        """Hold reads until the end of the block."""
        cls.is_asked.clear()
        cls.may_read.clear()
        try:
            yield
        finally:
            cls.may_read.set()

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.is_asked.set()
        assert self.may_read.wait(2 * TIMEOUT_S)
        return super().read(keys, into, deadline_s)


StuckMedium.may_read.set()


def dynamic_options(medium: type[MemoryMedium], **options: str) -> dict[str, object]:
    """Return the options of a backend `dynamic` that opens a medium of these tests."""
    names = {"module_path": medium.__module__, "class_name": medium.__name__}
    return {"backend": "dynamic", **names, "options": options}


assert len(key_of(0)) == KEY_BYTES
