"""Both transports, with lenders in processes of their own."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftkv.cache.pool import Pool
from swiftkv.errors import TransferError
from swiftkv.transport.base import Runs, Transport
from swiftkv.transport.p2p import P2pTransport
from swiftkv.transport.rendezvous import find_pool
from swiftkv.transport.select import TransportKind, open_transport
from swiftkv.transport.shm import ShmTransport
from tests.support.lender import Lender, pool_of
from tests.support.runs import LayerMoves, layer_moves

NUM_BYTES = 2 << 20
NUM_LINKS = 3
WIDTH, LAYERS = 4096, 4
BLOCK = WIDTH * LAYERS


@dataclass(frozen=True, slots=True)
class Attached:
    """A borrower with links 0 to 2 to three pools of one lender."""

    pool: torch.Tensor
    transport: Transport
    lender: Lender

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.pool, *self.lender.pools):
            tensor.random_(generator=generator)


@pytest.fixture(scope="module", params=["shm", "shm-2-threads", "p2p"])
def attached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    directory = tmp_path_factory.mktemp("stores")
    kind: TransportKind = "p2p" if request.param == "p2p" else "shm"
    pool = pool_of(NUM_BYTES)
    with Lender([directory / str(link) for link in range(NUM_LINKS)], NUM_BYTES, serve=kind == "p2p") as lender:
        transport = open_transport(kind, pool, num_threads=2 if request.param == "shm-2-threads" else 1)
        for link, handle in enumerate(lender.handles):
            transport.attach(link, handle)
        assert not list(directory.iterdir()), "the rendezvous is over"
        yield Attached(pool.tensor, transport, lender)
        transport.close()


@pytest.fixture(params=["shm", "p2p"])
def kind(request: pytest.FixtureRequest) -> TransportKind:
    kind: TransportKind = request.param
    return kind


def runs(*rows: tuple[int, int, int, int, int]) -> Runs:
    return Runs(np.array(rows, np.int64).reshape(-1, 5), WIDTH, BLOCK)


def perform(transport: Transport, to_peer: Runs | None, from_peer: Runs | None, layer: int = 0) -> None:
    transport.wait(transport.submit(to_peer, from_peer, layer))


def copy_naively(moves: LayerMoves, pool: np.ndarray, peers: list[np.ndarray]) -> None:
    shift = moves.layer * moves.width_bytes
    for link, peer_offset, local_offset, count, staged in moves.runs.tolist():
        for i in range(count):
            theirs = peer_offset + shift + i * moves.block_bytes
            ours = local_offset + (i * moves.width_bytes if staged else shift + i * moves.block_bytes)
            peer_row = peers[link][theirs : theirs + moves.width_bytes]
            our_row = pool[ours : ours + moves.width_bytes]
            if moves.to_peer:
                peer_row[:] = our_row
            else:
                our_row[:] = peer_row


@given(moves=layer_moves(max_width_bytes=4096), seed=st.integers(0, 1 << 20))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_runs_copy_what_numpy_would(attached: Attached, moves: LayerMoves, seed: int) -> None:
    attached.fill(seed)
    pool, peers = attached.pool.numpy().copy(), [peer.numpy().copy() for peer in attached.lender.pools]
    copy_naively(moves, pool, peers)
    chosen = Runs(moves.runs, moves.width_bytes, moves.block_bytes)
    to_peer, from_peer = (chosen, None) if moves.to_peer else (None, chosen)
    perform(attached.transport, to_peer, from_peer, moves.layer)
    assert np.array_equal(attached.pool.numpy(), pool)
    for actual, expected in zip(attached.lender.pools, peers, strict=True):
        assert np.array_equal(actual.numpy(), expected)


def test_one_layer_models_and_odd_sizes(attached: Attached) -> None:
    """Rows that lie side by side on both sides, more of them than one portion, and none a multiple of anything."""
    for width, count, peer_at, ours_at in [(1, 7, 3, 5), (1003, 2001, 13, 7), (500_001, 3, 1, 0), (64, 20_000, 64, 0)]:
        attached.fill(width)
        table = Runs(np.array([[1, peer_at, ours_at, count, 0]], np.int64), width, width)
        expected = attached.lender.pools[1].clone()
        expected[peer_at : peer_at + width * count] = attached.pool[ours_at : ours_at + width * count]
        perform(attached.transport, table, None)
        assert torch.equal(attached.lender.pools[1], expected)


def test_jobs_run_in_order(attached: Attached) -> None:
    """Each job copies on what the one before brought, and only the last is waited for."""
    attached.fill(1)
    count, steps = 64, 6
    original = attached.pool[: count * WIDTH].clone()
    ticket = 0
    for step in range(steps):
        link = step % NUM_LINKS
        slots, next_slots = step * count * WIDTH, (step + 1) * count * WIDTH
        there = runs((link, step * BLOCK, slots, count, 1))
        back = runs((link, step * BLOCK, next_slots, count, 1))
        attached.transport.submit(there, None, step % LAYERS)
        ticket = attached.transport.submit(None, back, step % LAYERS)
    attached.transport.wait(ticket)
    assert torch.equal(attached.pool[steps * count * WIDTH :][: count * WIDTH], original)


def test_a_job_writes_to_peers_before_it_reads(attached: Attached) -> None:
    attached.fill(2)
    count = 24
    peer_before = attached.lender.pools[0].clone()
    out = runs(*[(0, i * BLOCK, i * BLOCK, 1, 0) for i in range(count)])
    back = runs((0, 0, 2 * count * BLOCK, count, 0))
    perform(attached.transport, out, back, layer=2)
    ours = attached.pool[: 4 * count * BLOCK].view(-1, LAYERS, WIDTH)
    assert torch.equal(ours[2 * count : 3 * count, 2], ours[:count, 2])
    theirs = attached.lender.pools[0].view(-1, LAYERS, WIDTH)
    assert torch.equal(theirs[:count, [0, 1, 3]], peer_before.view(-1, LAYERS, WIDTH)[:count, [0, 1, 3]])


MISTAKES = {
    "peer before": ((0, -1, 0, 1, 0), 0),
    "peer behind": ((0, NUM_BYTES - BLOCK + 1, 0, 1, 0), 3),
    "peer last row": ((0, 0, 0, NUM_BYTES // BLOCK + 1, 1), 0),
    "local before": ((0, 0, -8, 1, 1), 0),
    "local behind": ((0, 0, NUM_BYTES - WIDTH + 8, 1, 1), 0),
    "local last row": ((0, 0, BLOCK, NUM_BYTES // BLOCK, 0), 3),
    "count": ((0, 0, 0, -1, 0), 0),
    "huge count": ((0, 0, 0, 1 << 62, 0), 0),
    "huge offset": ((0, (1 << 63) - 1, 0, 1, 0), 1),
    "layer": ((0, 0, 0, 1, 0), LAYERS),
    "negative layer": ((0, 0, 0, 1, 0), -1),
    "link": ((7, 0, 0, 1, 0), 0),
}


@pytest.mark.parametrize("to_peer", [True, False])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_out_of_bounds_is_an_error_and_copies_nothing(mistake: str, to_peer: bool, attached: Attached) -> None:
    attached.fill(3)
    before = [tensor.clone() for tensor in (attached.pool, *attached.lender.pools)]
    row, layer = MISTAKES[mistake]
    good, bad = (1, 0, 0, 4, 0), runs((0, 0, 0, 2, 0), row)
    failed = attached.transport.submit(*((bad, None) if to_peer else (None, bad)), layer)
    fine = attached.transport.submit(None, runs(good), 0)
    with pytest.raises(TransferError) as failure:
        attached.transport.wait(failed)
    assert failure.value.links == (() if "layer" in mistake else (row[0],))
    attached.transport.wait(failed)  # said once
    attached.transport.wait(fine)
    before[0].view(-1, LAYERS, WIDTH)[:4, 0] = before[2].view(-1, LAYERS, WIDTH)[:4, 0]
    for tensor, expected in zip((attached.pool, *attached.lender.pools), before, strict=True):
        assert torch.equal(tensor, expected)


def test_settling_forgets_failures(attached: Attached) -> None:
    ticket = attached.transport.submit(runs((7, 0, 0, 1, 0)), None, 0)
    attached.transport.settle()
    attached.transport.wait(ticket)


def test_every_job_is_on_the_books(attached: Attached) -> None:
    attached.transport.settle()
    attached.transport.take_timings()
    out, back = runs((0, 0, 0, 5, 1), (1, 0, 0, 2, 0)), runs((2, 0, 0, 3, 0))
    tickets = [attached.transport.submit(a, b, 1) for a, b in [(out, None), (None, back), (out, back), (None, None)]]
    attached.transport.settle()
    timings = attached.transport.take_timings()
    assert timings["ticket"].tolist() == tickets == list(range(tickets[0], tickets[0] + 4))
    assert timings["to_peer_bytes"].tolist() == [7 * WIDTH, 0, 7 * WIDTH, 0]
    assert timings["from_peer_bytes"].tolist() == [0, 3 * WIDTH, 3 * WIDTH, 0]
    assert [seconds > 0 for seconds in timings["to_peer_s"][:3].tolist()] == [True, False, True]
    assert [seconds > 0 for seconds in timings["from_peer_s"][:3].tolist()] == [False, True, True]
    for before, after in itertools.pairwise(timings[:3]):
        assert before["begin_s"] + before["to_peer_s"] + before["from_peer_s"] <= after["begin_s"]
    assert not len(attached.transport.take_timings())


@contextmanager
def paired(transport: Transport, pool: Pool, store: Path) -> Iterator[tuple[torch.Tensor, Transport, Lender]]:
    """A borrower, and a lender of its own, attached as link 0."""
    with Lender([store], NUM_BYTES, serve=isinstance(transport, P2pTransport)) as lender:
        transport.attach(0, lender.handles[0])
        yield pool.tensor, transport, lender
        transport.close()


@pytest.fixture
def pair(kind: TransportKind, tmp_path: Path) -> Iterator[tuple[torch.Tensor, Transport, Lender]]:
    pool = pool_of(NUM_BYTES)
    with paired(open_transport(kind, pool), pool, tmp_path / "store") as pair:
        yield pair


def round_trip(pool: torch.Tensor, transport: Transport, seed: int) -> bool:
    pool[: BLOCK * 8].random_(generator=torch.Generator().manual_seed(seed))
    perform(transport, runs((0, 0, 0, 8, 0)), runs((0, 0, 8 * BLOCK, 8, 0)), layer=1)
    ours = pool[: 16 * BLOCK].view(2, 8, LAYERS, WIDTH)
    return torch.equal(ours[0, :, 1], ours[1, :, 1])


def test_a_peer_that_is_killed(kind: TransportKind, pair: tuple[torch.Tensor, Transport, Lender]) -> None:
    pool, transport, lender = pair
    assert round_trip(pool, transport, 1)
    lender.kill()
    for seed in (2, 3):
        if kind == "shm":
            assert round_trip(pool, transport, seed)
        else:
            with pytest.raises(TransferError):
                round_trip(pool, transport, seed)
    transport.detach(0)
    with pytest.raises(TransferError, match="link 0 is not attached"):
        round_trip(pool, transport, 4)


def test_a_peer_that_is_killed_in_the_middle_of_a_copy(
    kind: TransportKind, pair: tuple[torch.Tensor, Transport, Lender]
) -> None:
    _, transport, lender = pair
    transport.wait(transport.submit(runs((0, 0, 0, 100, 1)), None, 0))
    stop(lender)  # so that two-sided copies are in the middle of their way for as long as it takes
    tickets = [transport.submit(runs((0, 0, 0, 100, 1)), None, i % LAYERS) for i in range(400)]
    lender.kill()
    if kind == "p2p":
        with pytest.raises(TransferError):
            transport.wait(tickets[-1])
    transport.settle()


def test_the_link_that_failed_is_named_and_the_others_go_on(kind: TransportKind, tmp_path: Path) -> None:
    pool = pool_of(NUM_BYTES)
    transport = open_transport(kind, pool)
    is_served = kind == "p2p"
    with (
        Lender([tmp_path / "dead"], NUM_BYTES, serve=is_served) as dead,
        Lender([tmp_path / "other"], NUM_BYTES, serve=is_served) as other,
    ):
        for link, lender in enumerate((dead, other)):
            transport.attach(link, lender.handles[0])
        dead.kill()
        if kind == "shm":  # where its memory is there until then
            transport.detach(0)
        for order in ((0, 1), (1, 0)):
            both = runs(*((link, 0, link * 8 * BLOCK, 8, 0) for link in order))
            for directions in ((both, None), (None, both)):
                with pytest.raises(TransferError) as failure:
                    perform(transport, *directions)
                assert failure.value.links == (0,)
        perform(transport, runs((1, 0, 0, 8, 0)), None)
        assert torch.equal(other.pools[0].view(-1, LAYERS, WIDTH)[:8, 0], pool.tensor.view(-1, LAYERS, WIDTH)[:8, 0])
        transport.close()


def stop(lender: Lender) -> None:
    lender.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, lender.process.pid, os.WSTOPPED)


def test_a_peer_that_is_stopped(kind: TransportKind, tmp_path: Path) -> None:
    """It is waited for longer than the time that is given to connecting."""
    pool, connect_timeout_s = pool_of(NUM_BYTES), 5.0
    transport = P2pTransport(pool, connect_timeout_s) if kind == "p2p" else ShmTransport(pool)
    with paired(transport, pool, tmp_path / "store") as (tensor, _, lender):
        stop(lender)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(round_trip(tensor, transport, 1)))
        thread.start()
        thread.join(connect_timeout_s + 0.5 if kind == "p2p" else None)
        assert thread.is_alive() == (kind == "p2p")
        lender.process.send_signal(signal.SIGCONT)
        thread.join()
        assert answers == [True]


def test_closing_does_not_wait_for_a_peer_that_is_stopped(
    kind: TransportKind, pair: tuple[torch.Tensor, Transport, Lender]
) -> None:
    _, transport, lender = pair
    stop(lender)
    transport.submit(runs((0, 0, 0, 8, 1)), None, 0)
    transport.close()


@pytest.mark.parametrize("detached", [True, False])
def test_a_lender_ends_as_it_likes(
    detached: bool, kind: TransportKind, pair: tuple[torch.Tensor, Transport, Lender]
) -> None:
    """With and without a borrower on the other side, its threads let go in time for a clean exit."""
    pool, transport, lender = pair
    assert round_trip(pool, transport, 1)
    if detached:
        transport.detach(0)
    assert lender.process.stdin is not None
    lender.process.stdin.close()
    assert lender.process.wait() == 0


def test_a_link_serves_another_lender_later(
    kind: TransportKind, pair: tuple[torch.Tensor, Transport, Lender], tmp_path: Path
) -> None:
    pool, transport, lender = pair
    assert round_trip(pool, transport, 1)
    transport.detach(0)
    lender.kill()
    with Lender([tmp_path / "next"], NUM_BYTES, serve=kind == "p2p") as other:
        transport.attach(0, other.handles[0])
        assert round_trip(pool, transport, 2)
        assert other.pools[0].any()


def test_nobody_there(kind: TransportKind, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no pool was published"):
        find_pool(tmp_path / "nobody", timeout_s=0.1)
    pool = pool_of(NUM_BYTES)
    transport = P2pTransport(pool, connect_timeout_s=0.2) if kind == "p2p" else ShmTransport(pool)
    with Lender([tmp_path / "store"], NUM_BYTES, serve=False) as lender:
        handle = lender.handles[0]
    with pytest.raises(TransferError):
        transport.attach(0, handle)
    transport.close()
