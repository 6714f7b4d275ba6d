"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is a fixed sequence of kernels over fixed addresses, so there is one graph per batch size. A step takes the
smallest graph that holds it: its arrays are written into that graph's tensors, the unused rows are marked as absent,
and the graph is replayed. Context lengths are data. A sequence with a few new tokens, such as one with a draft, counts
as that many sequences that share their blocks.

Steps that copy borrowed KV have graphs of their own for each number of stream buffers, with the copies between the
layers (`master.graph_stream`).

This is xLLM's adaptive graph mode (section 4.2), for decode steps only. Steps with prompts run eagerly, because their
kernels are long. So do steps that no graph holds.

One graph has all layers. Graphs of single layers, with 2-D copies on copy engines between them, would need some forty
launches per step, and events between them. The host would then be busy while the device works, and would have to
prepare just as much.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from swiftkv.kernels.cuda_runtime import bytes_beside_torch
from swiftkv.kernels.host_copies import write
from swiftkv.kernels.triton_schedule import MAX_DECODE_TOKENS, AttentionBatch, decode_buffers, prepare_batch
from swiftkv.master.layer_stream import buffers_of
from swiftkv.models.batch import StepArrays, fill_in_sampled
from swiftkv.models.stream import NO_STREAM, KVStream

if TYPE_CHECKING:
    from swiftkv.engine.step import EngineStep
    from swiftkv.master.graph_stream import GraphStream
    from swiftkv.models.decoder import Decoder

MAX_TABLE_ENTRIES = 64 << 10
"""The most blocks of a step that a graph has room for. With more, launches are a negligible part of the step."""

log = logging.getLogger(__name__)

Inputs = TypeVar("Inputs")


class DecodeModel(Protocol[Inputs]):
    """A model whose decode step can be captured: it runs over tensors that stay where they are."""

    def inputs(self, num_tokens: int, num_entries: int, num_tables: int) -> Inputs:
        """Return tensors for any decode step of at most `num_tokens` tokens and `num_entries` blocks, still empty.

        `num_tables`: the step's block tables, which layers take in turn (`StepArrays.stream_tables`).
        """

    def fill(self, step: StepArrays, inputs: Inputs) -> None:
        """Write a decode step. Rows beyond its tokens write no KV. The host does not wait."""

    def run(self, inputs: Inputs, stream: KVStream) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. The same kernels run whatever the tensors hold."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Tensors of one batch size, on the device."""

    token_ids: Tensor  # int32 [num_tokens]
    attention: tuple[tuple[AttentionBatch, ...], ...]  # for each layer-stream buffer, for each KV group


class DecoderSteps:
    """The decode steps of a `Decoder` with Triton's attention, as a `DecodeModel`."""

    def __init__(self, model: Decoder, regions: Sequence[Tensor], last_token_ids: Tensor) -> None:
        """`regions` are the KV groups' parts of the pool, uint8, flat, on the model's device; `last_token_ids` int32
        [max_num_seqs] are the tokens that steps name by row slot."""
        self._model = model
        self._regions = tuple(regions)
        self._last_token_ids = last_token_ids

    def inputs(self, num_tokens: int, num_entries: int, num_tables: int) -> DecodeInputs:
        device = self._last_token_ids.device
        return DecodeInputs(
            torch.zeros(num_tokens, dtype=torch.int32, device=device),
            tuple(
                tuple(decode_buffers(spec, num_tokens, num_entries, device) for spec in self._model.specs)
                for _ in range(num_tables)
            ),
        )

    def fill(self, step: StepArrays, inputs: DecodeInputs) -> None:
        fill_token_ids(step, inputs.token_ids)
        positions = torch.from_numpy(step.positions)
        query_starts, context_lens = torch.from_numpy(step.query_starts), torch.from_numpy(step.context_lens)
        for tables, batches in zip(step.stream_tables, inputs.attention, strict=True):
            for spec, table, starts, batch in zip(self._model.specs, tables, step.table_starts, batches, strict=True):
                prepare_batch(
                    spec,
                    positions,
                    query_starts,
                    context_lens,
                    torch.from_numpy(table),
                    torch.from_numpy(starts),
                    into=batch,
                )

    def run(self, inputs: DecodeInputs, stream: KVStream) -> Tensor:
        token_ids = fill_in_sampled(inputs.token_ids, self._last_token_ids)
        return self._model.run_layers(token_ids, inputs.attention, self._regions, stream)


def fill_token_ids(step: StepArrays, token_ids: Tensor) -> None:
    """Write the step's token ids to the first rows of `token_ids`, on the current stream; the rest keep valid ids."""
    write(step.token_ids, token_ids)


def graph_sizes(max_num_seqs: int, max_graphs: int = 64) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, then in steps of 8, of 16 from 256 on, and `max_num_seqs` itself.

    As long as these are more than `max_graphs`, every second one of the larger sizes is dropped.
    """
    assert max_num_seqs > 0
    assert max_graphs >= 8
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs}
    ascending = sorted(size for size in sizes if size <= max_num_seqs)
    while len(ascending) > max_graphs:
        small, large = ascending[:4], ascending[4:]
        ascending = small + large[::-1][::2][::-1]  # keeps the largest
    return ascending


def choose_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """Return the smallest of the ascending `sizes` that holds `num_tokens` new tokens; `None` if none does."""
    index = bisect.bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Captured(Generic[Inputs]):
    inputs: Inputs
    replay: Callable[[], Tensor]  # returns hidden states [size, hidden_size], valid until the next replay


@dataclass(slots=True)
class _Variant(Generic[Inputs]):
    """The graphs of steps that stream through one number of buffers.

    They must be dropped together. All of them refer to cuBLAS's workspace for the capture stream by its address, and
    torch frees that workspace with the first graph (github.com/pytorch/pytorch/issues/193402). Later graphs get a new
    memory pool.
    """

    stream: GraphStream | None  # None: nothing is copied
    memory: Any = None  # shared by its graphs, of which only one is replayed at a time
    by_size: dict[int, _Captured[Inputs]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)  # captured, ascending

    @property
    def num_buffers(self) -> int:
        return 0 if self.stream is None else self.stream.num_buffers

    @property
    def num_tables(self) -> int:
        return max(1, self.num_buffers)

    def drop(self) -> None:
        self.by_size.clear()
        self.memory = None

    @contextmanager
    def hooks(self) -> Iterator[KVStream]:
        if self.stream is None:
            yield NO_STREAM
            return
        with self.stream.launches() as hooks:
            yield hooks


class DecodeGraphs(Generic[Inputs]):
    """The graphs of one model on one device, and counts of the decode steps that did and did not find one.

    Without CUDA, a replay makes the same launches one by one. So Triton's interpreter runs what a GPU replays.
    """

    def __init__(self, model: DecodeModel[Inputs], device: torch.device, num_entries: int = MAX_TABLE_ENTRIES) -> None:
        """Every graph has room for `num_entries` block table entries. Nothing is captured yet."""
        self._model = model
        self._device = device
        self._num_entries = num_entries
        self._variants: dict[int, _Variant[Inputs]] = {}  # by number of stream buffers
        self.hits_total = 0
        self.misses_total = 0  # decode steps that no graph held
        self.nbytes = 0  # device memory that the graphs keep

    def sizes(self, num_buffers: int = 0) -> list[int]:
        """Return the ascending batch sizes of steps that stream through `num_buffers`; with 0, that copy nothing."""
        return self._variants[num_buffers].sizes if num_buffers in self._variants else []

    def capture(self, sizes: Sequence[int], memory_limit_bytes: int, stream: GraphStream | None = None) -> None:
        """Capture graphs of steps that copy through `stream`, or without it of steps that copy nothing.

        Call it in inference mode. The largest of `sizes` is captured first, so that the others reuse its memory. While
        all graphs together take more than `memory_limit_bytes`, the larger half of `sizes` is left out; steps of those
        sizes run eagerly.
        """
        variant = _Variant[Inputs](stream)
        self._variants[variant.num_buffers] = variant
        others_bytes = self._reserved_bytes() - self.nbytes
        left = sorted(sizes)
        while not self._capture_all(left, variant, others_bytes + memory_limit_bytes):
            variant.drop()
            largest, left = left[-1], left[: len(left) // 2]
            log.warning(
                "CUDA graphs of up to %d sequences take more than %d bytes, so steps of more than %d run without one",
                largest,
                memory_limit_bytes,
                left[-1] if left else 0,
            )
        self.nbytes = self._reserved_bytes() - others_bytes
        variant.sizes = sorted(variant.by_size)

    def _capture_all(self, sizes: Sequence[int], variant: _Variant[Inputs], limit_bytes: int) -> bool:
        """Capture ascending sizes. Return False as soon as this process holds more than `limit_bytes`."""
        for size in reversed(sizes):
            variant.by_size[size] = self._capture_one(size, variant)
            if self._reserved_bytes() > limit_bytes:
                return False
        return True

    def run(self, plan: EngineStep) -> Tensor | None:
        """Replay a decode step. Return its hidden states [T, hidden_size], valid until the next step.

        Return `None` if no graph holds the step, which the caller must then run eagerly. After a replay, the layer
        stream knows the step's copies.

        Raises `TransferError` if the copies name links that are not attached or bytes outside of the pools.
        """
        num_tokens = len(plan.token_ids)
        if num_tokens == 0 or int(np.diff(plan.query_starts).max()) > MAX_DECODE_TOKENS:
            return None
        variant = self._variants.get(buffers_of(plan) if plan.has_copies else 0)
        hidden = None if variant is None else self._replay(plan, variant)
        if hidden is None:
            self.misses_total += 1
            return None
        self.hits_total += 1
        return hidden[:num_tokens]

    def _replay(self, plan: EngineStep, variant: _Variant[Inputs]) -> Tensor | None:
        """Replay a graph and return all of its rows; `None` if no graph of the variant holds the step."""
        size = choose_size(variant.sizes, len(plan.token_ids))
        if size is None or any(len(table) > self._num_entries for table in plan.stream_tables[0]):
            return None
        if variant.stream is not None and not variant.stream.fill(plan):
            return None
        captured = variant.by_size[size]
        self._model.fill(plan, captured.inputs)
        hidden = captured.replay()
        if variant.stream is not None:
            variant.stream.launched()
        return hidden

    def _capture_one(self, size: int, variant: _Variant[Inputs]) -> _Captured[Inputs]:
        inputs = self._model.inputs(size, self._num_entries, variant.num_tables)

        def launch() -> Tensor:
            with variant.hooks() as hooks:
                return self._model.run(inputs, hooks)

        return _Captured(inputs, self._as_graph(launch, variant) if self._device.type == "cuda" else launch)

    def _as_graph(self, launch: Callable[[], Tensor], variant: _Variant[Inputs]) -> Callable[[], Tensor]:
        variant.memory = variant.memory or torch.cuda.graph_pool_handle()
        stream = _capture_stream(self._device, variant.num_buffers)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels, and lets libraries allocate their buffers
            launch()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy and allocate meanwhile; only this one must not do what cannot be captured.
        with torch.cuda.graph(graph, pool=variant.memory, stream=stream, capture_error_mode="thread_local"):
            hidden = launch()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay

    def _reserved_bytes(self) -> int:
        """Return the bytes that this process holds on the device, after torch has given back its cached memory.

        The driver's own memory for graphs, some 10 KB per kernel, counts only where the driver reports memory per
        process.
        """
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device) + (bytes_beside_torch(self._device) or 0)


@cache
def _capture_stream(device: torch.device, num_buffers: int) -> torch.cuda.Stream:
    """Return the CUDA stream on which graphs of this kind are captured: the same one each time.

    Libraries keep memory for every stream that they have seen, even after the stream is gone.
    """
    return torch.cuda.Stream(device)
