"""A step takes the right graph, and the graph runs that step: here without a graph, in Triton's interpreter."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.cache.pool import Pool
from swiftkv.engine.cuda_graphs import DecodeGraphs, DecoderSteps, choose_size, graph_sizes
from swiftkv.kernels.dispatch import select_ops
from swiftkv.kernels.triton_schedule import MAX_DECODE_TOKENS
from swiftkv.master.graph_stream import GraphStream
from swiftkv.master.layer_stream import LayerStream, StreamTimings
from swiftkv.models.batch import ModelInput
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.models.stream import NO_STREAM
from swiftkv.transport.mappings import Mappings
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.transport.shm import ShmTransport
from tests.support.checkpoints import make_checkpoint
from tests.support.decode_streams import LINKS, StreamedPools, StreamedStep
from tests.support.decode_toy import LAYER_BLOCK_BYTES, Step, Toy, decode_step
from tests.support.lender import pool_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")

NUM_BLOCKS = 40
CPU = torch.device("cpu")
UNLIMITED = 1 << 40


@given(max_num_seqs=st.integers(1, 2048), max_graphs=st.integers(8, 100))
def test_sizes_are_few_and_reach_every_batch(max_num_seqs: int, max_graphs: int) -> None:
    sizes = graph_sizes(max_num_seqs, max_graphs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    assert len(sizes) <= max_graphs


def test_sizes_as_documented() -> None:
    assert graph_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]
    assert graph_sizes(288)[-4:] == [248, 256, 272, 288]


@given(max_num_seqs=st.integers(1, 600), num_seqs=st.integers(1, 700))
def test_a_step_takes_the_smallest_that_holds_it(max_num_seqs: int, num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    expected = min((size for size in sizes if size >= num_seqs), default=None)
    assert choose_size(sizes, num_seqs) == expected


@pytest.mark.parametrize(("num_seqs", "size"), [(1, 1), (1, 4), (3, 4), (5, 8)])
def test_a_padded_step_is_the_step(num_seqs: int, size: int) -> None:
    """Twice into the same tensors, the shorter step second: nothing of the first is left, no other KV is written."""
    generator = np.random.default_rng(size)
    padded, exact = Toy(NUM_BLOCKS, "cpu"), Toy(NUM_BLOCKS, "cpu")
    inputs = padded.inputs(size, NUM_BLOCKS)
    for lengths in (generator.integers(1, 60, size), generator.integers(1, 90, num_seqs)):
        step = decode_step(lengths.tolist(), generator, NUM_BLOCKS)
        padded.fill(step, inputs)
        hidden, expected = padded.run(inputs), exact.eager(step)
        assert hidden.shape[0] == size
        torch.testing.assert_close(hidden[: len(lengths)], expected, atol=2e-2, rtol=2e-2)
        assert torch.equal(padded.pool, exact.pool)


def token_by_token(toy: Toy, step: Step) -> torch.Tensor:
    """Run the step's tokens one after the other, each as a step of its own."""
    rows, (table,), (starts,) = [], step.stream_tables[0], step.table_starts
    for s, (first, end) in enumerate(pairwise(step.query_starts.tolist())):
        entries = table[starts[s] : starts[s + 1]]
        for token in range(first, end):
            alone = Step(
                token_ids=step.token_ids[token : token + 1],
                positions=step.positions[token : token + 1],
                query_starts=np.array([0, 1], np.int32),
                context_lens=step.positions[token : token + 1] + np.int32(1),
                stream_tables=[[entries]],
                table_starts=[np.array([0, len(entries)], np.int32)],
            )
            rows.append(toy.eager(alone))
    return torch.cat(rows)


def test_a_step_with_drafts_is_the_step() -> None:
    """Rows of one token and of several: each token sees what is before it, those of its own row included."""
    generator = np.random.default_rng(5)
    graphed, exact = Toy(NUM_BLOCKS, "cpu"), Toy(NUM_BLOCKS, "cpu")
    graphs = DecodeGraphs(graphed, CPU, num_entries=NUM_BLOCKS)
    graphs.capture([8, 12], UNLIMITED)
    for num_new in ([1, 3, 2], [MAX_DECODE_TOKENS], [1, 1, 5, 4]):
        context_lens = [int(generator.integers(count, 90)) for count in num_new]
        step = decode_step(context_lens, generator, NUM_BLOCKS, num_new=num_new)
        hidden = graphs.run(step)
        assert hidden is not None
        torch.testing.assert_close(hidden, token_by_token(exact, step), atol=2e-2, rtol=2e-2)
        assert torch.equal(graphed.pool, exact.pool)
    for num_new in ([MAX_DECODE_TOKENS + 1], [7, 6]):  # a prompt, and more tokens than a graph has room for
        assert graphs.run(decode_step([20] * len(num_new), generator, NUM_BLOCKS, num_new=num_new)) is None
    assert (graphs.hits_total, graphs.misses_total) == (3, 1)


def interpreted_decoder(directory: Path, num_layers: int) -> Decoder:
    """float32, over the kernels of a GPU, in host memory."""
    make_checkpoint(directory, "qwen3", num_hidden_layers=num_layers, head_dim=16, hidden_size=32, intermediate_size=48)
    ops = select_ops("cuda")
    config = read_config(directory)
    return load_decoder(config, MappedWeights(directory), torch.float32, "cpu", 128, ops=ops)


def random_pool(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed)).view(torch.uint8)


def test_a_dense_decoder_is_captured_as_it_is(tmp_path: Path) -> None:
    """Three of four rows are taken; the kernels' own step is what the padded one is compared with."""
    num_blocks = 12
    decoder = interpreted_decoder(tmp_path, 2)
    (group,) = decoder.kv_groups
    pool = random_pool(num_blocks * group.block_bytes, 1)
    exact = pool.clone()
    step = decode_step([20, 1, 33], np.random.default_rng(1), num_blocks, num_layers=group.num_layers)
    expected = decoder.forward(ModelInput.from_plan(step), [exact])
    captured = DecoderSteps(decoder, [pool], torch.zeros(4, dtype=torch.int32))
    inputs = captured.inputs(4, num_entries=10, num_tables=1)
    captured.fill(step, inputs)
    torch.testing.assert_close(captured.run(inputs, NO_STREAM)[:3], expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool.view(torch.float32), exact.view(torch.float32), atol=2e-5, rtol=2e-5)


def test_a_graph_that_was_never_filled_writes_nothing() -> None:
    """Warm-up runs before there is a step."""
    toy = Toy(NUM_BLOCKS, "cpu")
    before = toy.pool.clone()
    toy.run(toy.inputs(4, NUM_BLOCKS))
    assert torch.equal(toy.pool, before)
    assert len(before) == NUM_BLOCKS * LAYER_BLOCK_BYTES


def test_decode_steps_that_run_eagerly_are_counted() -> None:
    generator = np.random.default_rng(3)
    graphs = DecodeGraphs(Toy(NUM_BLOCKS, "cpu"), CPU, num_entries=10)
    decode = decode_step([5, 6], generator, NUM_BLOCKS)
    assert graphs.run(decode) is None  # nothing is captured
    graphs.capture([2], UNLIMITED)
    assert graphs.sizes() == [2]
    assert graphs.run(replace(decode, has_copies=True)) is None  # no graph streams
    assert graphs.run(decode_step([5, 20], generator, NUM_BLOCKS, num_new=[1, 20])) is None  # a prompt
    assert graphs.run(decode_step([5, 6, 7], generator, NUM_BLOCKS)) is None
    assert graphs.run(decode_step([11 * 16], generator, NUM_BLOCKS)) is None
    assert (graphs.hits_total, graphs.misses_total) == (0, 4)
    assert graphs.run(decode) is not None
    assert (graphs.hits_total, graphs.misses_total) == (1, 4)


def test_memory_has_a_bound() -> None:
    graphs = DecodeGraphs(Toy(NUM_BLOCKS, "cpu"), CPU, num_entries=10)
    graphs.capture([1, 2], memory_limit_bytes=-1)
    assert graphs.sizes() == []


class Counted(DecodeGraphs[Any]):
    """Each graph is taken to have as many bytes as rows."""

    def _reserved_bytes(self) -> int:
        return sum(sum(variant.by_size) for variant in self._variants.values())


def test_small_batches_keep_their_graphs_where_memory_is_short() -> None:
    generator = np.random.default_rng(0)
    graphs = Counted(Toy(NUM_BLOCKS, "cpu"), CPU, num_entries=10)
    graphs.capture([1, 2, 4, 8, 16], memory_limit_bytes=20)
    assert graphs.sizes() == [1, 2]
    assert graphs.nbytes == 3
    assert graphs.run(decode_step([5, 6], generator, NUM_BLOCKS)) is not None
    assert graphs.run(decode_step([5, 6, 7], generator, NUM_BLOCKS)) is None


def test_graphs_are_dropped_together() -> None:
    """One of several on a stream takes memory with it that the others name."""
    kept: list[weakref.ref[object]] = []

    class Watched(Counted):
        def _capture_one(self, size: int, variant: Any) -> Any:
            begun = len(kept) - len(variant.by_size)
            assert all(graph() is not None for graph in kept[begun:])
            captured = super()._capture_one(size, variant)
            kept.append(weakref.ref(captured))
            return captured

    graphs = Watched(Toy(NUM_BLOCKS, "cpu"), CPU, num_entries=10)
    graphs.capture([1, 2, 4, 8, 16], memory_limit_bytes=26)
    assert [graph() is not None for graph in kept] == [False, False, False, True, True]  # 16, 8, 4; then 2, 1


class Streamed:
    """A decoder whose steps stream, with its pool, its peers', and the books."""

    def __init__(self, decoder: Decoder, pools: StreamedPools, directory: Path) -> None:
        directory.mkdir()
        (group,) = decoder.kv_groups
        own = Pool([(group, -(-pools.nbytes // group.block_bytes))])
        own.tensor.copy_(random_pool(own.nbytes, 0))
        self.pool, self.peers = own.tensor, {link: pool_of(pools.peer_bytes) for link in LINKS}
        self.transport, self.mappings = ShmTransport(own), Mappings(own.tensor)
        for link, peer in self.peers.items():
            peer.tensor.copy_(random_pool(peer.nbytes, link))
            self.transport.attach(link, publish_pool(directory / f"{link}", peer))
            self.mappings.add(link, peer.tensor.data_ptr(), peer.nbytes)
        self.layer_stream = LayerStream(self.transport, [group])
        self._decoder = decoder

    def eager(self, step: StreamedStep) -> torch.Tensor:
        with self.layer_stream.step(step) as stream:
            return self._decoder.forward(ModelInput.from_plan(step), [self.pool], stream)

    def memory(self) -> list[torch.Tensor]:
        return [self.pool.view(torch.float32), *(peer.tensor.view(torch.float32) for peer in self.peers.values())]


def test_steps_that_stream_are_the_eager_ones(tmp_path: Path) -> None:
    """Through one buffer, two, and none, large steps and small; hits are counted, and the books are kept."""
    decoder, generator = interpreted_decoder(tmp_path, 3), np.random.default_rng(2)
    (group,) = decoder.kv_groups
    pools = StreamedPools(group, num_blocks=20, num_slots=12, peer_blocks=16)
    exact, graphed = (Streamed(decoder, pools, tmp_path / name) for name in ("exact", "graphed"))
    model = DecoderSteps(decoder, [graphed.pool], torch.zeros(4, dtype=torch.int32))
    graphs = DecodeGraphs(model, CPU, num_entries=24)
    graphs.capture([3], UNLIMITED)
    for num_buffers, size, room_blocks in ((1, 3, 20), (2, 2, 30)):
        stream = GraphStream(graphed.layer_stream, graphed.mappings, num_buffers, room_blocks)
        graphs.capture([size], UNLIMITED, stream)
    assert [graphs.sizes(num_buffers) for num_buffers in range(3)] == [[3], [3], [2]]
    asked = [(1, [70, 20, 33]), (2, [40, 50]), (0, [30]), (2, [17]), (1, [5])]
    for num_buffers, context_lens in asked:
        step = pools.step(context_lens, num_buffers, generator, num_moved=2)
        hidden, expected = graphs.run(step), exact.eager(step)
        assert hidden is not None
        torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=2e-5)
        for ours, theirs in zip(graphed.memory(), exact.memory(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
        for one in (graphed, exact):
            one.layer_stream.step_ended()
    plain = pools.step([50, 3], 0, generator, num_moved=0)
    assert not plain.has_copies
    torch.testing.assert_close(graphs.run(plain), exact.eager(plain), atol=2e-5, rtol=2e-5)
    too_long = [pools.step([90, 60], num_buffers, generator, num_moved=8) for num_buffers in (1, 2)]
    for step in (*too_long, pools.step([1, 2, 3], 2, generator)):
        assert graphs.run(step) is None
        torch.testing.assert_close(graphed.eager(step), exact.eager(step), atol=2e-5, rtol=2e-5)
        for one in (graphed, exact):
            one.layer_stream.step_ended()
    assert (graphs.hits_total, graphs.misses_total) == (len(asked) + 1, 3)
    totals = [sum(one.layer_stream.recent, StreamTimings()) for one in (graphed, exact)]
    assert totals[0].num_steps == totals[1].num_steps == len(asked) + 3
    for name in ("load_bytes", "store_bytes", "spill_bytes"):
        assert getattr(totals[0], name) == getattr(totals[1], name) > 0
