"""The launches that a CUDA graph captures leave every byte where the eager step leaves it: here made one by one, on
pools in host memory, in Triton's interpreter."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.errors import TransferError
from swiftkv.master.graph_stream import GraphStream, ReplayedStep
from swiftkv.master.layer_stream import CopyKind, GroupCopies, LayerStream
from swiftkv.models.stream import KVStream
from swiftkv.transport.base import Int64Array, Runs
from swiftkv.transport.mappings import Mappings
from swiftkv.transport.rendezvous import publish_pool
from swiftkv.transport.shm import ShmTransport
from tests.support.lender import pool_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")

# A hybrid model's: layers alternate irregularly, and neither block size nor width is the other's.
GROUPS = (
    KVGroup((0, 3, 4), 1, 4, "float32", 16),
    KVGroup((1, 2, 5, 6), 2, 8, "bfloat16", 32, kind="window", window=64),
)
LINKS = (0, 2, 5)
NUM_BLOCKS, NUM_SLOTS = 8, 6  # of a group: whole blocks, and then slots of each of two buffers
PEER_BLOCKS = 16  # of a group, in the pool of each link


@dataclass(slots=True)
class Plan:
    """`StepCopies`, and what the step writes."""

    num_stream_buffers: int
    rows: dict[tuple[int, str, int], list[list[int]]] = field(default_factory=dict)  # by group, kind and buffer

    @property
    def has_copies(self) -> bool:
        return any(self.rows.values())

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        return np.array(self.rows.get((group, kind, buffer), []), np.int64).reshape(-1, 5)


class Place:
    """One engine's pool and the pools behind its links, and a model that reads and writes what its steps bring."""

    def __init__(self, directory: Path, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = [-(-2 * NUM_SLOTS // group.num_layers) for group in GROUPS]
        self.own = Pool([(group, NUM_BLOCKS + extra) for group, extra in zip(GROUPS, slots, strict=True)])
        self.bases = [region.base_offset_bytes for region in self.own.regions]
        self.own.tensor.random_(generator=generator)
        self.peers = {link: pool_of(PEER_BLOCKS * sum(group.block_bytes for group in GROUPS)) for link in LINKS}
        self.transport, self.mappings = ShmTransport(self.own), Mappings(self.own.tensor)
        for link, peer in self.peers.items():
            peer.tensor.random_(generator=generator)
            self.transport.attach(link, publish_pool(directory / f"{link}", peer))
            self.mappings.add(link, peer.tensor.data_ptr(), peer.nbytes)
        self.stream = LayerStream(self.transport, GROUPS)

    def compute(self, hooks: KVStream, num_buffers: int) -> list[Tensor]:
        """Return the bytes that attention of every layer finds in whole blocks and in its buffer."""
        seen = []
        for layer in range(sum(group.num_layers for group in GROUPS)):
            number = next(number for number, group in enumerate(GROUPS) if layer in group.layers)
            index = GROUPS[number].layers.index(layer)
            blocks = self.own.region_tensor(number)[:NUM_BLOCKS, index]
            slots = self.slots(number, index % num_buffers)
            hooks.before_write(layer)
            slots += layer + 1
            blocks[NUM_BLOCKS // 2 :] += layer + 1
            hooks.after_write(layer)
            seen += [blocks.clone(), slots.clone()]
            hooks.after_attention(layer)
        return seen

    def slots(self, number: int, buffer: int) -> Tensor:
        """uint8 [NUM_SLOTS, layer_block_bytes], a view."""
        group = GROUPS[number]
        first = self.bases[number] + NUM_BLOCKS * group.block_bytes + buffer * NUM_SLOTS * group.layer_block_bytes
        return self.own.tensor[first:][: NUM_SLOTS * group.layer_block_bytes].view(NUM_SLOTS, -1)

    def plan(self, source: random.Random, num_buffers: int, most: int) -> Plan:
        """Up to `most` runs of each kind, of several links, in each group. Whole blocks are loaded to where others
        left; every other of them is written in the step, as are all slots."""
        plan = Plan(num_buffers)
        for number, group in enumerate(GROUPS):
            block, width = group.block_bytes, group.layer_block_bytes
            peer_base = PEER_BLOCKS * GROUPS[0].block_bytes if number else 0
            # Pairs of consecutive blocks, for runs of one or two.
            theirs = [(link, peer_base + 2 * pair * block) for link in LINKS for pair in range(PEER_BLOCKS // 2)]
            source.shuffle(theirs)
            ours = source.sample(range(0, NUM_BLOCKS // 2, 2), NUM_BLOCKS // 4)
            pairs = source.sample(range(0, NUM_SLOTS, 2), NUM_SLOTS // 2)
            for pair in ours[: source.randint(0, most)]:
                spilled, loaded, count = theirs.pop(), theirs.pop(), source.randint(1, 2)
                at = self.bases[number] + pair * block
                plan.rows.setdefault((number, "spill", 0), []).append([*spilled, at, count, 0])
                for buffer in range(max(1, num_buffers)):
                    plan.rows.setdefault((number, "load", buffer), []).append([*loaded, at, count, 0])
            for pair in pairs[: source.randint(0, most)] if num_buffers else []:
                loaded, stored, count = theirs.pop(), theirs.pop(), source.randint(1, 2)
                kinds = source.choice([("load",), ("store",), ("load", "store")])
                for buffer in range(num_buffers):
                    at = self.slots(number, buffer)[pair].data_ptr() - self.own.tensor.data_ptr()
                    assert at % width == 0
                    for kind in kinds:
                        place = loaded if kind == "load" else stored
                        plan.rows.setdefault((number, kind, buffer), []).append([*place, at, count, 1])
        return plan


@contextmanager
def places(directory: Path, seed: int) -> Iterator[tuple[Place, Place]]:
    """Return two equal places."""
    both = []
    for name in ("eager", "graph"):
        (directory / name).mkdir()
        both.append(Place(directory / name, seed))
    yield both[0], both[1]
    for place in both:
        place.transport.close()


def assert_same(eager: Place, graph: Place) -> None:
    assert torch.equal(graph.own.tensor, eager.own.tensor)
    for link in LINKS:
        assert torch.equal(graph.peers[link].tensor, eager.peers[link].tensor)


@pytest.mark.parametrize("num_buffers", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_is_where_the_eager_step_leaves_it(num_buffers: int, seed: int, tmp_path: Path) -> None:
    """Large and small steps in turn, through the same lists: nothing of one is copied in the next."""
    source, buffers = random.Random(seed), max(1, num_buffers)
    with places(tmp_path, seed) as (eager, graph):
        launches = GraphStream(graph.stream, graph.mappings, buffers, room_blocks=64)
        num_steps = 0
        for most in (3, 1, 0, 2):
            plan = eager.plan(source, num_buffers, most)
            with eager.stream.step(plan) as hooks:
                expected = eager.compute(hooks, buffers)
            assert launches.fill(plan)
            with launches.launches() as hooks:
                seen = graph.compute(hooks, buffers)
            launches.launched()
            for ours, theirs in zip(seen, expected, strict=True):
                assert torch.equal(ours, theirs)
            assert_same(eager, graph)
            graph.stream.step_ended()
            if not plan.has_copies:
                continue
            eager.stream.step_ended()
            assert_same_books(eager.stream, graph.stream)
            num_steps += 1
        assert num_steps > 0


def assert_same_books(eager: LayerStream, graph: LayerStream) -> None:
    """Compare the timings of the last step. Copies took time; where everything runs in line, nothing waits."""
    expected, actual = eager.recent[-1], graph.recent[-1]
    timeless = {"load_s": 0.0, "store_s": 0.0, "exposed_load_s": 0.0, "exposed_store_s": 0.0}
    assert replace(actual, **timeless) == replace(expected, **timeless)
    assert (actual.load_s > 0) == (actual.load_bytes > 0)
    assert (actual.store_s > 0) == (actual.store_bytes + actual.spill_bytes > 0)
    assert actual.exposed_s == 0


def test_a_step_that_is_too_long_changes_nothing(tmp_path: Path) -> None:
    with places(tmp_path, 0) as (eager, graph):
        launches = GraphStream(graph.stream, graph.mappings, 1, room_blocks=3)
        long, short = Plan(1), Plan(1)
        long.rows[0, "load", 0] = [[0, 0, 0, 4, 0]]
        short.rows[0, "load", 0] = [[0, 0, 0, 2, 0]]
        short.rows[1, "store", 0] = [[2, 0, graph.bases[1], 1, 0]]
        assert launches.fill(short)
        assert not launches.fill(long)
        with launches.launches() as hooks:
            graph.compute(hooks, 1)
        with eager.stream.step(short) as hooks:
            eager.compute(hooks, 1)
        assert_same(eager, graph)


def test_what_is_not_there_is_refused_before_anything_is_launched(tmp_path: Path) -> None:
    with places(tmp_path, 0) as (_, graph):
        launches = GraphStream(graph.stream, graph.mappings, 1, room_blocks=8)
        beyond = graph.peers[0].nbytes
        for row, message in (([9, 0, 0, 1, 0], "links"), ([0, beyond, 0, 1, 0], "outside")):
            with pytest.raises(TransferError, match=message):
                launches.fill(Plan(1, {(0, "load", 0): [row]}))


def test_lenders_come_and_go_without_a_new_capture(tmp_path: Path) -> None:
    """Addresses are data: the link is attached to another pool between two steps."""
    with places(tmp_path, 0) as (_, graph):
        launches = GraphStream(graph.stream, graph.mappings, 1, room_blocks=8)
        width, block = GROUPS[0].layer_block_bytes, GROUPS[0].block_bytes
        plan = Plan(1, {(0, "load", 0): [[0, 0, 0, 1, 0]]})
        for link in (2, 5):
            graph.mappings.remove(0)
            graph.mappings.add(0, graph.peers[link].tensor.data_ptr(), graph.peers[link].nbytes)
            assert launches.fill(plan)
            with launches.launches() as hooks:
                graph.compute(hooks, 1)
            assert torch.equal(graph.own.tensor[:block], graph.peers[link].tensor[:block])
        assert width < block


def test_times_from_a_devices_notes() -> None:
    """Two layers, by hand: [load began, spilled, loaded, store began, stored, computing arrived], in ns."""
    width, block = 16, 32

    def copies(spill: bool, load: bool, store: bool) -> GroupCopies:
        one = Runs(np.array([[0, 0, 0, 1, 0]]), width, block)
        return GroupCopies((0, 1), one if spill else None, (one if load else None,), (one if store else None,))

    times = torch.tensor([[10, 13, 20, 40, 47, 15], [50, 52, 60, 90, 99, 70], [0, 0, 0, 0, 0, 95]])
    step = ReplayedStep((copies(spill=True, load=True, store=True),), times).timings()
    assert step.num_steps == 1
    assert (step.load_bytes, step.store_bytes, step.spill_bytes) == (2 * width, 2 * width, 2 * width)
    assert step.load_s == pytest.approx(15e-9)
    assert step.store_s == pytest.approx((3 + 2 + 7 + 9) * 1e-9)
    assert step.exposed_load_s == pytest.approx(5e-9)  # of layer 0; that of layer 1 had come in time
    assert step.exposed_store_s == pytest.approx(4e-9)  # at the end
    step = ReplayedStep((copies(spill=False, load=False, store=True),), times).timings()
    assert (step.load_s, step.load_bytes, step.exposed_load_s) == (0, 0, 0)
    assert step.store_s == pytest.approx(16e-9)
    assert step.exposed_store_s == pytest.approx((5 + 4) * 1e-9)
