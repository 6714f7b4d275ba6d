"""Replayed steps that stream leave every byte of every pool where the eager ones leave it, and so do the books."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("msgspec")  # rendezvous of pools

from swiftkv.cache.cuda_pool import CudaPool
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.cuda_graphs import DecodeGraphs
from swiftkv.master.graph_stream import GraphStream
from swiftkv.master.layer_stream import LayerStream
from swiftkv.models.batch import StepArrays
from swiftkv.models.stream import KVStream
from swiftkv.transport.peer import PeerTransport
from tests.support.decode_streams import LINKS, StreamedPools, StreamedStep

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
GROUP = KVGroup(tuple(range(5)), 2, 64, "bfloat16", 16)
POOLS = StreamedPools(GROUP, num_blocks=60, num_slots=40, peer_blocks=64)
UNLIMITED = 1 << 40
STEPS = [(2, [70, 20, 33, 5]), (1, [40, 50]), (0, [30]), (2, [17]), (1, [33, 16, 200]), (2, [150, 60]), (0, [6, 7])]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Bytes:
    """A `DecodeModel` of no sense: every layer adds to the slots of its buffer and to the later half of our blocks,
    takes its time, and tells what it finds there. What comes too early or too late is seen."""

    def __init__(self, pool: CudaPool) -> None:
        width = GROUP.layer_block_bytes
        self._blocks = pool.tensor[: POOLS.num_blocks * GROUP.block_bytes].view(POOLS.num_blocks, -1, width)
        slots = pool.tensor[POOLS.num_blocks * GROUP.block_bytes : POOLS.nbytes]
        self._slots = slots.view(2, POOLS.num_slots, width)
        self._matrix = torch.randn(4096, 4096, device=DEVICE)

    def inputs(self, num_seqs: int, num_entries: int, num_tables: int) -> int:
        return num_tables

    def fill(self, step: StepArrays, inputs: int) -> None:
        assert len(step.stream_tables) == inputs

    def run(self, inputs: int, stream: KVStream) -> Tensor:
        """float64 [1, layers, 3]: sums of the blocks before and after a pause, and of the slots."""
        seen = []
        for layer in GROUP.layers:
            slots, blocks = self._slots[layer % inputs], self._blocks[:, layer]
            stream.before_write(layer)
            slots += layer + 1
            blocks[POOLS.num_blocks // 2 :] += layer + 1
            stream.after_write(layer)
            before = blocks.sum(dtype=torch.float64)
            pause = (self._matrix @ self._matrix).sum(dtype=torch.float64) * 0
            seen += [before, blocks.sum(dtype=torch.float64) + pause, slots.sum(dtype=torch.float64)]
            stream.after_attention(layer)
        return torch.stack(seen).view(1, -1, 3)


class Place:
    """Our pool and the peers', of random bytes that are the same in every one of these."""

    def __init__(self) -> None:
        self.own = CudaPool([(GROUP, -(-POOLS.nbytes // GROUP.block_bytes))], DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.own.tensor.random_(0, 256, generator=generator)
        self.peers = [torch.zeros(POOLS.peer_bytes, dtype=torch.uint8, device=DEVICE) for _ in LINKS]
        self.transport = PeerTransport(self.own)
        for link, peer in zip(LINKS, self.peers, strict=True):
            peer.random_(0, 256, generator=generator)
            self.transport.mappings.add(link, peer.data_ptr(), peer.numel())  # as an IPC handle would
        self.stream = LayerStream(self.transport, [GROUP])
        self.model = Bytes(self.own)

    def graphs(self) -> DecodeGraphs[int]:
        graphs = DecodeGraphs(self.model, DEVICE)
        graphs.capture([1, 4], UNLIMITED)
        for num_buffers in (1, 2):
            graphs.capture([1, 4], UNLIMITED, GraphStream(self.stream, self.transport.mappings, num_buffers))
        return graphs

    def eager(self, step: StreamedStep) -> Tensor:
        with self.stream.step(step) as hooks:
            return self.model.run(max(1, step.num_stream_buffers), hooks).clone()

    def tensors(self) -> list[Tensor]:
        return [self.own.tensor[: POOLS.nbytes], *self.peers]


def steps(generator: np.random.Generator) -> list[StreamedStep]:
    return [POOLS.step(lengths, num_buffers, generator, num_moved=3) for num_buffers, lengths in STEPS * 4]


def test_capturing_moves_nothing() -> None:
    """Warming up changes blocks as a step would, but copies nothing, because every list is empty."""
    place = Place()
    before = [peer.clone() for peer in place.peers]
    graphs = place.graphs()
    assert [graphs.sizes(num_buffers) for num_buffers in range(3)] == [[1, 4]] * 3
    for peer, bytes_before in zip(place.peers, before, strict=True):
        assert torch.equal(peer, bytes_before)


@pytest.mark.parametrize("waits", [True, False])
def test_replayed_steps_are_the_eager_ones(waits: bool) -> None:
    """This holds even where the host waits for none of them: each step has lists and clock times of its own."""

    def launched(stream: LayerStream) -> None:
        if waits:
            torch.cuda.synchronize()
            stream.step_ended()

    exact, graphed = Place(), Place()
    graphs = graphed.graphs()
    for ours, theirs in zip(graphed.tensors(), exact.tensors(), strict=True):
        ours.copy_(theirs)  # warming up has computed
    results = []
    asked = steps(np.random.default_rng(0))
    for step in asked:
        hidden = graphs.run(step)
        assert hidden is not None
        results.append(hidden.clone())
        launched(graphed.stream)
    expected = []
    for step in asked:
        expected.append(exact.eager(step))
        launched(exact.stream)
    assert all(torch.equal(*both) for both in zip(results, expected, strict=True))
    torch.cuda.synchronize()
    for stream in (graphed.stream, exact.stream):
        while len(stream.recent) < len(asked):
            stream.step_ended()
    for ours, theirs in zip(graphed.tensors(), exact.tensors(), strict=True):
        assert torch.equal(ours, theirs)
    assert (graphs.hits_total, graphs.misses_total) == (len(asked), 0)
    for replayed, eager in zip(graphed.stream.recent, exact.stream.recent, strict=True):
        for name in ("load_bytes", "store_bytes", "spill_bytes"):
            assert getattr(replayed, name) == getattr(eager, name)
        assert replayed.load_s > 0
        assert replayed.store_s > 0
        assert 0 <= replayed.exposed_s < 1


def test_what_nothing_hides_is_exposed() -> None:
    """Before the first layer there is nothing to compute while its blocks come."""
    place = Place()
    graphs = place.graphs()
    step = POOLS.step([600], 2, np.random.default_rng(0))
    for _ in range(5):
        assert graphs.run(step) is not None
        torch.cuda.synchronize()
        place.stream.step_ended()
    assert place.stream.recent[-1].exposed_load_s > 0


def test_what_a_graph_has_no_room_for_is_run_eagerly() -> None:
    place = Place()
    graphs = DecodeGraphs(place.model, DEVICE)
    graphs.capture([4], UNLIMITED, GraphStream(place.stream, place.transport.mappings, 1, room_blocks=10))
    generator = np.random.default_rng(1)
    assert graphs.run(POOLS.step([300], 1, generator)) is None
    assert graphs.run(POOLS.step([30], 2, generator)) is None
    assert graphs.run(POOLS.step([20], 1, generator)) is not None
    assert (graphs.hits_total, graphs.misses_total) == (1, 2)
