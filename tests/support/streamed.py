"""A `PagedRunner` whose sequences keep a random part of their blocks in other pools, as a scheduler would plan it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from swiftkv.cache.pool import Pool
from swiftkv.master.layer_stream import CopyKind, LayerStream
from swiftkv.models.batch import ModelInput
from swiftkv.models.decoder import Decoder
from swiftkv.models.stream import KVStream
from swiftkv.transport.base import Int64Array, Transport
from tests.support.paged import PagedRunner, int32, offsets

GARBAGE = 0xFF  # all bits set is NaN in every dtype


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A block in a peer's pool."""

    link: int
    offset_bytes: int


Place = int | Borrowed  # an int is a block of our own pool


@dataclass(slots=True)
class HandMadePlan:
    """The copies of one step of one KV group."""

    num_stream_buffers: int
    runs: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)  # by kind and buffer

    @property
    def has_copies(self) -> bool:
        return any(self.runs.values())

    def add(self, kind: CopyKind, buffer: int, place: Borrowed, local_offset_bytes: int, staged: bool) -> None:
        row = [place.link, place.offset_bytes, local_offset_bytes, 1, int(staged)]
        self.runs.setdefault((kind, buffer), []).append(row)

    def copies(self, group: int, kind: CopyKind, buffer: int) -> Int64Array:
        assert group == 0
        return np.array(self.runs.get((kind, buffer), []), np.int64).reshape(-1, 5)


@dataclass(slots=True)
class Littering:
    """A layer stream that turns a buffer's contents into garbage once they are no longer needed."""

    inner: KVStream
    transport: Transport
    buffers: list[Tensor]  # the places of each stream buffer, uint8

    def before_write(self, layer: int) -> None:
        self.inner.before_write(layer)

    def after_write(self, layer: int) -> None:
        self.inner.after_write(layer)

    def after_attention(self, layer: int) -> None:
        self.transport.settle()  # its store reads the buffer
        self.buffers[layer % len(self.buffers)].fill_(GARBAGE)
        self.inner.after_attention(layer)


class StreamedRunner(PagedRunner):
    """A runner whose pool holds `num_blocks` blocks and then the places of the stream buffers, all garbage at first."""

    def __init__(
        self,
        decoder: Decoder,
        transport: Transport,
        own: Pool,
        peers: Sequence[Tensor],
        *,
        num_blocks: int,
        num_buffers: int,
        num_slots: int,
        litter: bool,
        seed: int,
    ) -> None:
        """`peers` are the pools of links 0, 1, ..., as they are mapped here; their first 48 bytes stay unused."""
        super().__init__(decoder)
        (self.group,) = decoder.kv_groups
        self.pool = own.tensor
        self.layer_stream = LayerStream(transport, [self.group])
        self.num_moves = {"spill": 0, "promotion": 0, "load": 0, "store": 0}
        self._transport, self._peers = transport, peers
        self._random = random.Random(seed)
        self._free_places: list[Place] = [*range(num_blocks)]
        for link, peer in enumerate(peers):
            peer.fill_(GARBAGE)
            last = peer.numel() - self.group.block_bytes
            self._free_places += [Borrowed(link, at) for at in range(48, last + 1, self.group.block_bytes)]
        self._random.shuffle(self._free_places)
        self._places: dict[str, list[Place]] = {}
        width = self.group.layer_block_bytes
        self._slots = [
            range((first := num_blocks * self.group.num_layers + buffer * num_slots), first + num_slots)
            for buffer in range(num_buffers)
        ]
        self.pool.fill_(GARBAGE)
        self._buffers = [self.pool[slots.start * width : slots.stop * width] for slots in self._slots]
        self._litter = litter

    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        if self._random.random() < 0.3:
            plan = HandMadePlan(0)
            left = self._plan_moves(plan)
            self.layer_stream.run_copies_only(plan)
            self._discard(left)
        for name, new in tokens.items():
            places = self._places.setdefault(name, [])
            while len(places) < -(-(self._lengths[name] + len(new)) // self.group.block_size):
                places.append(self._free_places.pop())
        plan = HandMadePlan(len(self._slots))
        left = self._plan_moves(plan)
        batch = self._streamed_batch(tokens, plan)
        for name, new in tokens.items():
            self._lengths[name] += len(new)
        with self.layer_stream.step(plan) as stream, self._littering(stream) as hooks:
            hidden = self.decoder.forward(batch, [self.pool], hooks)
        self._discard(left)
        for buffer in self._buffers:
            buffer.fill_(GARBAGE)
        logits = self.decoder.logits(hidden)
        return dict(zip(tokens, logits.split([len(new) for new in tokens.values()]), strict=True))

    @contextmanager
    def _littering(self, stream: KVStream) -> Iterator[KVStream]:
        yield Littering(stream, self._transport, self._buffers) if self._litter else stream

    def _plan_moves(self, plan: HandMadePlan) -> list[Place]:
        """Have blocks leave our pool and others come back, also into freed places; return the peers' places left."""
        vacated: list[Place] = []
        written = self._written_blocks()
        for name, index in self._random.sample(written, len(written)):
            place = self._places[name][index]
            if self._random.random() < 0.6:
                continue
            if isinstance(place, int):
                target = self._take(Borrowed)
                if target is None:
                    continue
                plan.add("spill", 0, target, place * self.group.block_bytes, staged=False)
                self.num_moves["spill"] += 1
                self._free_places.append(place)  # to be loaded into at once: the spill of each layer comes first
            else:
                home = self._take(int)
                if home is None:
                    continue
                for buffer in range(max(1, plan.num_stream_buffers)):
                    plan.add("load", buffer, place, home * self.group.block_bytes, staged=False)
                self.num_moves["promotion"] += 1
                vacated.append(place)
                target = home
            self._places[name][index] = target
        return vacated

    def _written_blocks(self) -> list[tuple[str, int]]:
        return [
            (name, index)
            for name, places in self._places.items()
            for index in range(min(len(places), -(-self._lengths[name] // self.group.block_size)))
        ]

    def _take(self, kind: type) -> Place | None:
        for index, place in enumerate(self._free_places):
            if isinstance(place, kind):
                return self._free_places.pop(index)
        return None

    def _discard(self, places: list[Place]) -> None:
        for place in places:
            assert isinstance(place, Borrowed)
            self._peers[place.link][place.offset_bytes :][: self.group.block_bytes].fill_(GARBAGE)
        self._free_places += places
        for place in self._free_places:
            if isinstance(place, int):
                self.pool[place * self.group.block_bytes :][: self.group.block_bytes].fill_(GARBAGE)

    def _streamed_batch(self, tokens: Mapping[str, Sequence[int]], plan: HandMadePlan) -> ModelInput:
        starts = {name: self._lengths[name] for name in tokens}
        tables: list[list[int]] = []
        for buffer, slots in enumerate(self._slots):
            free_slots = self._random.sample(slots, len(slots))
            if self._random.random() < 0.5:
                free_slots.sort()
            tables.append([])
            for name, new in tokens.items():
                for index, place in enumerate(self._places[name]):
                    if isinstance(place, int):
                        tables[-1].append(place * self.group.num_layers)
                        continue
                    slot = free_slots.pop(0)
                    tables[-1].append(~slot)
                    begin, end = index * self.group.block_size, (index + 1) * self.group.block_size
                    offset = slot * self.group.layer_block_bytes
                    if begin < starts[name]:
                        plan.add("load", buffer, place, offset, staged=True)
                        self.num_moves["load"] += 1
                    if end > starts[name] and begin < starts[name] + len(new):
                        plan.add("store", buffer, place, offset, staged=True)
                        self.num_moves["store"] += 1
        return ModelInput(
            token_ids=int32([token for new in tokens.values() for token in new]),
            positions=int32([starts[name] + i for name, new in tokens.items() for i in range(len(new))]),
            query_starts=int32(offsets([len(new) for new in tokens.values()])),
            context_lens=int32([starts[name] + len(new) for name, new in tokens.items()]),
            stream_tables=tuple((int32(table),) for table in tables),
            table_starts=(int32(offsets([len(self._places[name]) for name in tokens])),),
        )
