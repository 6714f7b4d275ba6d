"""Two-sided copies over gloo, where no memory can be mapped: a thread in the lender serves what the borrower asks for.

The protocol of one link, borrower to lender unless said otherwise, every message a tensor:

    uint8 [32]     from either to the other, once: a proof that it read the rendezvous file
    int64 [4]      direction, width_bytes, pitch_bytes, number of runs
    int64 [n, 2]   of each run: offset in the lender's pool, count of rows
    uint8 [k, w]   the rows, at most `connection.MESSAGE_BYTES` at a time; from the lender if the direction is FROM_PEER
    int64 [1]      from the lender, if the direction is TO_PEER: the rows are in its pool

If a borrower asks for bytes outside of the pool, the lender closes the connection, and the borrower's job fails. Within
a job, neither side waits longer than a deadline for a message. Between jobs, a lender waits for as long as its borrower
lives.

gloo connects through a port of the loopback interface. The port accepts any process, although only the rendezvous file
has its number. So both sides show proofs.

Pools on GPUs are copied through the host. Before a job, the host waits until the device has computed what is copied.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftkv.errors import TransferError
from swiftkv.transport.base import (
    COPY_TIMING,
    CopyTimings,
    DevicePool,
    Int64Array,
    PeerHandle,
    Runs,
    SharedPool,
    Ticket,
)
from swiftkv.transport.connection import BORROWER, LENDER, Connection
from swiftkv.transport.fence import Fence
from swiftkv.transport.rendezvous import withdraw_pool
from swiftkv.transport.rows import Rows, rows_of

CONNECT_TIMEOUT_S = 10.0
DEADLINE_S = 30.0
"""The seconds that either side waits for the other's next message within a job."""

_MAX_RUNS = 1 << 20
_MAX_TIMINGS = 4096
TO_PEER, FROM_PEER = 0, 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: Ticket
    to_peer: Runs | None
    from_peer: Runs | None
    layer: int
    fence: Fence  # once the device has passed it, all KV computed before the job is in the pool


class P2pTransport:
    """The borrower's half. One Python thread does the jobs in order; gloo moves the bytes without the GIL."""

    def __init__(
        self,
        pool: SharedPool | DevicePool,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """A lender that keeps a job waiting for `deadline_s` is cut off, and has to be attached anew."""
        self._rows = rows_of(pool)
        self._connect_timeout_s = connect_timeout_s
        self._deadline_s = deadline_s
        self._connections: dict[int, Connection] = {}
        self._peer_nbytes: dict[int, int] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended = threading.Condition()  # guards the fields below
        self._last_submitted = 0
        self._last_ended = 0
        self._failed: dict[Ticket, TransferError] = {}
        self._timings: deque[tuple[int, float, float, float, int, int]] = deque(maxlen=_MAX_TIMINGS)
        self._thread = threading.Thread(target=self._work, name="p2p transport", daemon=True)
        self._thread.start()

    def attach(self, link: int, peer: PeerHandle) -> None:
        assert link not in self._connections, f"link {link} is attached"
        met = peer if isinstance(peer, _MetPeer) else self.meet(peer)
        self._connections[link] = met.connection
        self._peer_nbytes[link] = peer.nbytes

    def meet(self, peer: PeerHandle) -> _MetPeer:
        try:
            connection = Connection(peer, BORROWER, self._connect_timeout_s, self._deadline_s)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"process {peer.pid} does not serve its pool: {error}") from error
        withdraw_pool(Path(peer.store_path))
        return _MetPeer(peer.pid, peer.nbytes, peer.store_path, peer.secret, peer.memory, connection=connection)

    def attach_host(self, link: int, memory: memoryview) -> None:
        """Raise `TransferError`: every copy has a process at its other end."""
        raise TransferError("p2p copies only between processes")

    def detach(self, link: int) -> None:
        self._wait_for(self._last_submitted)
        self._peer_nbytes.pop(link, None)
        connection = self._connections.pop(link, None)
        if connection is not None:  # dropping it is not enough: the last job may refer to it, and the lender would wait
            connection.cut()

    def lender_pool(self, link: int) -> None:
        """Return `None`: the pool lies in the memory of another process."""

    def submit(self, to_peer: Runs | None, from_peer: Runs | None, layer: int) -> Ticket:
        self._last_submitted += 1
        self._jobs.put(_Job(self._last_submitted, to_peer, from_peer, layer, self._rows.fence()))
        return self._last_submitted

    def wait(self, ticket: Ticket) -> None:
        assert 0 < ticket <= self._last_submitted
        self._wait_for(ticket)
        with self._ended:
            error = self._failed.pop(ticket, None)
        if error is not None:
            raise error

    def settle(self) -> None:
        self._wait_for(self._last_submitted)
        self._failed.clear()

    def take_timings(self) -> CopyTimings:
        with self._ended:
            taken = np.array(list(self._timings), COPY_TIMING)
            self._timings.clear()
        return taken

    def take_exposures(self) -> None:
        """Return `None`: the host waits for copies."""

    def close(self) -> None:
        """Cut the connections, which fails the jobs in flight: a peer may be stopped."""
        for connection in self._connections.values():
            connection.cut()
        self.settle()
        self._jobs.put(None)
        self._thread.join()
        self._connections.clear()

    def _wait_for(self, ticket: Ticket) -> None:
        with self._ended:
            self._ended.wait_for(lambda: self._last_ended >= ticket)

    def _work(self) -> None:
        self._rows.begin_thread()
        while (job := self._jobs.get()) is not None:
            ticket, to_peer, from_peer = job.ticket, job.to_peer, job.from_peer
            job.fence.wait()
            begin_s, taken_s, failure = time.monotonic(), [0.0, 0.0], None
            try:
                directions = [self._plan(to_peer, job.layer, TO_PEER), self._plan(from_peer, job.layer, FROM_PEER)]
                for direction, exchanges in enumerate(directions):
                    for exchange in exchanges:
                        started_s = time.monotonic()
                        exchange.perform(self._rows)
                        taken_s[direction] += time.monotonic() - started_s
            except TransferError as error:
                failure = TransferError(str(error), error.links)  # a new one: the frames of `error` keep connections
            to_bytes, from_bytes = (
                0 if runs is None or failure is not None else runs.num_bytes for runs in (to_peer, from_peer)
            )
            with self._ended:
                self._timings.append((ticket, begin_s, taken_s[TO_PEER], taken_s[FROM_PEER], to_bytes, from_bytes))
                if failure is not None:
                    self._failed[ticket] = failure
                self._last_ended = ticket
                self._ended.notify_all()

    def _plan(self, runs: Runs | None, layer: int, direction: int) -> list[_Exchange]:
        """Return the exchange with each link. Raises `TransferError`, before any is begun, for runs out of bounds."""
        if runs is None:
            return []
        width, block = runs.width_bytes, runs.block_bytes
        if not 0 <= layer * width <= block - width:
            raise TransferError(f"a block of {block} bytes has no layer block {layer} of {width} bytes")
        return [self._exchange(runs, layer, direction, link) for link in np.unique(runs.runs[:, 0]).tolist()]

    def _exchange(self, runs: Runs, layer: int, direction: int, link: int) -> _Exchange:
        if link not in self._connections:
            raise TransferError(f"link {link} is not attached", (link,))
        width, block = runs.width_bytes, runs.block_bytes
        _, peer_offsets, local_offsets, counts, staged = runs.runs[runs.runs[:, 0] == link].T
        peer_offsets = peer_offsets + layer * width
        local_offsets = local_offsets + np.where(staged, 0, layer * width)
        local_pitches = np.where(staged, width, block)
        if not (
            _lie_within(self._peer_nbytes[link], peer_offsets, counts, block, width)
            and _lie_within(self._rows.nbytes, local_offsets, counts, local_pitches, width)
        ):
            raise TransferError(f"runs over link {link} lie outside of the pools", (link,))
        return _Exchange(
            link,
            self._connections[link],
            direction,
            np.stack((peer_offsets, counts), axis=1),
            block,
            width,
            _row_offsets(local_offsets, counts, local_pitches),
        )


def serve_p2p(
    pool: SharedPool | DevicePool,
    published: PeerHandle,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
) -> P2pServer:
    """Start the lender's half of one attachment to `pool`, which was `published`."""
    server = P2pServer(pool, published, connect_timeout_s, deadline_s)
    server.start()
    return server


class P2pServer(threading.Thread):
    """Sends and receives rows of a lender's pool as one borrower asks.

    It ends with the process, or before that when

    - no process connects in time, or a wrong one does;
    - the borrower detaches or dies;
    - the borrower stops for `deadline_s` within a job;
    - the borrower asks for bytes outside of the pool.
    """

    def __init__(
        self, pool: SharedPool | DevicePool, published: PeerHandle, connect_timeout_s: float, deadline_s: float
    ) -> None:
        super().__init__(name="p2p lender", daemon=True)
        self._rows = rows_of(pool)
        self._published = published
        self._connect_timeout_s = connect_timeout_s
        self._deadline_s = deadline_s
        self._connection: Connection | None = None

    def run(self) -> None:
        self._rows.begin_thread()
        try:
            connection = Connection(self._published, LENDER, self._connect_timeout_s, self._deadline_s)
        except TransferError as error:
            _log.error("refused a connection to the pool: %s", error)
            return
        except (OSError, RuntimeError) as error:
            _log.warning("no borrower connected through %s: %s", self._published.store_path, error)
            return
        self._connection = connection
        del connection
        atexit.register(self.stop)  # a thread that returns from gloo after the interpreter has ended aborts the process
        self._serve(self._connection)
        self._connection = None  # closing it takes gloo a while
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """Cut the borrower off, and return when this thread no longer touches the pool."""
        connection = self._connection
        if connection is not None:
            connection.cut()
        self.join()

    def _serve(self, connection: Connection) -> None:
        header = torch.empty(4, dtype=torch.int64)
        try:
            while True:
                connection.receive_next_job(header)
                _answer(connection, header.tolist(), self._rows)
        except TransferError as error:
            _log.error("closed the connection of a borrower after an invalid request: %s", error)
        except RuntimeError as error:  # gloo raises nothing more exact
            _log.info("a borrower has ended, or has stopped in the middle of a copy: %s", str(error).splitlines()[0])


def _answer(connection: Connection, header: list[int], rows: Rows) -> None:
    direction, width, pitch, num_runs = header
    if direction not in (TO_PEER, FROM_PEER) or not 0 < width <= pitch or not 0 < num_runs <= _MAX_RUNS:
        raise TransferError(f"the header {header} is invalid")
    runs = torch.empty(num_runs, 2, dtype=torch.int64)
    connection.receive(runs)
    offsets, counts = runs.numpy().T
    if not _lie_within(rows.nbytes, offsets, counts, pitch, width):
        raise TransferError(f"runs lie outside of a pool of {rows.nbytes} bytes")
    all_rows = _row_offsets(offsets, counts, np.full_like(counts, pitch))
    if direction == FROM_PEER:
        connection.send_rows(rows, all_rows, width)
    else:
        connection.receive_rows(rows, all_rows, width)
        connection.send(torch.zeros(1, dtype=torch.int64))


class _Exchange:
    """One direction of a job, with one peer."""

    def __init__(
        self,
        link: int,
        connection: Connection,
        direction: int,
        peer_runs: Int64Array,  # [n, 2]
        pitch_bytes: int,
        width_bytes: int,
        local_rows: Int64Array,
    ) -> None:
        self.direction = direction
        self._link = link
        self._connection = connection
        self._header = np.array([direction, width_bytes, pitch_bytes, len(peer_runs)], np.int64)
        self._peer_runs = peer_runs
        self._local_rows = local_rows

    def perform(self, rows: Rows) -> None:
        try:
            self._perform(rows)
        except RuntimeError as error:  # gloo raises nothing more exact
            raise TransferError(str(error), (self._link,)) from error

    def _perform(self, rows: Rows) -> None:
        connection, width = self._connection, int(self._header[1])
        connection.send(torch.from_numpy(self._header))
        connection.send(torch.from_numpy(self._peer_runs))
        if self.direction == TO_PEER:
            connection.send_rows(rows, self._local_rows, width)
            connection.receive(torch.empty(1, dtype=torch.int64))
        else:
            connection.receive_rows(rows, self._local_rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetPeer(PeerHandle):
    """A lender that has connected."""

    connection: Connection


def _row_offsets(offsets: Int64Array, counts: Int64Array, pitches: Int64Array) -> Int64Array:
    """Return the offset of every row of runs of `counts` rows."""
    within: Int64Array = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: Int64Array = np.repeat(offsets, counts) + within * np.repeat(pitches, counts)
    return rows


def _lie_within(
    nbytes: int, offsets: Int64Array, counts: Int64Array, pitches: Int64Array | int, width_bytes: int
) -> bool:
    """Return whether every run lies in a pool of `nbytes`."""
    most = nbytes // np.maximum(pitches, 1) + 1  # rows that fit; keeps the product below from overflowing
    inside = (offsets >= 0) & (counts >= 0) & (counts <= most) & (offsets <= nbytes)
    ends = offsets + (np.minimum(counts, most) - 1) * pitches + width_bytes
    return width_bytes <= nbytes and bool((inside & ((ends <= nbytes) | (counts == 0))).all())
