"""Promises that every backend keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv.storage.backend import Status, StorageBackend
from tests.support.mooncake_store import mooncake_store
from tests.support.redis_server import redis_server
from tests.support.storage import (
    BLOCK_BYTES,
    MemoryMedium,
    block_of,
    check_got,
    dynamic_options,
    get,
    host_memory,
    key_of,
    opened,
    put,
    soon,
)

KEYS = [key_of(i) for i in range(300)]


MOONCAKE = pytest.param("mooncake", marks=pytest.mark.slow)  # its client takes a second to leave the store


@pytest.fixture(params=["file", "file fsync", "fault", "redis", MOONCAKE, "dynamic", "dynamic_sglang", "host"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, object]]:
    """Options of each backend, on a medium of this test's own."""
    file = {"backend": "file", "path": str(tmp_path / "cache"), "size": "16MiB", "min_free": 0}
    match request.param:
        case "file":
            yield file
        case "file fsync":
            yield file | {"fsync": "batch"}
        case "fault":
            yield {"backend": "fault", "inner": file}
        case "redis":
            with redis_server() as server:
                yield {"backend": "redis", "url": server.url, "timeout": "10s"}
        case "mooncake":
            with mooncake_store() as store:
                yield {"backend": "mooncake", "master_server_address": store.address, "timeout": "10s"}
        case "host":
            with host_memory(16 << 20, 2048) as memory:
                yield memory
        case "dynamic":
            yield dynamic_options(MemoryMedium, name=str(tmp_path))
        case "dynamic_sglang":
            yield {
                "backend": "dynamic_sglang",
                "module_path": "tests.support.sglang_backends",
                "class_name": "DirectoryStorage",
                "extra_config": {"directory": str(tmp_path / "pages")},
            }


@pytest.fixture
def backend(raw: dict[str, object]) -> Iterator[StorageBackend]:
    with opened(raw) as backend:
        yield backend


def test_what_was_put_is_got(backend: StorageBackend) -> None:
    assert put(backend, KEYS) == [Status.OK] * len(KEYS)
    statuses, blocks = get(backend, KEYS)
    assert statuses == [Status.OK] * len(KEYS)
    assert blocks == [block_of(key) for key in KEYS]


def test_existence_is_said_key_by_key(backend: StorageBackend) -> None:
    put(backend, KEYS[0:6:2])
    assert backend.exists(KEYS[:6], soon()) == [True, False] * 3
    assert check_got(backend, KEYS[:6]) == [Status.OK, Status.MISSING] * 3


def test_blocks_of_different_length_go_together(backend: StorageBackend) -> None:
    """The groups of a model have blocks of their own size."""
    lengths = [1, 4096, 65_536 + 3]
    sources = [memoryview(block_of(key, n)) for key, n in zip(KEYS, lengths, strict=False)]
    assert backend.put(KEYS[:3], sources, soon()) == [Status.OK] * 3
    into = [memoryview(bytearray(n)) for n in lengths]
    assert backend.get(KEYS[:3], into, soon()) == [Status.OK] * 3
    assert into == sources


def test_putting_again_is_ok_and_changes_nothing(backend: StorageBackend) -> None:
    assert put(backend, KEYS[:4]) == put(backend, KEYS[:4]) == [Status.OK] * 4
    assert check_got(backend, KEYS[:4]) == [Status.OK] * 4


def test_no_keys_are_no_work(backend: StorageBackend) -> None:
    assert backend.exists([], soon()) == backend.get([], [], soon()) == backend.put([], [], soon()) == []


def test_a_block_of_other_weights_is_missing(raw: dict[str, object], backend: StorageBackend) -> None:
    """It stays there, for those whose block it is."""
    put(backend, KEYS[:2])
    with opened(raw, b"other weights...") as other:
        assert check_got(other, KEYS[:2]) == [Status.MISSING] * 2
    assert check_got(backend, KEYS[:2]) == [Status.OK] * 2


@pytest.mark.parametrize("num_bytes", [BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_block_of_another_length_is_no_block(raw: dict[str, object], backend: StorageBackend, num_bytes: int) -> None:
    put(backend, KEYS[:2])
    (first, _), _ = get(backend, KEYS[:2], num_bytes)
    if raw["backend"] == "dynamic_sglang":
        assert first is Status.FAILED  # the backend raises, and it has no way to say why
        return
    assert first is Status.CORRUPT
    assert backend.exists(KEYS[:2], soon()) == [False, False]


def test_what_was_dropped_can_be_put_again(raw: dict[str, object], backend: StorageBackend) -> None:
    put(backend, KEYS[:1])
    get(backend, KEYS[:1], BLOCK_BYTES + 1)
    if raw["backend"] == "dynamic_sglang":
        pytest.skip("a backend for SGLang never overwrites")
    assert put(backend, KEYS[:1]) == [Status.OK]
    assert check_got(backend, KEYS[:1]) == [Status.OK]


def test_nothing_begins_after_the_deadline(backend: StorageBackend) -> None:
    put(backend, KEYS[:2])
    late = time.monotonic() - 1.0
    into = [memoryview(bytearray(BLOCK_BYTES))]
    assert backend.get(KEYS[:1], into, late) == [Status.LATE]
    assert backend.put(KEYS[6:7], into, late) == [Status.LATE]
    assert backend.exists(KEYS[6:7], soon()) == [False]
    assert not backend.is_degraded


def test_many_threads_at_once(backend: StorageBackend) -> None:
    """More of them than calls run at once, on the same keys."""
    mistakes: list[object] = []

    def work(first: int) -> None:
        keys = KEYS[first : first + 40]
        for _ in range(3):
            mistakes.extend(status for status in put(backend, keys) if status is not Status.OK)
            mistakes.extend(status for status in check_got(backend, keys) if status is not Status.OK)

    threads = [threading.Thread(target=work, args=(20 * i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mistakes == []


def test_durable_objects_outlive_the_backend(raw: dict[str, object]) -> None:
    with opened(raw) as first:
        put(first, KEYS[:5])
        is_durable = first.capabilities.is_durable
    with opened(raw) as second:
        if is_durable:
            assert check_got(second, KEYS[:6]) == [Status.OK] * 5 + [Status.MISSING]


def test_usage_counts_what_is_there(raw: dict[str, object], backend: StorageBackend) -> None:
    put(backend, KEYS[:10])
    usage = backend.usage()
    if raw["backend"] in ("dynamic_sglang", "mooncake"):
        assert usage is None  # they do not say
        return
    assert usage is not None
    assert usage.objects == 10
    assert usage.num_bytes >= 10 * BLOCK_BYTES
    assert usage.bound_bytes is None or usage.num_bytes <= usage.bound_bytes
