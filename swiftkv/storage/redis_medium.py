"""A Redis server that keeps blocks, for engines of one or several machines."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Capabilities, Parts, Status, Usage
from swiftkv.storage.batches import batches
from swiftkv.storage_options import RedisOptions

if TYPE_CHECKING:
    from redis import Redis

_OLDEST = (6, 2)  # GETEX
_BATCH_BYTES = 8 << 20
"""The size at which a pipeline is full, so that a call checks its deadline now and then."""
_MAX_NAMED = 1024
_EVICTING = "allkeys-lru, allkeys-lfu, volatile-lru or volatile-lfu"


class RedisMedium:
    """Each object is one value, with a time to live that every hit renews. The server evicts.

    The client keeps as many connections as there are calls at once, so no call waits for one.
    """

    def __init__(self, options: RedisOptions) -> None:
        """Connect, and check the server's version and memory bound. Raises `ConfigError`."""
        self._options = options
        self._prefix = options.prefix.encode()
        self._ttl_ms = round(options.ttl * 1000)
        self._client = _connect(options)
        try:
            with _told_as_os_errors(), _passwords_as_mistakes(options):
                _check_server(self._client.info("server"), self._client.info("memory"))
        except OSError as error:
            self._client.close()
            raise ConfigError(
                f"url: {_without_password(options.url)} does not answer as a Redis server does: {error}; start one, or "
                "name another"
            ) from None
        except ConfigError:
            self._client.close()
            raise

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_durable=True, is_shared=True, max_calls=self._options.max_calls)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Ask for many keys in one round trip."""
        found: list[bool] = []
        for begin in range(0, len(keys), _MAX_NAMED):
            if begin and time.monotonic() > deadline_s:
                raise TimeoutError("Redis did not answer for all keys in time")
            replies = self._send([("EXISTS", self._name(key)) for key in keys[begin : begin + _MAX_NAMED]])
            found += map(_is_there, replies)
        return found

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> Iterator[Status]:
        """Read in pipelines of bounded size."""
        for begin, end in batches(into, _BATCH_BYTES):
            if time.monotonic() > deadline_s:
                yield from itertools.repeat(Status.LATE, len(keys) - begin)
                return
            replies = self._send([("GETEX", self._name(key), "PX", self._ttl_ms) for key in keys[begin:end]])
            yield from map(_fill, into[begin:end], replies)

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write the objects that are not there, in pipelines of bounded size."""
        statuses: list[Status] = []
        for begin, end in batches(sources, _BATCH_BYTES):
            if time.monotonic() > deadline_s:
                break
            named = [self._name(key) for key in keys[begin:end]]
            is_known = self._renewed(named)
            new = [i for i in range(end - begin) if not is_known[i]]
            objects = sources[begin:end]
            replies = self._send([("SET", named[i], _value(objects[i]), "PX", self._ttl_ms) for i in new])
            written = dict(zip(new, map(_status_of_write, replies), strict=True))
            statuses += [written.get(i, Status.OK) for i in range(end - begin)]
        return statuses + [Status.LATE] * (len(keys) - len(statuses))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove objects; the server frees their memory in a thread of its own."""
        self._send([("UNLINK", self._name(key)) for key in keys])

    def usage(self) -> Usage:
        """Return the size of the server: all of its keys and its memory."""
        with _told_as_os_errors():
            memory: dict[str, Any] = self._client.info("memory")
            return Usage(self._client.dbsize(), memory["used_memory"], memory["maxmemory"])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key

    def _renewed(self, named: Sequence[bytes]) -> Sequence[bool]:
        """Renew the time to live of the names that are there, and return which are.

        Usually none is, and a single command finds that.
        """
        [num_known] = self._send([("EXISTS", *named)])
        if num_known == 0:
            return [False] * len(named)
        return [reply == 1 for reply in self._send([("PEXPIRE", name, self._ttl_ms) for name in named])]

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands, then read the replies; those of commands that failed are exceptions."""
        if not commands:
            return []
        with _told_as_os_errors(), self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute(raise_on_error=False)


class _Packer:
    """Writes commands in Redis's protocol. A value may be given in parts, which are sent without being joined."""

    def pack(self, *command: Any) -> list[bytes | memoryview]:
        name, *arguments = command
        words = name.encode().split() if isinstance(name, str) else [name]  # some of the client's have two words
        pieces: list[bytes | memoryview] = [b"*%d\r\n" % (len(words) + len(arguments))]
        for argument in [*words, *arguments]:
            parts = argument if isinstance(argument, tuple) else (_as_bytes(argument),)
            pieces += [b"$%d\r\n" % sum(map(len, parts)), *parts, b"\r\n"]
        return pieces


def _value(parts: Parts) -> tuple[bytes, memoryview]:
    """Return an object as `_Packer` takes it: the client joins `bytes`, and sends a view by itself."""
    header, block = parts
    return bytes(header), block


def _as_bytes(argument: bytes | str | int) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _connect(options: RedisOptions) -> Redis:
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import ConnectionError as LostConnection
        from redis.retry import Retry
    except ImportError:
        raise ConfigError("backend: redis needs the package redis; install swiftkv[redis]") from None
    # A restarted server has closed our connections; each of them notices that only at its next call.
    retry = Retry(NoBackoff(), 1, supported_errors=(LostConnection,))
    try:
        return Redis.from_url(
            options.url,
            password=options.password(),
            max_connections=options.max_calls,
            socket_timeout=options.timeout,
            socket_connect_timeout=options.timeout,
            retry=retry,
            command_packer=_Packer(),
        )
    except ValueError as error:
        raise ConfigError(f"url: {_without_password(options.url)}: {error}") from None


def _check_server(server: dict[str, Any], memory: dict[str, Any]) -> None:
    """Raise `ConfigError` for a server that is too old, has no memory bound, or refuses new objects when full."""
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ConfigError(f"url: this Redis is {version}; blocks need 6.2 or later")
    if not memory["maxmemory"]:
        raise ConfigError(
            "url: this Redis has no bound on its memory; set one, for example: redis-cli CONFIG SET maxmemory 10gb"
        )
    if memory["maxmemory_policy"] == "noeviction":
        raise ConfigError(
            f"url: this Redis refuses new blocks once it is full (maxmemory-policy noeviction); set {_EVICTING}, for "
            "example: redis-cli CONFIG SET maxmemory-policy allkeys-lru"
        )


@contextlib.contextmanager
def _passwords_as_mistakes(options: RedisOptions) -> Iterator[None]:
    """Raise `ConfigError` if the server wants a password, or refuses the one that it got."""
    from redis.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        url = _without_password(options.url)
        if options.password_env is None:
            raise ConfigError(
                f"password_env: {url} wants a password: {error}; name the environment variable that has it"
            ) from None
        raise ConfigError(
            f"password_env: {url} refuses the password in {options.password_env}: {error}; export the right one"
        ) from None


@contextlib.contextmanager
def _told_as_os_errors() -> Iterator[None]:
    from redis.exceptions import RedisError
    from redis.exceptions import TimeoutError as RedisTimeoutError

    try:
        yield
    except RedisTimeoutError as error:
        raise TimeoutError(str(error)) from error
    except RedisError as error:
        raise OSError(str(error)) from error


def _is_there(reply: object) -> bool:
    """Return whether the server has a key. Raises `OSError` if it did not say."""
    if isinstance(reply, Exception):
        raise OSError(str(reply))
    return bool(reply)


def _fill(parts: Parts, reply: object) -> Status:
    if reply is None:
        return Status.MISSING
    if not isinstance(reply, bytes):
        return Status.FAILED
    header, block = parts
    if len(reply) != len(header) + len(block):
        return Status.CORRUPT
    value = memoryview(reply)
    header[:] = value[: len(header)]
    block[:] = value[len(header) :]
    return Status.OK


def _status_of_write(reply: object) -> Status:
    """Return the status of a write; MISSING if the server is full of keys that it may not evict."""
    if not isinstance(reply, Exception):
        return Status.OK
    return Status.MISSING if type(reply).__name__ == "OutOfMemoryError" else Status.FAILED


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
