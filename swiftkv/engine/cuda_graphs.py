"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is a fixed sequence of kernels over fixed addresses, so there is one per batch size, and a step takes the
smallest that holds it: its arrays are written into that graph's tensors, the sequences that it lacks are marked as
absent, and the graph is replayed. Context lengths are data. This is xLLM's adaptive graph mode (section 4.2) for the
one shape that is worth it: steps with prompts in them, or with layers to stream, run eagerly (their kernels are long,
and copies differ from step to step), as does a step that no graph holds.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from swiftkv.kernels.triton_schedule import AttentionBatch, decode_buffers, prepare_batch
from swiftkv.models.batch import StepArrays, fill_in_sampled

if TYPE_CHECKING:
    from swiftkv.models.dense import DenseDecoder

MAX_TABLE_ENTRIES = 64 << 10
"""Blocks of one step that a graph has room for. More context than that makes launches the smallest of its costs."""

log = logging.getLogger(__name__)

Inputs = TypeVar("Inputs")


class DecodeModel(Protocol[Inputs]):
    """What is captured: a model's step over tensors that stay where they are."""

    def inputs(self, num_seqs: int, num_entries: int) -> Inputs:
        """Tensors for any decode step of at most `num_seqs` sequences with `num_entries` blocks in all; no step yet."""

    def fill(self, step: StepArrays, inputs: Inputs) -> None:
        """Write a step of one token per sequence. Rows beyond it write no KV. The host does not wait."""

    def run(self, inputs: Inputs) -> Tensor:
        """Hidden states [num_seqs, hidden_size]; the same kernels whatever the tensors hold."""


@dataclass(frozen=True, slots=True)
class DenseInputs:
    """Tensors of one batch size, on the device."""

    token_ids: Tensor  # int32 [num_seqs]
    attention: AttentionBatch


class DenseDecode:
    """A dense decoder with Triton's attention as a `DecodeModel`."""

    def __init__(self, model: DenseDecoder, pool: Tensor, last_token_ids: Tensor) -> None:
        """`pool` is the uint8 pool, flat, on the model's device; `last_token_ids` int32 [max_num_seqs] are the tokens
        that steps name by row slot."""
        self._model = model
        self._pool = pool
        self._last_token_ids = last_token_ids

    def inputs(self, num_seqs: int, num_entries: int) -> DenseInputs:
        return DenseInputs(
            torch.zeros(num_seqs, dtype=torch.int32, device=self._pool.device),
            decode_buffers(self._model.spec, num_seqs, num_entries, self._pool.device),
        )

    def fill(self, step: StepArrays, inputs: DenseInputs) -> None:
        fill_token_ids(step, inputs.token_ids)
        prepare_batch(
            self._model.spec,
            torch.from_numpy(step.positions),
            torch.from_numpy(step.query_starts),
            torch.from_numpy(step.context_lens),
            torch.from_numpy(step.block_tables[0]),
            torch.from_numpy(step.table_starts[0]),
            into=inputs.attention,
        )

    def run(self, inputs: DenseInputs) -> Tensor:
        token_ids = fill_in_sampled(inputs.token_ids, self._last_token_ids)
        return self._model.run_layers(token_ids, (inputs.attention,), self._pool)


def fill_token_ids(step: StepArrays, token_ids: Tensor) -> None:
    """The step's token ids into the first rows of `token_ids`, on the current stream; the rest keep valid ids."""
    host = torch.from_numpy(step.token_ids)
    if token_ids.device.type == "cuda":
        host = host.pin_memory()
    token_ids[: len(host)].copy_(host, non_blocking=True)


def graph_sizes(max_num_seqs: int, max_graphs: int = 64) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, then in steps of 8, of 16 from 256 on, and `max_num_seqs` itself.

    If these are more than `max_graphs`, every second one of the larger sizes goes, until they are not.
    """
    assert max_num_seqs > 0
    assert max_graphs >= 8
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs}
    ascending = sorted(size for size in sizes if size <= max_num_seqs)
    while len(ascending) > max_graphs:
        small, large = ascending[:4], ascending[4:]
        ascending = small + large[::-1][::2][::-1]  # keeps the largest
    return ascending


def choose_size(sizes: Sequence[int], num_seqs: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_seqs` sequences."""
    index = bisect.bisect_left(sizes, num_seqs)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class _Captured(Generic[Inputs]):
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    hidden: Tensor  # [size, hidden_size], written by each replay


class DecodeGraphs(Generic[Inputs]):
    """Graphs of one model on one device, and how often a step found one."""

    def __init__(self, model: DecodeModel[Inputs], device: torch.device, num_entries: int = MAX_TABLE_ENTRIES) -> None:
        """Nothing is captured yet. `num_entries`: block table entries that every graph has room for."""
        self._model = model
        self._device = device
        self._num_entries = num_entries
        self._captured: dict[int, _Captured[Inputs]] = {}
        self.sizes: list[int] = []  # captured, ascending
        self.hits_total = 0
        self.misses_total = 0  # decode steps that no graph held, or that had something to copy
        self.nbytes = 0  # of device memory that the graphs keep

    def capture(self, sizes: Sequence[int], memory_limit_bytes: int) -> None:
        """Capture `sizes`, the largest first, in inference mode: the smaller ones then live in its memory.

        A size whose graph takes the total above `memory_limit_bytes` is left out, and its steps run eagerly.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as each capture does
        before = torch.cuda.memory_reserved(self._device)
        memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        for size in sorted(sizes, reverse=True):
            captured = self._capture_one(size, memory, stream)
            used = torch.cuda.memory_reserved(self._device) - before
            if used <= memory_limit_bytes:
                self._captured[size] = captured
                self.nbytes = used
                continue
            log.warning("no CUDA graph for %d sequences: %d bytes, %d are allowed", size, used, memory_limit_bytes)
            del captured
            if not self._captured:  # the memory of a handle goes with its last graph
                memory = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
        self.sizes = sorted(self._captured)

    def run(self, step: StepArrays, has_copies: bool = False) -> Tensor | None:
        """Hidden states [T, hidden_size] of a decode step, valid until the next; None: run it eagerly.

        `has_copies`: KV has to be copied between the layers of the step, for which a graph has no place.
        """
        num_seqs = len(step.context_lens)
        if num_seqs == 0 or len(step.token_ids) != num_seqs:
            return None
        size = None if has_copies else choose_size(self.sizes, num_seqs)
        if size is None or any(len(table) > self._num_entries for table in step.block_tables):
            self.misses_total += 1
            return None
        captured = self._captured[size]
        self._model.fill(step, captured.inputs)
        captured.graph.replay()
        self.hits_total += 1
        return captured.hidden[:num_seqs]

    def _capture_one(self, size: int, memory: Any, stream: torch.cuda.Stream) -> _Captured[Inputs]:
        inputs = self._model.inputs(size, self._num_entries)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels, and lets libraries allocate what they keep
            self._model.run(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy and allocate meanwhile: only this one must do nothing that cannot be captured.
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            hidden = self._model.run(inputs)
        return _Captured(graph, inputs, hidden)
