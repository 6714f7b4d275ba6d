"""What an engine does that could borrow, while nobody lends to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.models.config import DecoderConfig
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import make_checkpoint

BLOCK_SIZE = 16
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    directory = tmp_path_factory.mktemp("lonely")
    make_checkpoint(directory, "llama")
    (group,) = DecoderConfig.from_pretrained(directory).kv_groups(BLOCK_SIZE, "float32")
    link = LinkGeometry(0, 0, 1, 1, group.block_bytes, 8 * NUM_BLOCKS, 0)
    lending = LendingSpec(
        leases_address=f"ipc://{directory}/leases",
        lenders=[PeerSpec("nobody", f"ipc://{directory}/nobody", [link])],
        borrowers=[],
        budget_bytes=0,
        window_s=1.0,
        policy="total",
        transport="shm",
        stream_buffers=1,
        rendezvous=str(directory),
        max_wait_s=0.3,
    )
    with EngineProcess(
        directory,
        kv_bytes=NUM_BLOCKS * group.block_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=2 * NUM_BLOCKS * BLOCK_SIZE,
        lending=lending,
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
    assert error.status == 503
    engine.wait(running)
