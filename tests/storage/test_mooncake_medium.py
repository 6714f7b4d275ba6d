"""A real Mooncake Store: who shares it, what its leases keep, and what happens when it is full, silent or gone."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Status
from tests.support.mooncake_store import HOST, MooncakeStore, held_still, mooncake_store, skip_without_mooncake
from tests.support.storage import block_of, check_got, key_of, opened, put, soon

KEYS = [key_of(i) for i in range(40)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[MooncakeStore]:
    with mooncake_store() as store:
        yield store


@pytest.fixture
def raw(store: MooncakeStore, request: pytest.FixtureRequest) -> dict[str, object]:
    """Options with a prefix of the test's own."""
    return options(store, prefix=f"{request.node.name[-40:]}:")


def options(store: MooncakeStore, **more: object) -> dict[str, object]:
    return {"backend": "mooncake", "master_server_address": store.address, "timeout": "10s"} | more


def plain_client(store: MooncakeStore) -> Any:
    """Return a client of Mooncake's own."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert client.setup(HOST, "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", store.address) == 0
    return client


def name_of(raw: dict[str, object], key: bytes) -> str:
    return f"{raw['prefix']}{key.hex()}"


def test_no_master_is_a_mistake_that_names_the_address() -> None:
    skip_without_mooncake()
    with pytest.raises(ConfigError, match=r"^master_server_address: no mooncake_master answers at 127.0.0.1:9: "):
        opened({"backend": "mooncake", "master_server_address": "127.0.0.1:9"}).__enter__()


def test_no_package_is_a_mistake_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"^backend: mooncake cannot be used here.*swiftkv\[mooncake\].*libibverbs1"):
        opened({"backend": "mooncake", "master_server_address": "127.0.0.1:9"}).__enter__()


@pytest.mark.slow
def test_two_nodes_that_both_give_memory_share_blocks() -> None:
    with mooncake_store(memory_bytes=0) as store:
        gives = options(store, global_segment_size="32MiB")
        with opened(gives) as first, opened(gives) as second:
            assert not first.capabilities.is_durable
            assert set(put(first, KEYS[:20])) == set(put(second, KEYS[20:])) == {Status.OK}
            assert set(check_got(first, KEYS)) == set(check_got(second, KEYS)) == {Status.OK}
            assert put(second, KEYS) == [Status.OK] * len(KEYS)  # all of them are there


def test_blocks_go_to_registered_memory_and_to_other_memory_in_one_call(raw: dict[str, object]) -> None:
    num_bytes = MIB + 17
    registered = memoryview(mmap.mmap(-1, 8 * MIB))
    into = [registered[:num_bytes], memoryview(bytearray(num_bytes)), registered[2 * MIB : 2 * MIB + num_bytes]]
    for key, block in zip(KEYS[:3], into, strict=False):
        block[:] = block_of(key, num_bytes)
    with opened(raw) as backend:
        assert backend.capabilities.register is not None
        backend.capabilities.register(registered)
        assert backend.put(KEYS[:3], into, soon()) == [Status.OK] * 3
        for block in into:
            block[:] = bytes(num_bytes)
        assert backend.get(KEYS[:3], into, soon()) == [Status.OK] * 3
        assert [bytes(block) for block in into] == [block_of(key, num_bytes) for key in KEYS[:3]]
        assert not any(registered[num_bytes : 2 * MIB])  # nothing beside the blocks was touched
        assert set(check_got(backend, KEYS[:3], num_bytes)) == {Status.OK}


@pytest.mark.slow
def test_a_full_store_evicts_and_nothing_fails() -> None:
    with mooncake_store() as store, opened(options(store)) as backend:
        statuses = {put(backend, [key_of(i)], MIB)[0] for i in range(150)}
        assert Status.OK in statuses <= {Status.OK, Status.MISSING}
        assert {check_got(backend, [key_of(i)], MIB)[0] for i in range(150)} == {Status.OK, Status.MISSING}
        assert not backend.is_degraded


@pytest.mark.slow
def test_what_was_found_stays_while_others_come() -> None:
    """A look-up gives a lease."""
    with mooncake_store() as store, opened(options(store)) as backend:
        put(backend, KEYS[:4], MIB)
        assert backend.exists(KEYS[:4], soon()) == [True] * 4
        for i in range(100, 200):
            put(backend, [key_of(i)], MIB)
        assert set(check_got(backend, KEYS[:4], MIB)) == {Status.OK}


@pytest.mark.slow
def test_a_store_without_memory_takes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with mooncake_store(memory_bytes=0) as store, opened(options(store)) as backend:
        assert "has no memory" in caplog.text
        assert set(put(backend, KEYS)) == {Status.MISSING}
        assert not backend.is_degraded


@pytest.mark.slow
def test_an_object_that_somebody_changed_is_corrupt(store: MooncakeStore, raw: dict[str, object]) -> None:
    client = plain_client(store)
    with opened(raw) as backend:
        put(backend, KEYS[:2])
        for key, change in ((KEYS[0], b"xyz"), (KEYS[1], b"more of it")):
            whole = bytearray(client.get(name_of(raw, key)))
            whole[200 : 200 + len(change)] = change
            assert client.remove(name_of(raw, key), force=True) == 0
            assert client.put(name_of(raw, key), bytes(whole) + change[3:]) == 0
        assert check_got(backend, KEYS[:2]) == [Status.CORRUPT] * 2
        assert backend.exists(KEYS[:2], soon()) == [False] * 2
        assert set(put(backend, KEYS[:2])) == {Status.OK}
    client.close()


@pytest.mark.slow
def test_other_objects_of_the_store_stay(store: MooncakeStore, raw: dict[str, object]) -> None:
    client = plain_client(store)
    assert client.put("somebody", b"else's") == 0
    with opened(raw) as backend:
        put(backend, KEYS)
        check_got(backend, KEYS, 100)  # all of them are dropped
    assert client.get("somebody") == b"else's"
    client.close()


@pytest.mark.slow
def test_a_master_that_does_not_answer_is_late_and_opens_the_breaker() -> None:
    with mooncake_store() as store, opened(options(store, timeout="200ms")) as backend:
        put(backend, KEYS)
        with held_still(store):
            for _ in range(5):
                assert set(check_got(backend, KEYS[:1])) <= {Status.LATE, Status.FAILED}
            assert backend.is_degraded


@pytest.mark.slow
def test_a_master_that_is_gone_fails_and_opens_the_breaker() -> None:
    with mooncake_store() as store, opened(options(store, timeout="200ms")) as backend:
        put(backend, KEYS)
        store.master.kill()
        store.master.wait()
        for _ in range(5):
            assert backend.exists(KEYS[:1], soon()) == [False]
        assert backend.is_degraded
