"""A decoder with part of its KV in other pools gives the same logits, to the bit, as one with all of it in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.engine.rank_group import RankGroup
from swiftkv.errors import TransferError
from swiftkv.master.layer_stream import CopyKind, LayerStream
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.transport.base import EXPOSURE, Exposures, Int64Array, Transport
from swiftkv.transport.p2p import serve_p2p
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.transport.select import TransportKind, open_transport
from swiftkv.transport.shm import ShmTransport
from tests.support.checkpoints import make_checkpoint
from tests.support.lender import Lender, pool_of
from tests.support.paged import PagedRunner
from tests.support.streamed import Borrowed, HandMadePlan, StreamedRunner

CHUNKS = (7, 1, 40, 16, 1, 1, 3, 1)  # whole prompts, chunks and single tokens in one step
NUM_BLOCKS, NUM_SLOTS = 6, 24
PEER_BYTES = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(directory, "qwen3", num_hidden_layers=5)
    return directory


@cache
def load(directory: Path, dtype: str) -> Decoder:
    config = read_config(directory)
    return load_decoder(config, MappedWeights(directory), getattr(torch, dtype), "cpu", 128)


def make_prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {str(length): torch.randint(320, (length,), generator=generator).tolist() for length in (1, 16, 37, 60, 100)}


def own_pool(decoder: Decoder, num_buffers: int) -> Pool:
    (group,) = decoder.kv_groups
    return Pool([(group, NUM_BLOCKS + -(-num_buffers * NUM_SLOTS // group.num_layers))])


@contextmanager
def attached_here(
    kind: TransportKind, own: Pool, directory: Path, num_links: int
) -> Iterator[tuple[Transport, list[Tensor]]]:
    """A transport with links to pools of this very process."""
    transport, lent = open_transport(kind, own), [pool_of(PEER_BYTES) for _ in range(num_links)]
    for link, pool in enumerate(lent):
        published = publish_pool(directory / f"{link}", pool)
        if kind == "p2p":
            serve_p2p(pool, published)
        transport.attach(link, published)
    try:
        yield transport, [pool.tensor for pool in lent]
    finally:
        transport.close()


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, logits in expected.items():
        assert torch.isfinite(logits).all()
        assert torch.equal(actual[name], logits), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("kind", ["shm", "p2p"])
def test_logits_do_not_depend_on_where_blocks_lie(
    kind: TransportKind, num_buffers: int, dtype: str, checkpoint: Path, tmp_path: Path
) -> None:
    decoder, prompts = load(checkpoint, dtype), make_prompts()
    expected = PagedRunner(decoder).run(prompts, CHUNKS)
    own = own_pool(decoder, num_buffers)
    with attached_here(kind, own, tmp_path, num_links=2) as (transport, peers):
        for seed in range(2 if kind == "p2p" else 4):
            runner = StreamedRunner(
                decoder,
                transport,
                own,
                peers,
                num_blocks=NUM_BLOCKS,
                num_buffers=num_buffers,
                num_slots=NUM_SLOTS,
                litter=seed % 2 == 1,
                seed=seed,
            )
            assert_same(runner.run(prompts, CHUNKS), expected)
            assert min(runner.num_moves.values()) > 5, "a test that copies nothing shows nothing"


class LateTransport(ShmTransport):
    """Says afterwards how long was waited, as a device does: `wait_s` for each ticket."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.wait_s = 0.25
        self._waited: list[tuple[int, float]] = []

    def wait(self, ticket: int) -> None:
        super().wait(ticket)
        self._waited.append((ticket, self.wait_s))

    def take_exposures(self) -> Exposures:
        taken = np.array(self._waited, EXPOSURE)
        self._waited.clear()
        return taken


def test_steps_enter_the_books_when_they_have_ended_each_with_its_own(tmp_path: Path) -> None:
    """Two steps are launched before the first is known to have ended; one between them fails, and nobody waits for
    what it copied."""
    own, lent = Pool([(GROUP, 8)]), pool_of(PEER_BYTES)
    transport = LateTransport(own)
    transport.attach(0, publish_pool(tmp_path / "0", lent))
    streams = LayerStream(transport, [GROUP])
    loads, stores, fails = HandMadePlan(1), HandMadePlan(1), HandMadePlan(1)
    loads.add("load", 0, Borrowed(0, 48), 0, staged=True)
    for block in range(2):
        stores.add("store", 0, Borrowed(0, 48), block * GROUP.layer_block_bytes, staged=True)
    fails.add("load", 0, Borrowed(0, 48), 0, staged=True)
    fails.add("store", 0, Borrowed(9, 48), 0, staged=True)
    walk(streams, loads)
    transport.wait_s = 64.0
    with pytest.raises(TransferError):
        walk(streams, fails)
    transport.wait_s = 1.0
    walk(streams, stores)
    assert not streams.recent
    streams.step_ended()
    streams.step_ended()
    first, second = streams.recent
    num_layers, block = GROUP.num_layers, GROUP.block_bytes
    assert (first.exposed_load_s, first.exposed_store_s) == (0.25 * num_layers, 0.0)
    # For a store is waited where the next layer has no load to wait for, and again at the end.
    assert (second.exposed_load_s, second.exposed_store_s) == (0.0, 1.0 * (2 * num_layers - 1))
    assert (first.load_bytes, first.store_bytes) == (block, 0)
    assert (second.load_bytes, second.store_bytes) == (0, 2 * block)
    assert first.load_s > 0
    assert first.store_s == second.load_s == 0
    assert second.store_s > 0
    transport.close()


@pytest.mark.parametrize("kind", ["shm", "p2p"])
def test_a_lender_in_another_process(kind: TransportKind, checkpoint: Path, tmp_path: Path) -> None:
    """And when it dies: memory that is mapped goes on being there, a process that has to answer does not."""
    decoder, prompts = load(checkpoint, "bfloat16"), make_prompts()
    expected = PagedRunner(decoder).run(prompts, CHUNKS)
    own = own_pool(decoder, 2)
    with Lender([tmp_path / "a", tmp_path / "b"], PEER_BYTES, serve=kind == "p2p") as lender:
        transport = open_transport(kind, own)
        for link, handle in enumerate(lender.handles):
            transport.attach(link, handle)

        def run(seed: int) -> dict[str, Tensor]:
            runner = StreamedRunner(
                decoder,
                transport,
                own,
                lender.pools,
                num_blocks=NUM_BLOCKS,
                num_buffers=2,
                num_slots=NUM_SLOTS,
                litter=False,
                seed=seed,
            )
            return runner.run(prompts, CHUNKS)

        assert_same(run(1), expected)
        lender.kill()
        if kind == "shm":
            assert_same(run(2), expected)
        else:
            with pytest.raises(TransferError):
                run(2)
        transport.close()


class TwoGroupPlan:
    """Two buffers; what is asked for is what `rows` has, by group, kind and buffer."""

    num_stream_buffers = 2
    has_copies = True

    def __init__(self, rows: dict[tuple[int, str, int], list[int]]) -> None:
        self._rows = rows

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        row = self._rows.get((group, kind, buffer), [])
        return np.array(row, np.int64).reshape(-1, 5)


def test_each_kv_group_counts_its_own_layers(tmp_path: Path) -> None:
    """A hybrid model's groups have blocks, slots and buffers of their own; layers alternate irregularly."""
    full, windowed = (
        KVGroup((0, 3, 4), 1, 16, "float32", 16),
        KVGroup((1, 2, 5, 6), 2, 16, "float32", 16, kind="window", window=32),
    )
    groups = (full, windowed)
    own = Pool([(full, 4), (windowed, 4)])
    bases = [region.base_offset_bytes for region in own.regions]
    with attached_here("shm", own, tmp_path, 1) as (transport, (peer,)):
        peer.random_(generator=torch.Generator().manual_seed(0))
        before = peer.clone()
        peer_at = [64, 64 + full.block_bytes]
        stored_at = [4096 * 16, 4096 * 32]
        rows = {}
        for number, group in enumerate(groups):
            for buffer in range(2):
                slot = bases[number] + buffer * group.layer_block_bytes
                rows[number, "load", buffer] = [0, peer_at[number], slot, 1, 1]
                rows[number, "store", buffer] = [0, stored_at[number], slot, 1, 1]
        stream = LayerStream(transport, groups)
        with stream.step(TwoGroupPlan(rows)) as hooks:
            for layer in range(7):
                number = next(n for n, group in enumerate(groups) if layer in group.layers)
                group, index = groups[number], groups[number].layers.index(layer)
                width = group.layer_block_bytes
                hooks.before_write(layer)
                slot = own.tensor[bases[number] + index % 2 * width :][:width]
                assert torch.equal(slot, before[peer_at[number] + index * width :][:width])
                slot.fill_(layer)
                hooks.after_write(layer)
                hooks.after_attention(layer)
        for number, group in enumerate(groups):
            stored = peer[stored_at[number] :][: group.block_bytes].view(group.num_layers, -1)
            assert stored.float().mean(dim=1).tolist() == list(group.layers)
            assert torch.equal(
                peer[peer_at[number] :][: group.block_bytes], before[peer_at[number] :][: group.block_bytes]
            )


GROUP = KVGroup((0, 1, 2), 1, 16, "float32", 16)


def walk(stream: LayerStream, plan: HandMadePlan) -> None:
    with stream.step(plan) as hooks:
        for layer in GROUP.layers:
            hooks.before_write(layer)
            hooks.after_write(layer)
            hooks.after_attention(layer)


@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("kind", ["spill", "load", "store"])
@pytest.mark.parametrize("transport_kind", ["shm", "p2p"])
def test_a_copy_that_fails_ends_the_step_with_nothing_in_flight(
    transport_kind: TransportKind, kind: CopyKind, num_buffers: int, tmp_path: Path
) -> None:
    own = Pool([(GROUP, 8)])
    with attached_here(transport_kind, own, tmp_path, 1) as (transport, _):
        stream = LayerStream(transport, [GROUP])
        good, bad = HandMadePlan(num_buffers), HandMadePlan(num_buffers)
        for plan, link in ((good, 0), (bad, 9)):
            for buffer in range(num_buffers):
                row = [link, 0, buffer * GROUP.layer_block_bytes, 1, int(kind != "spill")]
                plan.runs[kind, buffer] = [row]
        with pytest.raises(TransferError, match="link 9"):
            walk(stream, bad)
        assert not stream.recent
        walk(stream, good)
        stream.step_ended()
        assert [step.num_steps for step in stream.recent] == [1]


def test_a_copy_that_fails_on_one_rank_fails_on_all_at_the_end_of_the_step(tmp_path: Path) -> None:
    """They go on until then: the others wait for the part of each layer of the one that failed. So do those that have
    no copies left wait for those that have."""
    layers: list[tuple[int, int]] = []

    def make_steps(rank: int) -> None:
        group = RankGroup(tmp_path / "group", rank, 2, torch.device("cpu"))
        group.begin(60)
        (tmp_path / str(rank)).mkdir()
        with attached_here("shm", Pool([(GROUP, 8)]), tmp_path / str(rank), 1) as (transport, _):
            stream = LayerStream(transport, [GROUP], group)
            for bad_rank in (1, 0, None):
                plan = HandMadePlan(1)
                for kind in ("load", "store"):
                    plan.runs[kind, 0] = [[9 if rank == bad_rank else 0, 0, 0, 1, 1]]
                expects = contextlib.nullcontext() if bad_rank is None else pytest.raises(TransferError)
                with expects as error, stream.step(plan) as hooks:
                    for layer in GROUP.layers:
                        hooks.before_write(layer)
                        layers.append((rank, layer))
                        assert group.all_gather(torch.tensor([layer])).tolist() == [[layer], [layer]]
                        hooks.after_write(layer)
                        hooks.after_attention(layer)
                if error is not None:
                    assert error.value.links == ()
                    assert ("link 9" if rank == bad_rank else f"rank {bad_rank}") in str(error.value)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(make_steps, range(2)))
    assert sorted(layers) == [(rank, layer) for rank in range(2) for layer in GROUP.layers for _ in range(3)]


def test_books(tmp_path: Path) -> None:
    own = Pool([(GROUP, 8)])
    width = GROUP.layer_block_bytes
    with attached_here("shm", own, tmp_path, 1) as (transport, _):
        stream = LayerStream(transport, [GROUP])
        plan = HandMadePlan(2)
        plan.runs["spill", 0] = [[0, 0, 0, 3, 0]]
        for buffer in range(2):
            plan.runs["load", buffer] = [[0, 3 * GROUP.block_bytes, (12 + buffer) * width, 1, 1], [0, 0, 0, 1, 0]]
            plan.runs["store", buffer] = [[0, 3 * GROUP.block_bytes, (12 + buffer) * width, 1, 1]]
        walk(stream, HandMadePlan(0))
        walk(stream, plan)
        walk(stream, plan)
        assert not stream.recent
        stream.step_ended()
        stream.step_ended()
        first, second = stream.recent
        assert (first.spill_bytes, first.load_bytes, first.store_bytes) == (9 * width, 6 * width, 3 * width)
        assert first.load_s > 0
        assert first.store_s > 0
        assert first.exposed_s == first.exposed_load_s + first.exposed_store_s > 0
        assert (first + second).num_steps == 2
