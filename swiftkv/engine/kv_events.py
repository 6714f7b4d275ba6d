"""Sends KV events to routers, in vLLM's format (`vllm/distributed/kv_events.py`).

A PUB socket sends [topic, number, payload] for each batch; numbers are 8 bytes, big-endian, from 0 for each start of an
engine. A ROUTER socket answers [empty, number] with [empty, number, payload] for each batch from that number on that is
still kept, and ends with number -1 and an empty payload. A payload is MessagePack: [time, events, rank].

Events name a KV group and a medium: `CPU` or `GPU` for the engine's own pool, `PEER` for a lender's. A block that moves
is reported as stored in one medium and removed from the other, without its tokens.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from swiftkv._core import Scheduler, blake3
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.messages import KVEventsSpec
from swiftkv.errors import ConfigError
from swiftkv.wakeup import Wakeup

MAX_EVENTS = 1 << 16
"""The most events that the core keeps between two calls of `collect`. Instead of more, it sends `AllBlocksCleared`."""

_STORED, _REMOVED, _CLEARED = range(3)
_NO_TEXT, _FIRST, _BEHIND_ANOTHER = range(3)
_KEY_BYTES, _HASH_BYTES = 32, 8
_MAX_SALTS = 1 << 16
_END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_PATIENCE_S = 1.0
_MAX_RECEIVED_BYTES = 1024  # of a message: a subscription, or the request of a replay
_MAX_UNREAD = 64  # messages of one connection

Event = dict[str, Any]  # as subscribers get it, "type" first, in vLLM's order of fields


class Taken(NamedTuple):
    """The events of one batch, as the core hands them out."""

    kinds: npt.NDArray[np.uint8]
    places: npt.NDArray[np.uint8]
    groups: npt.NDArray[np.int32]
    texts: npt.NDArray[np.uint8]
    keys: bytes
    parents: bytes
    token_ids: npt.NDArray[np.int32]


class _Row(NamedTuple):
    """One event of the core."""

    kind: int
    place: int
    group: int
    text: int
    key: bytes
    parent: bytes
    token_ids: list[int]


class KVEvents:
    """Sends no events, for an engine without `kv_events_config`."""

    def added(self, namespace: bytes) -> None:
        """Note the namespace of a request that has come."""

    def collect(self) -> None:
        """Send the events since the last call; call between steps."""

    def close(self) -> None:
        """End without waiting for subscribers."""


class EventFormat:
    """Converts the core's events to vLLM's."""

    def __init__(self, groups: Sequence[KVGroup], local_medium: Literal["CPU", "GPU"], block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._media = (local_medium, "PEER", "HOST")
        self._salts: OrderedDict[bytes, str] = OrderedDict()  # by the key of their namespace; the newest last

    def add_namespace(self, namespace: bytes) -> None:
        if namespace:
            key = blake3(namespace)
            self._salts[key] = namespace.decode()
            self._salts.move_to_end(key)
            if len(self._salts) > _MAX_SALTS:
                self._salts.popitem(last=False)

    def events_of(self, taken: Taken) -> Iterator[Event]:
        """Yield the events, by group and medium; blocks that follow each other share one."""
        for run in _runs(taken, self._block_size):
            if run[0].kind == _CLEARED:
                yield {"type": "AllBlocksCleared"}
            elif run[0].kind == _REMOVED:
                yield self._removed(run)
            else:
                yield self._stored(run)

    def _removed(self, run: Sequence[_Row]) -> Event:
        return {
            "type": "BlockRemoved",
            "block_hashes": [hash_of(row.key) for row in run],
            "medium": self._media[run[0].place],
            "group_idx": run[0].group,
        }

    def _stored(self, run: Sequence[_Row]) -> Event:
        first, group = run[0], self._groups[run[0].group]
        salt = self._salts.get(first.parent) if first.text == _FIRST else None
        return {
            "type": "BlockStored",
            "block_hashes": [hash_of(row.key) for row in run],
            "parent_block_hash": hash_of(first.parent) if first.text == _BEHIND_ANOTHER else None,
            "token_ids": [token for row in run for token in row.token_ids],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": self._media[first.place],
            "lora_name": None,
            "extra_keys": [None if salt is None else [salt], *[None] * (len(run) - 1)],
            "group_idx": first.group,
            "kv_cache_spec_kind": "sliding_window" if group.kind == "window" else "full_attention",
            "kv_cache_spec_sliding_window": group.window or None,
        }


def _runs(taken: Taken, block_size: int) -> Iterator[list[_Row]]:
    """Yield the runs of rows that one event can report together."""
    run: list[_Row] = []
    for row in _rows(taken, block_size):
        if run and not _continues(run[-1], row):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _continues(row: _Row, following: _Row) -> bool:
    if row[:3] != following[:3] or row.kind == _CLEARED:
        return False
    if row.text == following.text == _NO_TEXT:
        return True
    return row.text != _NO_TEXT and following.text == _BEHIND_ANOTHER and following.parent == row.key


def _rows(taken: Taken, block_size: int) -> Iterator[_Row]:
    """Yield the core's events, by group and place, and otherwise in their order."""
    numbers = np.cumsum(taken.texts != _NO_TEXT) - 1  # the index of each row's text
    for i in np.lexsort((taken.places, taken.groups)).tolist():
        has_text = taken.texts[i] != _NO_TEXT
        begin = int(numbers[i]) * block_size
        yield _Row(
            kind=int(taken.kinds[i]),
            place=int(taken.places[i]),
            group=int(taken.groups[i]),
            text=int(taken.texts[i]),
            key=taken.keys[i * _KEY_BYTES : (i + 1) * _KEY_BYTES],
            parent=taken.parents[i * _KEY_BYTES : (i + 1) * _KEY_BYTES],
            token_ids=taken.token_ids[begin : begin + block_size].tolist() if has_text else [],
        )


def hash_of(key: bytes) -> int:
    """Return the number of 64 bits by which subscribers name a block."""
    return int.from_bytes(key[:_HASH_BYTES], "big")


def encode(events: Sequence[Event], time_s: float, encoding: Literal["map", "array"]) -> bytes:
    """Return the payload of one batch."""
    as_sent = events if encoding == "map" else [_without_trailing_nones(event) for event in events]
    return msgspec.msgpack.encode([time_s, as_sent, 0])


def _without_trailing_nones(event: Event) -> list[Any]:
    values = list(event.values())
    while values[-1] is None:
        values.pop()
    return values


class ZmqKVEvents(KVEvents):
    """A thread that encodes and sends the events that `collect` takes, and sends them again on demand."""

    def __init__(
        self, spec: KVEventsSpec, scheduler: Scheduler, event_format: EventFormat, context: zmq.Context[Any]
    ) -> None:
        """Raises `ConfigError` if an endpoint cannot be bound."""
        self._spec = spec
        self._scheduler = scheduler
        self._format = event_format
        self._publisher = _bind(context, zmq.PUB, spec.endpoint, spec.hwm, "endpoint")
        self._replayer = (
            None
            if spec.replay_endpoint is None
            else _bind(context, zmq.ROUTER, spec.replay_endpoint, spec.hwm, "replay_endpoint")
        )
        self._taken: deque[tuple[float, Taken]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=spec.buffer_steps)  # numbers and payloads
        self._next = 0
        self._is_closing = False
        self._wakeup = Wakeup()
        scheduler.enable_kv_events(MAX_EVENTS)
        self._thread = threading.Thread(target=self._serve, name="kv events", daemon=True)
        self._thread.start()

    def added(self, namespace: bytes) -> None:
        self._format.add_namespace(namespace)

    def collect(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the thread that publishes KV events has ended; its traceback is on standard error")
        if len(self._taken) >= self._spec.max_queue_size:
            return  # the core keeps the events, up to its own bound
        taken = Taken(*self._scheduler.take_kv_events())
        if len(taken.kinds):
            self._taken.append((time.time(), taken))
            self._wakeup.wake()

    def close(self) -> None:
        self._is_closing = True
        self._wakeup.wake()
        self._thread.join(_CLOSE_PATIENCE_S)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self._replayer is not None:
            poller.register(self._replayer, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            self._wakeup.take()
            while self._taken:
                self._send(*self._taken.popleft())
            if self._replayer is not None and self._replayer in ready:
                self._send_again(self._replayer)
        self._publisher.close(linger=0)
        if self._replayer is not None:
            self._replayer.close(linger=0)
        self._wakeup.close()

    def _send(self, time_s: float, taken: Taken) -> None:
        payload = encode(list(self._format.events_of(taken)), time_s, self._spec.encoding)
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._sent.append((number, payload))
        self._publisher.send_multipart((self._spec.topic.encode(), number, payload))

    def _send_again(self, replayer: zmq.Socket[bytes]) -> None:
        frames = replayer.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(_END):
            return  # a malformed request
        sender, _, start = frames
        for number, payload in self._sent:
            if number >= start:
                replayer.send_multipart((sender, b"", number, payload))
        replayer.send_multipart((sender, b"", _END, b""))


def open_kv_events(
    spec: KVEventsSpec | None,
    scheduler: Scheduler,
    groups: Sequence[KVGroup],
    device: str,
    context: zmq.Context[Any],
) -> KVEvents:
    """Open the sockets that `spec` names; without `spec`, send no events. Raises `ConfigError` if it cannot listen."""
    if spec is None:
        return KVEvents()
    event_format = EventFormat(groups, "CPU" if device == "cpu" else "GPU", groups[0].block_size)
    return ZmqKVEvents(spec, scheduler, event_format, context)


def _bind(context: zmq.Context[Any], kind: int, endpoint: str, hwm: int, key: str) -> zmq.Socket[bytes]:
    opened: zmq.Socket[bytes] = context.socket(kind)
    opened.set_hwm(hwm)
    opened.setsockopt(zmq.LINGER, 0)
    # Anybody who reaches the port may subscribe, and ZeroMQ keeps all that it receives. These bounds keep that small.
    opened.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
    opened.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
    try:
        opened.bind(endpoint)
    except zmq.ZMQError as error:
        opened.close()
        raise ConfigError(
            f"kv_events_config.{key}: cannot listen on {endpoint}: {error.strerror}; choose another, or free this one"
        ) from error
    return opened
