"""Two-sided copies add deadlines, proofs of who is connected, and lenders that notice when a borrower leaves."""

from __future__ import annotations

import dataclasses
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from swiftkv.errors import TransferError
from swiftkv.transport.base import PeerHandle
from swiftkv.transport.connection import BORROWER, LENDER, Connection
from swiftkv.transport.p2p import FROM_PEER, P2pTransport, serve_p2p
from swiftkv.transport.rendezvous import publish_pool
from tests.support.lender import Lender, pool_of
from tests.transport.test_transport import BLOCK, LAYERS, NUM_BYTES, WIDTH, perform, round_trip, runs


@pytest.mark.parametrize("direction", [pytest.param("to the peer", marks=pytest.mark.slow), "from the peer"])
def test_a_p2p_lender_that_stays_stopped_is_cut_off_and_can_be_attached_anew(direction: str, tmp_path: Path) -> None:
    """Only its own link fails; and when it goes on, it knows that it was left, and serves whoever comes next."""
    pool = pool_of(NUM_BYTES)
    transport = P2pTransport(pool, deadline_s=6)
    with (
        Lender([tmp_path / "first", tmp_path / "again"], NUM_BYTES, serve=True) as stopped,
        Lender([tmp_path / "other"], NUM_BYTES, serve=True) as other,
    ):
        transport.attach(0, stopped.handles[0])
        transport.attach(1, other.handles[0])
        stopped.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED)
        both = runs((0, 0, 0, 8, 0), (1, 0, 8 * BLOCK, 8, 0))
        jobs = [transport.submit(*((both, None) if direction == "to the peer" else (None, both)), 0) for _ in range(20)]
        for job in jobs:  # the first waits, and the connection is closed for the others
            with pytest.raises(TransferError) as failure:
                transport.wait(job)
            assert failure.value.links == (0,)
        perform(transport, runs((1, 0, 0, 8, 0)), None)
        transport.detach(0)
        stopped.process.send_signal(signal.SIGCONT)
        transport.attach(0, stopped.handles[1])
        assert round_trip(pool.tensor, transport, 1)
        transport.close()


def test_a_p2p_borrower_that_stays_stopped_within_a_job_is_cut_off(tmp_path: Path) -> None:
    """Then the thread that serves it ends; between jobs the thread waits for it without a limit."""
    lent = pool_of(NUM_BYTES)
    handle = publish_pool(tmp_path / "store", lent)
    server = serve_p2p(lent, handle, deadline_s=0.2)
    borrower = Connection(handle, BORROWER, connect_timeout_s=60, deadline_s=60)
    server.join(1)
    assert server.is_alive()
    borrower.send(torch.tensor([FROM_PEER, WIDTH, BLOCK, 1]))
    server.join(60)
    assert not server.is_alive()


def test_who_has_not_read_the_rendezvous_file_gets_nothing_of_a_pool(tmp_path: Path) -> None:
    """gloo's port accepts the first process that connects and speaks gloo."""
    lent = pool_of(NUM_BYTES)
    lent.tensor.fill_(7)
    handle = publish_pool(tmp_path / "store", lent)
    server = serve_p2p(lent, handle)
    with pytest.raises((RuntimeError, TransferError)):
        steal(handle)
    server.join(60)
    assert not server.is_alive()


def steal(handle: PeerHandle) -> torch.Tensor:
    """Read a row of a lender's pool without the secret."""
    stranger = Connection(dataclasses.replace(handle, secret="00" * 32), BORROWER, 60, 60)
    stranger.send(torch.tensor([FROM_PEER, WIDTH, BLOCK, 1]))
    stranger.send(torch.tensor([[0, 1]]))
    row = torch.empty(1, WIDTH, dtype=torch.uint8)
    stranger.receive(row)
    return row


def test_nobody_is_sent_anything_who_serves_no_pool(tmp_path: Path) -> None:
    handle = publish_pool(tmp_path / "store", pool_of(NUM_BYTES))
    transport = P2pTransport(pool_of(NUM_BYTES))
    with ThreadPoolExecutor(1) as impostor:
        posing = impostor.submit(Connection, dataclasses.replace(handle, secret="00" * 32), LENDER, 60, 60)
        with pytest.raises(TransferError, match="does not have the secret of the rendezvous file"):
            transport.attach(0, handle)
        assert posing.exception() is not None
    transport.close()


def test_p2p_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    transport = P2pTransport(pool_of(NUM_BYTES))
    with Lender([tmp_path / "store"], NUM_BYTES, serve=True) as lender:
        transport.attach(0, lender.handles[0])
        listening = [
            connection.laddr.ip
            for pid in (os.getpid(), lender.process.pid)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(listening) >= 2
        assert set(listening) == {"127.0.0.1"}
        transport.close()


def test_p2p_lenders_refuse_what_their_pool_has_not(tmp_path: Path) -> None:
    """The borrower's own check is deceived by a handle that promises more."""
    pool = pool_of(NUM_BYTES)
    transport = P2pTransport(pool)
    with Lender([tmp_path / "store"], NUM_BYTES, serve=True) as lender:
        transport.attach(0, dataclasses.replace(lender.handles[0], nbytes=2 * NUM_BYTES))
        assert round_trip(pool.tensor, transport, 1)
        for to_peer in (True, False):
            bad = runs((0, NUM_BYTES - BLOCK, 0, 2, 0))
            with pytest.raises(TransferError):
                perform(transport, *((bad, None) if to_peer else (None, bad)))
    transport.close()


def test_a_p2p_lender_knows_at_once_that_it_was_detached(tmp_path: Path) -> None:
    """Only then do the leases of its borrower end."""
    pool, lent = pool_of(NUM_BYTES), pool_of(NUM_BYTES)
    transport = P2pTransport(pool)
    handle = publish_pool(tmp_path / "store", lent)
    server = serve_p2p(lent, handle)
    transport.attach(0, handle)
    assert round_trip(pool.tensor, transport, 1)
    transport.detach(0)
    server.join(60)
    assert not server.is_alive()
    transport.close()


def test_copies_go_on_while_a_p2p_lender_that_is_stopped_is_met(tmp_path: Path) -> None:
    pool = pool_of(NUM_BYTES)
    transport = P2pTransport(pool, connect_timeout_s=60)
    with (
        Lender([tmp_path / "ready"], NUM_BYTES, serve=True) as ready,
        Lender([tmp_path / "stopped"], NUM_BYTES, serve=True) as stopped,
        ThreadPoolExecutor(1) as finder,
    ):
        transport.attach(0, ready.handles[0])
        stopped.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED)
        met = finder.submit(transport.meet, stopped.handles[0])
        assert all(round_trip(pool.tensor, transport, seed) for seed in range(20))
        assert not met.done()
        stopped.process.send_signal(signal.SIGCONT)
        transport.attach(1, met.result())
        perform(transport, runs((1, 0, 0, 8, 0)), None)
        assert torch.equal(stopped.pools[0].view(-1, LAYERS, WIDTH)[:8, 0], pool.tensor.view(-1, LAYERS, WIDTH)[:8, 0])
        transport.close()


def test_a_p2p_lender_that_was_met_and_forgotten_knows_it(tmp_path: Path) -> None:
    lent = pool_of(NUM_BYTES)
    transport = P2pTransport(pool_of(NUM_BYTES))
    handle = publish_pool(tmp_path / "store", lent)
    server = serve_p2p(lent, handle)
    transport.meet(handle)
    server.join(60)
    assert not server.is_alive()
    transport.close()


def test_p2p_cannot_reach_host_memory() -> None:
    transport = P2pTransport(pool_of(NUM_BYTES))
    with pytest.raises(TransferError, match="only between processes"):
        transport.attach_host(0, memoryview(bytearray(NUM_BYTES)))
    transport.close()
