"""A decoder of one attention layer over the Triton kernels, which a CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.engine.cuda_graphs import DecodeInputs, fill_token_ids
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_attention import attention, decode_buffers, prepare_batch
from swiftkv.kernels.triton_elementwise import rope_write_kv
from swiftkv.models.batch import StepArrays
from swiftkv.models.stream import NO_STREAM, KVStream

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, scale=64**-0.5)
VOCAB_SIZE = 50
LAYER_BLOCK_BYTES = 2 * SPEC.block_size * SPEC.num_kv_heads * SPEC.head_dim * 2
MAX_LEN = 512


@dataclass(frozen=True, slots=True)
class Step:
    """An `EngineStep` of one KV group without copies, for machines that lack the rest of the engine."""

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    stream_tables: Sequence[Sequence[Int32Array]]
    table_starts: Sequence[Int32Array]
    has_unknown_tokens: bool = False
    num_stream_buffers: int = 0
    has_copies: bool = False

    @property
    def local_moves(self) -> Int32Array:
        return np.empty((0, 3), np.int32)

    def copies(self, group: int, kind: str, buffer: int) -> Int64Array:
        return np.empty((0, 5), np.int64)


def decode_step(
    context_lens: Sequence[int],
    generator: np.random.Generator,
    num_blocks: int,
    num_layers: int = 1,
    num_new: Sequence[int] | None = None,
) -> Step:
    """Make a step of one or `num_new` new tokens for each sequence, after which it has its length, in random blocks."""
    lengths = np.array(context_lens, np.int32)
    new = np.array([1] * len(lengths) if num_new is None else num_new, np.int32)
    counts = -(-lengths // SPEC.block_size)
    return Step(
        token_ids=generator.integers(0, VOCAB_SIZE, new.sum(), np.int32),
        positions=np.concatenate(
            [np.arange(end - n, end, dtype=np.int32) for end, n in zip(lengths, new, strict=True)]
        ),
        query_starts=np.append(0, new.cumsum()).astype(np.int32),
        context_lens=lengths,
        stream_tables=[[(generator.permutation(num_blocks)[: counts.sum()] * num_layers).astype(np.int32)]],
        table_starts=[np.append(0, counts.cumsum()).astype(np.int32)],
    )


class Toy:
    """A decoder whose hidden states are the attention of a random projection of the tokens."""

    def __init__(self, num_blocks: int, device: str) -> None:
        generator = torch.Generator().manual_seed(3)
        width = (SPEC.num_heads + 2 * SPEC.num_kv_heads) * SPEC.head_dim
        self.embedding = torch.randn(VOCAB_SIZE, width, generator=generator).to(device, torch.bfloat16)
        self.cos_sin = torch.randn(MAX_LEN, SPEC.head_dim, generator=generator).to(device)
        values = torch.randn(num_blocks * LAYER_BLOCK_BYTES // 2, generator=generator).to(torch.bfloat16)
        self.pool = values.to(device).view(torch.uint8)

    def inputs(self, num_seqs: int, num_entries: int, num_tables: int = 1) -> DecodeInputs:
        assert num_tables == 1
        token_ids = torch.zeros(num_seqs, dtype=torch.int32, device=self.pool.device)
        return DecodeInputs(token_ids, ((decode_buffers(SPEC, num_seqs, num_entries, self.pool.device),),))

    def fill(self, step: StepArrays, inputs: DecodeInputs) -> None:
        fill_token_ids(step, inputs.token_ids)
        prepare_batch(SPEC, *_host(step), into=inputs.attention[0][0])

    def run(self, inputs: DecodeInputs, stream: KVStream = NO_STREAM) -> Tensor:
        return self._layer(inputs.token_ids, inputs.attention[0][0])

    def eager(self, step: StepArrays) -> Tensor:
        """Run the step without a graph."""
        token_ids = torch.from_numpy(step.token_ids).to(self.pool.device)
        return self._layer(token_ids, prepare_batch(SPEC, *_host(step), device=self.pool.device))

    def _layer(self, token_ids: Tensor, batch: object) -> Tensor:
        qkv = self.embedding[token_ids.long()]
        rope_write_kv(qkv, self.cos_sin, None, None, 1e-6, SPEC, batch, self.pool, 0)
        return attention(qkv, SPEC, batch, self.pool, 0)


def _host(step: StepArrays) -> list[Tensor]:
    arrays = (step.positions, step.query_starts, step.context_lens, step.stream_tables[0][0], step.table_starts[0])
    return [torch.from_numpy(array) for array in arrays]
