"""A real Redis server: what it must be set to, and what happens when it is full, slow, stopped or started again."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Status
from tests.support.redis_server import MAXMEMORY, RedisServer, redis_server
from tests.support.storage import check_got, key_of, opened, put, soon

KEYS = [key_of(i) for i in range(40)]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def options(server: RedisServer, **more: object) -> dict[str, object]:
    return {"backend": "redis", "url": server.url, "timeout": "10s"} | more


def test_a_server_without_a_bound_is_refused() -> None:
    with redis_server(maxmemory=0) as server, pytest.raises(ConfigError, match="no bound on its memory"):
        opened(options(server)).__enter__()


def test_a_server_that_does_not_evict_is_refused() -> None:
    with redis_server(policy="noeviction") as server, pytest.raises(ConfigError, match="maxmemory-policy"):
        opened(options(server)).__enter__()


def test_no_server_is_a_mistake_that_names_the_url_without_its_password(server: RedisServer) -> None:
    server.kill()
    with pytest.raises(ConfigError, match=r"^url: unix:///") as raised:
        opened(options(server, url=server.url.replace("unix://", "unix://user:secret@"))).__enter__()
    assert "secret" not in str(raised.value)
    server.restart()


@pytest.mark.parametrize(
    ("variable", "words"),
    [(None, "wants a password: .*; name the environment variable"), ("REDIS_KEY", "refuses the password in REDIS_KEY")],
)
def test_a_password_that_is_missing_or_wrong_is_a_mistake_of_its_own(
    variable: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_KEY", "wrong")
    with redis_server(MAXMEMORY, "allkeys-lru", "--requirepass", "right") as server:
        with pytest.raises(ConfigError, match=f"^password_env: unix://.* {words}"):
            opened(options(server, password_env=variable)).__enter__()
        monkeypatch.setenv("REDIS_KEY", "right")
        with opened(options(server, password_env="REDIS_KEY")) as backend:
            put(backend, KEYS[:1])


def test_blocks_have_a_time_to_live_that_a_hit_renews(server: RedisServer) -> None:
    from redis import Redis

    client = Redis.from_url(server.url)
    with opened(options(server, ttl="1h", prefix="test:")) as backend:
        put(backend, KEYS[:2])
        for key in KEYS[:2]:
            client.pexpire(b"test:" + key, 60_000)
        check_got(backend, KEYS[:1])
        put(backend, KEYS[1:2])
        assert all(client.pttl(b"test:" + key) > 3_000_000 for key in KEYS[:2])
    client.close()


def test_a_full_server_evicts_and_nothing_fails() -> None:
    with redis_server(maxmemory=8 << 20) as server, opened(options(server)) as backend:
        assert set(put(backend, [key_of(i) for i in range(100)], 200_000)) == {Status.OK}
        statuses = [check_got(backend, [key_of(i)], 200_000)[0] for i in range(100)]
        assert set(statuses) == {Status.OK, Status.MISSING}
        assert not backend.is_degraded


def test_a_server_full_of_what_it_may_not_evict_takes_nothing() -> None:
    from redis import Redis
    from redis.exceptions import OutOfMemoryError

    with redis_server(maxmemory=8 << 20, policy="volatile-lru") as server, opened(options(server)) as backend:
        client = Redis.from_url(server.url)
        with suppress(OutOfMemoryError):
            for i in itertools.count():
                client.set(f"kept {i}", bytes(100_000))
        client.close()
        assert put(backend, KEYS[:2], 3_000_000) == [Status.MISSING] * 2
        assert not backend.is_degraded


def test_a_server_that_is_started_again_is_used_again(server: RedisServer) -> None:
    with opened(options(server)) as backend:
        put(backend, KEYS)
        server.kill()
        assert set(check_got(backend, KEYS)) == {Status.FAILED}
        server.restart()
        assert set(check_got(backend, KEYS)) == {Status.MISSING}
        assert set(put(backend, KEYS)) == {Status.OK}
        assert set(check_got(backend, KEYS)) == {Status.OK}


def test_a_server_that_is_gone_opens_the_breaker(server: RedisServer) -> None:
    with opened(options(server)) as backend:
        server.kill()
        for _ in range(5):
            assert not backend.is_degraded
            assert backend.exists(KEYS[:1], soon()) == [False]
        assert backend.is_degraded
    server.restart()


def test_a_server_that_does_not_say_what_it_has_has_nothing(server: RedisServer) -> None:
    """It answers with errors, as it does while it loads its data."""
    from redis import Redis

    with opened(options(server)) as backend, Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-exists")
        for _ in range(5):
            assert not backend.is_degraded
            assert backend.exists(KEYS, soon()) == [False] * len(KEYS)
        assert backend.is_degraded


def test_a_server_that_hangs_is_late(server: RedisServer) -> None:
    with opened(options(server, timeout="3s")) as backend:
        assert set(put(backend, KEYS)) == {Status.OK}
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert set(check_got(backend, KEYS)) == {Status.LATE}
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert set(check_got(backend, KEYS)) == {Status.OK}


def test_a_value_that_somebody_changed_is_corrupt(server: RedisServer) -> None:
    from redis import Redis

    client = Redis.from_url(server.url)
    with opened(options(server)) as backend:
        put(backend, KEYS[:3])
        client.setrange(b"swiftkv:" + KEYS[0], 100, b"xyz")
        client.append(b"swiftkv:" + KEYS[1], b"more")
        client.delete(b"swiftkv:" + KEYS[2])
        client.lpush(b"swiftkv:" + KEYS[2], "not", "a", "block")
        assert check_got(backend, KEYS[:3]) == [Status.CORRUPT, Status.CORRUPT, Status.FAILED]
        assert backend.exists(KEYS[:3], soon()) == [False, False, True]
    client.close()


def test_other_keys_of_the_server_stay(server: RedisServer) -> None:
    from redis import Redis

    client = Redis.from_url(server.url)
    client.set("somebody", "else's")
    with opened(options(server)) as backend:
        put(backend, KEYS)
    assert client.get("somebody") == b"else's"
    client.close()
