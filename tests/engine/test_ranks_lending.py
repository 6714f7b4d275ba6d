"""An engine of several ranks that borrows: its tokens are those without lending, whatever fails on one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from swiftkv.cache.geometry import KVGroup
from swiftkv.lease.messages import Accept, Detached, Hello, LinkGeometry, Offer
from swiftkv.lease.process import Identity
from swiftkv.models.registry import read_config
from swiftkv.transport.base import HostMemory
from swiftkv.transport.rendezvous import publish_pool
from tests.engine.engine_process import EngineProcess
from tests.engine.test_engine_lending import identity_of, lender_of
from tests.engine.test_ranks import followers
from tests.support.checkpoints import make_checkpoint
from tests.support.lender import Lender, host_memory, mapped_inodes, pool_of
from tests.support.lender_by_hand import LenderByHand, borrowing_over
from tests.support.node_process import wait_for

NUM_RANKS = 2
BLOCK_SIZE, NUM_BLOCKS = 16, 12
MAX_MODEL_LEN = 320
NUM_EXTENTS, MEU_M = 24, 2
PROMPTS = [[3 + i * (i + seed) % 311 for i in range(230)] for seed in range(3)]
"""Together more than twice what the pool holds."""
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "llama")
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of ranks that have room for everything."""
    options = {"tensor_parallel_size": NUM_RANKS, "max_model_len": MAX_MODEL_LEN}
    with EngineProcess(checkpoint, kv_bytes=1 << 22, **options) as engine:
        return [answer.token_ids for answer in engine.generate(PROMPTS, max_tokens=NUM_TOKENS)]


def kv_group(checkpoint: Path) -> KVGroup:
    """Return the KV group of one rank."""
    (group,) = read_config(checkpoint).of_rank(NUM_RANKS).kv_groups(BLOCK_SIZE, "float32")
    return group


@contextmanager
def borrower(checkpoint: Path, directory: Path, **options: object) -> Iterator[EngineProcess]:
    """Each rank's pool holds less than one prompt; an extent two blocks of all ranks, and one that is wasted."""
    group = kv_group(checkpoint)
    extent_bytes = (NUM_RANKS * MEU_M + 1) * group.block_bytes
    link = LinkGeometry(0, 0, 1, MEU_M, extent_bytes, NUM_EXTENTS, 0, 1)
    lending = borrowing_over(link, directory)
    with EngineProcess(
        checkpoint,
        kv_bytes=NUM_BLOCKS * group.block_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=NUM_RANKS,
        lending=lending,
        **options,
    ) as engine:
        yield engine


@contextmanager
def lender_to(engine: EngineProcess, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[LenderByHand]:
    with closing(LenderByHand(lender_of(engine).leases_address, context)) as lender:
        yield lender


def lend(lender: LenderByHand, process: Lender, path: Path, extents: list[int], epoch: int = 1) -> None:
    lender.be_attached(identity_of(process), path)
    lender.say(Offer, extents, [epoch] * len(extents))
    lender.receive(Accept)


def tokens(engine: EngineProcess) -> list[list[int]]:
    answers = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert not any(answer.error for answer in answers)
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_are_those_without_lending_and_each_rank_has_its_part_of_every_block(
    is_ahead: bool, checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """And when the lender is killed, nothing of it stays mapped."""
    extents = [*range(NUM_EXTENTS)]
    with (
        borrower(checkpoint, tmp_path, async_scheduling=is_ahead) as engine,
        zmq.Context() as context,
        Lender([tmp_path / "store"], NUM_EXTENTS * 5 * kv_group(checkpoint).block_bytes, serve=False) as process,
        lender_to(engine, context) as lender,
    ):
        processes = [engine.process.pid, *(rank.pid for rank in followers(engine))]
        assert [pid for pid, _ in lender.hello.others] == processes[1:]
        lend(lender, process, tmp_path / "store", extents)
        assert tokens(engine) == expected
        parts = process.pools[0].view(NUM_EXTENTS, NUM_RANKS * MEU_M + 1, -1).any(dim=-1)
        borrowed = parts[:, : NUM_RANKS * MEU_M].view(NUM_EXTENTS, NUM_RANKS, MEU_M)
        assert borrowed.sum() >= NUM_EXTENTS
        assert torch.equal(borrowed[:, 0], borrowed[:, 1])
        assert not parts[:, -1].any()
        inode = host_memory(process.handles[0]).inode
        assert all(inode in mapped_inodes(pid) for pid in processes)
        process.kill()
        wait_for("its pool to be let go of", lambda: not any(inode in mapped_inodes(pid) for pid in processes))
        [short] = engine.generate([PROMPTS[0][:100]])
        assert not short.error


def test_a_copy_that_fails_on_one_rank_costs_the_leases_and_no_token(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """The pool of the first lender is so short that the last extent has no room for the part of the second rank."""
    block_bytes = kv_group(checkpoint).block_bytes
    short = (NUM_EXTENTS - 1) * 5 * block_bytes + MEU_M * block_bytes
    with (
        borrower(checkpoint, tmp_path) as engine,
        zmq.Context() as context,
        lender_to(engine, context) as lender,
    ):
        with Lender([tmp_path / "short"], short, serve=False) as process:
            lend(lender, process, tmp_path / "short", [*range(NUM_EXTENTS - 8, NUM_EXTENTS)])
            requests = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
            lender.receive(Detached)
            inode = host_memory(process.handles[0]).inode
            ranks = followers(engine)
            wait_for("it to be detached", lambda: not any(inode in mapped_inodes(rank.pid) for rank in ranks))
        with Lender([tmp_path / "long"], NUM_EXTENTS * 5 * block_bytes, serve=False) as process:
            lender.hello = lender.receive(Hello)
            lend(lender, process, tmp_path / "long", [*range(NUM_EXTENTS)])
            assert [answer.token_ids for answer in engine.wait(requests)] == expected


def test_a_pool_that_a_rank_cannot_attach_is_attached_by_none_and_tried_again(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """The lender, which is this process, has two ranks, too, the second of which names memory that is not there."""
    me = Identity.of_this_process("a")
    pools = [pool_of(NUM_EXTENTS * 5 * kv_group(checkpoint).block_bytes) for _ in range(2)]
    there = HostMemory(me.pid, *pools[1].identity())
    with borrower(checkpoint, tmp_path) as engine, zmq.Context() as context, lender_to(engine, context) as lender:
        processes = [engine.process.pid, *(rank.pid for rank in followers(engine))]
        publish_pool(tmp_path / "wrong", pools[0], [replace(there, inode=0)])
        lender.welcome(me, tmp_path / "wrong")
        while lender.hello.attempt == 1:
            lender.hello = lender.receive(Hello)
        inodes = {pool.identity()[2] for pool in pools}
        wait_for("it to be detached", lambda: not any(inodes & mapped_inodes(pid) for pid in processes))
        publish_pool(tmp_path / "right", pools[0], [there])
        lender.be_attached(me, tmp_path / "right")
        lender.say(Offer, [*range(NUM_EXTENTS)], [1] * NUM_EXTENTS)
        lender.receive(Accept)
        assert tokens(engine) == expected
        used = [pool.tensor.view(NUM_EXTENTS, 5, -1).any(dim=-1) for pool in pools]
        assert used[0].any()
        assert torch.equal(*used)
