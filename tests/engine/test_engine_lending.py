"""An engine that may borrow serves on while nobody lends to it, or its lender is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal

import pytest
import zmq

from swiftkv.lease.messages import Accept, Detached, Heartbeat, Hello, LendingSpec, LinkGeometry, Offer, PeerSpec
from swiftkv.lease.process import Identity, start_ticks
from swiftkv.models.registry import read_config
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.lease.lending_process import Admin, held
from tests.support.checkpoints import make_checkpoint
from tests.support.lender import Lender, host_memory, mapped_inodes
from tests.support.lender_by_hand import LenderByHand
from tests.support.node_process import wait_for

BLOCK_SIZE = 16
NUM_BLOCKS = 8
NUM_EXTENTS = 8 * NUM_BLOCKS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with borrower(tmp_path_factory.mktemp("lonely"), ["nobody"], "shm") as process:
        yield process


@contextmanager
def borrower(
    directory: Path, lenders: Sequence[str], transport: Literal["shm", "p2p"], **options: object
) -> Iterator[EngineProcess]:
    make_checkpoint(directory, "llama")
    (group,) = read_config(directory).kv_groups(BLOCK_SIZE, "float32")
    link = LinkGeometry(0, 0, 1, 1, group.block_bytes, NUM_EXTENTS, 0, 1)
    lending = LendingSpec(
        leases_address=f"ipc://{directory}/leases",
        lenders=[PeerSpec(name, f"ipc://{directory}/{name}", [link]) for name in lenders],
        borrowers=[],
        budget_bytes=0,
        window_s=1.0,
        policy="total",
        transport=transport,
        stream_buffers=1,
        rendezvous=str(directory),
        max_wait_s=0.3,
        retry_after_s=7.0,
    )
    with EngineProcess(
        directory,
        kv_bytes=NUM_BLOCKS * group.block_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=2 * NUM_BLOCKS * BLOCK_SIZE,
        lending=lending,
        **options,
    ) as process:
        yield process


def test_a_request_that_outgrows_what_is_lent_is_refused_and_the_next_is_served(engine: EngineProcess) -> None:
    [outgrown] = engine.generate([[3] * 100], max_tokens=100)
    assert outgrown.error is not None
    assert outgrown.error.status == 503
    assert len(outgrown.token_ids) == NUM_BLOCKS * BLOCK_SIZE - 100 + 1  # the last needs no room of its own
    [served] = engine.generate([[5] * 20])
    assert len(served.token_ids) == 16


def test_a_request_without_room_is_refused_in_time_although_others_keep_the_engine_busy(engine: EngineProcess) -> None:
    starved = engine.add([3] * (NUM_BLOCKS * BLOCK_SIZE + 1))
    lengths = (11, 17, 23)  # they do not end together
    running = [engine.add([length], max_tokens=length) for length in lengths]
    while not engine.answers[starved].has_ended:
        engine.take_one()
        for i, length in enumerate(lengths):
            if engine.answers[running[i]].has_ended:
                running[i] = engine.add([length], max_tokens=length)
    error = engine.answers[starved].error
    assert error is not None
    assert (error.status, error.code, error.retry_after_s) == (503, "insufficient_kv_cache", 7.0)
    engine.wait(running)


def lender_bytes(peer: PeerSpec) -> int:
    return -(-NUM_EXTENTS * peer.links[0].extent_bytes // 4096) * 4096


def identity_of(lender: Lender) -> Identity:
    return Identity("nobody", lender.process.pid, lender.process.pid, start_ticks(lender.process.pid))


def test_a_lender_that_is_killed_when_it_has_welcomed_is_not_attached_and_the_next_one_is(
    engine: EngineProcess,
) -> None:
    spec = engine.config.lending
    assert spec is not None
    directory = Path(spec.rendezvous)
    (peer,) = spec.lenders
    num_bytes = lender_bytes(peer)
    with (
        zmq.Context() as context,
        closing(LenderByHand(peer.leases_address, context)) as lender,
        closing(Admin(spec.leases_address)) as admin,
    ):
        with Lender([directory / "killed"], num_bytes, serve=False) as killed:
            me = identity_of(killed)
            killed.process.kill()
            # Nobody takes note of its end, so that its pid stays its own: it can be found, and its memory cannot.
            os.waitid(os.P_PID, killed.process.pid, os.WEXITED | os.WNOWAIT)
            lender.welcome(me, directory / "killed")
            while lender.hello.attempt == 1:
                lender.hello = lender.receive(Hello)
        wait_for("the rendezvous to be over", lambda: not (directory / "killed").exists())
        assert held(admin.show()) == [0]
        [served] = engine.generate([[5] * 20])
        assert len(served.token_ids) == 16
        with Lender([directory / "next"], num_bytes, serve=False) as following:
            lender.be_attached(identity_of(following), directory / "next")
            lender.say(Offer, [*range(NUM_EXTENTS)], [1] * NUM_EXTENTS)
            lender.receive(Accept)
            [served] = engine.generate([[3] * (NUM_BLOCKS + 4) * BLOCK_SIZE])
            assert len(served.token_ids) == 16
            pool = host_memory(following.handles[0]).inode
            assert pool in mapped_inodes(engine.process.pid)
        admin.wait_for(lambda state: held(state) == [0])
        wait_for("the pool of the dead to be let go of", lambda: pool not in mapped_inodes(engine.process.pid))


def test_copies_that_fail_cost_only_the_leases_of_the_lender_that_they_were_with(tmp_path: Path) -> None:
    """A lender stops in the middle of a step that needs two, and is killed when nothing goes on."""
    each = 8
    with borrower(tmp_path, ["a", "b"], "p2p") as engine, zmq.Context() as context, ExitStack() as stack:
        assert engine.config.lending is not None
        processes, by_hand = [], []
        for peer in engine.config.lending.lenders:
            path = tmp_path / f"{peer.name}-store"
            process = stack.enter_context(Lender([path], lender_bytes(peer), serve=True))
            lender = stack.enter_context(closing(LenderByHand(peer.leases_address, context)))
            lender.be_attached(identity_of(process), path)
            lender.say(Offer, [*range(each)], [1] * each)
            lender.receive(Accept)
            processes.append(process)
            by_hand.append(lender)
        stopped = processes[0].process
        request = engine.add([3] * 13 * BLOCK_SIZE, max_tokens=2 * BLOCK_SIZE)  # more than the pool and one of them
        while not engine.answers[request].token_ids:
            engine.take_one()
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        while engine.says_something(within_s=0.5):
            engine.take_one()
        processes[0].kill()
        engine.wait([request])  # perhaps there is no room for it any more
        lender = by_hand[1]
        lender.send(Heartbeat(lender.me.incarnation, lender.hello.sender, [each]))
        assert lender.receive(Heartbeat).extents == [each]


def test_a_lender_that_stays_stopped_is_given_up_and_attached_anew(tmp_path: Path) -> None:
    """Over p2p, where a step waits for it: then it goes on without."""
    each = 2 * NUM_BLOCKS
    with (
        borrower(tmp_path, ["a"], "p2p", watchdog_s=8) as engine,
        zmq.Context() as context,
        closing(Admin(f"ipc://{tmp_path}/leases")) as admin,
    ):
        assert engine.config.lending is not None
        (peer,) = engine.config.lending.lenders
        paths = [tmp_path / "first", tmp_path / "again"]
        with (
            Lender(paths, lender_bytes(peer), serve=True) as process,
            closing(LenderByHand(peer.leases_address, context)) as lender,
        ):
            lender.be_attached(identity_of(process), paths[0])
            lender.say(Offer, [*range(each)], [1] * each)
            lender.receive(Accept)
            process.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.process.pid, os.WSTOPPED)
            request = engine.add([3] * (NUM_BLOCKS + 2) * BLOCK_SIZE, max_tokens=5 * BLOCK_SIZE)  # more than the pool
            lender.receive(Detached)
            engine.wait([request])  # nobody else lends: there is no room for it any more
            error = engine.answers[request].error
            assert error is not None
            assert error.status == 503
            [short] = engine.generate([[5] * 20])
            assert len(short.token_ids) == 16
            state = admin.wait_for(lambda state: state.borrows[0].peer_state != "attached")
            assert state.borrows[0].peer_state == "a transfer failed"
            process.process.send_signal(signal.SIGCONT)
            lender.hello = lender.receive(Hello)
            lender.be_attached(identity_of(process), paths[1])
            lender.say(Offer, [*range(each)], [2] * each)
            lender.receive(Accept)
            [long] = engine.generate([[3] * (NUM_BLOCKS + 2) * BLOCK_SIZE])
            assert len(long.token_ids) == 16


def test_a_lender_that_contradicts_itself_ends_the_engine_and_is_not_half_believed(tmp_path: Path) -> None:
    """Two leases of one extent at a time: what lies there may be anybody's. Without its coordinator no engine lives."""
    directory = tmp_path / "engine"
    directory.mkdir()
    with (
        borrower(directory, ["a"], "shm", stderr=subprocess.PIPE) as engine,
        zmq.Context() as context,
        Lender([directory / "store"], lender_bytes(lender_of(engine)), serve=False) as process,
        closing(LenderByHand(lender_of(engine).leases_address, context)) as lender,
    ):
        lender.be_attached(identity_of(process), directory / "store")
        lender.say(Offer, [0], [1])
        lender.receive(Accept)
        lender.say(Offer, [0], [2])
        assert engine.process.wait(TIMEOUT_S) == 1
        assert engine.process.stderr is not None
        said = engine.process.stderr.read().decode()
        assert "is borrowed, and was offered anew" in said
        assert "the coordinator's thread has ended" in said


def lender_of(engine: EngineProcess) -> PeerSpec:
    assert engine.config.lending is not None
    (peer,) = engine.config.lending.lenders
    return peer
