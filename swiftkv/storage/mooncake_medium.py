"""A Mooncake Store that keeps blocks in the memory of one or several machines."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Capabilities, Parts, Status, Usage
from swiftkv.storage.batches import batches
from swiftkv.storage_options import MooncakeOptions

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_BATCH_BYTES = 8 << 20
"""The size at which a transfer is full. A call checks its deadline between transfers. No lease ends during one."""
_DIRECT_BYTES = 128 << 10
"""Smaller blocks are copied together with their headers: two transfers would take longer."""
_MAX_NAMED = 1024
_SLAB_BYTES = 64 << 10
_LOCAL_BUFFER_BYTES = 16 << 20
"""The least that Mooncake accepts; it reads objects from disks into this buffer."""
_CLOSE_PATIENCE_S = 2.0

_INVALID_PARAMS, _TRANSFER_FAIL = -600, -800
_EXISTS_ALREADY = -705
_NO_ROOM = frozenset({-101, -200, -1700})  # no segment, no memory left in any, beyond a tenant's quota
_NOT_THERE = frozenset({-702, -703, -704, -710, -712})  # unknown, being written, or gone from where it lay
_NO_ANSWER = frozenset({-900, -901})  # Mooncake's codes where its master does not answer
_TOO_LATE = frozenset({-707, -901})  # the lease ended before the transfer did; the master did not answer
_WRONG_BYTES = -801

_log = logging.getLogger(__name__)


class MooncakeMedium:
    """Each object, a header followed by its block, is one object of Mooncake's.

    Large blocks go straight between the store and registered memory; all else is copied through a slab. The store
    leases objects that are looked up or read, so an object that was found stays for some seconds. A corrupt object is
    removed in spite of its lease; its other readers notice by the checksum.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        """Join the store. Raises `ConfigError`."""
        self._options = options
        self._store = _join(options)
        self._regions: list[tuple[int, int]] = []  # begin and end of memory that was registered
        self._has_lost_master = False
        self._writing: set[str] = set()  # names, by calls of this process
        self._written = threading.Condition()
        self._slabs: queue.SimpleQueue[_Slab] = queue.SimpleQueue()  # one for each call that may run
        for _ in range(options.max_calls):
            self._slabs.put(_Slab(self._store))
        self._warn_if_full()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_durable=not self._options.global_segment_size,
            is_shared=True,
            max_calls=self._options.max_calls,
            register=self._register,
        )

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Ask for many keys in one call to the master, which renews their leases."""
        found: list[bool] = []
        with self._call():
            for begin in range(0, len(keys), _MAX_NAMED):
                if begin and time.monotonic() > deadline_s:
                    raise TimeoutError("Mooncake's master did not answer for all keys in time")
                answers = self._store.batch_is_exist([self._name(key) for key in keys[begin : begin + _MAX_NAMED]])
                self._note(answers)
                found += map(_is_there, answers)
        return found

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Read in transfers of bounded size."""
        statuses: list[Status] = []
        with self._call() as slab:
            for begin, end in batches(into, _BATCH_BYTES):
                if time.monotonic() > deadline_s:
                    break
                names = [self._name(key) for key in keys[begin:end]]
                statuses += self._read(names, into[begin:end], slab)
        return statuses + [Status.LATE] * (len(keys) - len(statuses))

    def write(self, keys: Sequence[bytes], sources: Sequence[Parts], deadline_s: float) -> list[Status]:
        """Write in transfers of bounded size. Objects that are there already are not transferred."""
        statuses: list[Status] = []
        with self._call() as slab:
            for begin, end in batches(sources, _BATCH_BYTES):
                if time.monotonic() > deadline_s:
                    break
                names = [self._name(key) for key in keys[begin:end]]
                with self._alone(names, deadline_s) as is_alone:
                    if not is_alone:
                        break
                    statuses += self._write(names, sources[begin:end], slab)
        return statuses + [Status.LATE] * (len(keys) - len(statuses))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove objects, even with a lease on them."""
        with self._call():
            for key in keys:
                result = self._store.remove(self._name(key), force=True)
                if result < 0 and result not in _NOT_THERE:
                    raise OSError(_failure("remove", result))

    def usage(self) -> Usage | None:
        """Return None: a client cannot ask for it."""
        return None

    def close(self) -> None:
        """Leave the store, which then loses the memory that this process gave it.

        If a call does not return soon, the store's client goes on until the process ends.
        """
        deadline_s = time.monotonic() + _CLOSE_PATIENCE_S
        try:
            for _ in range(self._options.max_calls):
                self._slabs.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            _log.warning("storage: a call to Mooncake does not return; its client stays until this process ends")
            return
        self._store.close()

    def _register(self, memory: memoryview) -> None:
        """Have blocks in this memory transferred without a copy, until the medium is closed."""
        address = _address(memory)
        if result := self._store.register_buffer(address, memory.nbytes):
            _log.warning("storage: %s; blocks are copied", _failure("register_buffer", result))
            return
        self._regions.append((address, address + memory.nbytes))

    @contextlib.contextmanager
    def _call(self) -> Iterator[_Slab]:
        """Lend a slab for one call; `close` waits until all slabs are back."""
        slab = self._slabs.get()
        try:
            if self._has_lost_master:
                _reach_master(self._options)  # fails at once, where the client would take seconds
            yield slab
        finally:
            self._slabs.put(slab)

    def _note(self, results: Sequence[int]) -> None:
        """Remember whether the master answered."""
        self._has_lost_master = any(result in _NO_ANSWER for result in results)

    @contextlib.contextmanager
    def _alone(self, names: Sequence[str], deadline_s: float) -> Iterator[bool]:
        """Wait until no other call writes these names, because the store reports an object as soon as writing begins.

        Yields False if the deadline came first.
        """
        with self._written:
            left_s = deadline_s - time.monotonic()
            if not self._written.wait_for(lambda: self._writing.isdisjoint(names), max(0.0, left_s)):
                yield False
                return
            self._writing.update(names)
        try:
            yield True
        finally:
            with self._written:
                self._writing.difference_update(names)
                self._written.notify_all()

    def _write(self, names: list[str], sources: Sequence[Parts], slab: _Slab) -> list[Status]:
        places = self._places(sources, slab)
        for place in places:
            place.copy_in()
        results = self._store.batch_put_from_multi_buffers(
            names, [place.addresses for place in places], [place.sizes for place in places]
        )
        self._note(results)
        return list(map(_status_of_write, results))

    def _read(self, names: list[str], into: Sequence[Parts], slab: _Slab) -> list[Status]:
        places = self._places(into, slab)
        results = self._store.batch_get_into_multi_buffers(
            names, [place.addresses for place in places], [place.sizes for place in places]
        )
        self._note(results)
        statuses = []
        for name, place, result in zip(names, places, results, strict=True):
            status = self._status_of_read(name, sum(place.sizes), result)
            if status is Status.OK:
                place.copy_out()
            statuses.append(status)
        return statuses

    def _status_of_read(self, name: str, num_bytes: int, result: int) -> Status:
        """Return the status of a read: CORRUPT for an object of another length, which the store does not report."""
        if result in (_INVALID_PARAMS, _TRANSFER_FAIL):
            found_bytes = self._store.get_size(name)
            return Status.CORRUPT if found_bytes >= 0 and found_bytes != num_bytes else Status.FAILED
        if result >= 0:
            return Status.OK if result == num_bytes else Status.CORRUPT
        if result in _NOT_THERE:
            return Status.MISSING
        if result == _WRONG_BYTES:
            return Status.CORRUPT
        return Status.LATE if result in _TOO_LATE else Status.FAILED

    def _places(self, objects: Sequence[Parts], slab: _Slab) -> list[_Place]:
        """Return where Mooncake finds the parts of objects: in place, or in the slab."""
        found = [[(part, self._registered_address(part)) for part in parts if len(part)] for parts in objects]
        room = slab.room(sum(len(part) for parts in found for part, address in parts if address is None))
        begin, end = _address(room) if len(room) else 0, 0
        places = []
        for parts in found:
            place = _Place()
            for part, address in parts:
                if address is not None:
                    place.add(address, len(part))
                    continue
                place.add(begin + end, len(part))
                place.staged.append((part, room[end : end + len(part)]))
                end += len(part)
            places.append(place)
        return places

    def _registered_address(self, part: memoryview) -> int | None:
        """Return the address of a part that is in registered memory and large enough for a transfer of its own."""
        if len(part) < _DIRECT_BYTES:
            return None
        address = _address(part)
        is_registered = any(begin <= address and address + len(part) <= end for begin, end in self._regions)
        return address if is_registered else None

    def _name(self, key: bytes) -> str:
        return self._options.prefix + key.hex()

    def _warn_if_full(self) -> None:
        """Store one small object, and log a warning if the store does not take it."""
        name, part = f"{self._options.prefix}probe-{secrets.token_hex(8)}", memoryview(secrets.token_bytes(64))
        with self._call() as slab:
            [place] = self._places([(part, part[:0])], slab)
            place.copy_in()
            [result] = self._store.batch_put_from_multi_buffers([name], [place.addresses], [place.sizes])
            if result == 0:
                self._store.remove(name, force=True)
            else:
                _log.warning(
                    "storage: the Mooncake Store took no object (error %d): it is full, or has no memory; give it some "
                    "with global_segment_size, or start a mooncake_client",
                    result,
                )


@dataclass(slots=True)
class _Place:
    """The parts of one object, as addresses and sizes for Mooncake."""

    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    staged: list[tuple[memoryview, memoryview]] = field(default_factory=list)  # parts that are copied, and their copies

    def add(self, address: int, num_bytes: int) -> None:
        """Add bytes; if they directly follow the last ones, both are one transfer."""
        if self.addresses and self.addresses[-1] + self.sizes[-1] == address:
            self.sizes[-1] += num_bytes
            return
        self.addresses.append(address)
        self.sizes.append(num_bytes)

    def copy_in(self) -> None:
        for part, copy in self.staged:
            copy[:] = part

    def copy_out(self) -> None:
        for part, copy in self.staged:
            part[:] = copy


class _Slab:
    """Registered memory of one call: for headers, small blocks, and blocks in memory that is not registered."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self._memory = self._registered(_SLAB_BYTES)

    def room(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of memory; any returned before must not be used any more. Raises `OSError`."""
        if len(self._memory) < num_bytes:
            self._store.unregister_buffer(_address(self._memory))
            self._memory = self._registered(num_bytes)
        return self._memory[:num_bytes]

    def _registered(self, num_bytes: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, num_bytes))
        if result := self._store.register_buffer(_address(memory), num_bytes):
            raise OSError(_failure("register_buffer", result))
        return memory


def _join(options: MooncakeOptions) -> MooncakeDistributedStore:
    """Return a client that has joined the store. Raises `ConfigError`."""
    # The client reads these when it is made, and offers no other way to set them.
    timeout_ms = str(round(1000 * options.timeout))
    os.environ |= {"MC_RPC_TIMEOUT_MS": timeout_ms, "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms}
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"backend: mooncake cannot be used here: {error}; install swiftkv[mooncake], and Debian's packages "
            "libibverbs1 and librdmacm1"
        ) from None
    _check_master(options)
    store = MooncakeDistributedStore()
    result = store.setup(
        options.local_hostname,
        options.metadata_server,
        options.global_segment_size,
        _LOCAL_BUFFER_BYTES,
        options.protocol,
        options.device_name,
        options.master_server_address,
    )
    if result:
        store.close()
        raise ConfigError(
            f"master_server_address: the Mooncake Store at {options.master_server_address} cannot be joined (error "
            f"{result}); see what its client says on standard error, and metadata_server, protocol and local_hostname"
        )
    return store


def _check_master(options: MooncakeOptions) -> None:
    """Raise `ConfigError` at once if no master listens; the client would try for minutes."""
    try:
        _reach_master(options)
    except OSError as error:
        raise ConfigError(
            f"master_server_address: no mooncake_master answers at {options.master_server_address}: {error}; start "
            "one, or name another"
        ) from None


def _reach_master(options: MooncakeOptions) -> None:
    """Raise `OSError` if no master listens. Elected masters are not checked: only the client knows which one to ask."""
    if "://" not in options.master_server_address:
        host, _, port = options.master_server_address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), options.timeout).close()


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _is_there(answer: int) -> bool:
    """Return whether the master knows an object. Raises `OSError` if it did not say."""
    if answer >= 0 or answer in _NOT_THERE:
        return answer > 0
    raise TimeoutError(_failure("exists", answer)) if answer in _TOO_LATE else OSError(_failure("exists", answer))


def _status_of_write(result: int) -> Status:
    if result in (0, _EXISTS_ALREADY):
        return Status.OK
    if result in _NO_ROOM:
        return Status.MISSING
    return Status.LATE if result in _TOO_LATE else Status.FAILED


def _failure(call: str, result: int) -> str:
    return f"Mooncake's {call} failed with error {result}"
