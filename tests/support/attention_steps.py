"""Steps of attention over pools full of NaN, and the error of the Triton kernels' results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkv.kernels import triton_attention
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_layout import NO_BLOCK, layer_blocks
from swiftkv.kernels.triton_schedule import Tiling
from tests.support import attention_oracle

NUM_LAYERS = 3


@dataclass(frozen=True)
class Step:
    """The arguments of `prepare_batch`, on the host, and of `attention`."""

    spec: AttentionSpec
    qkv: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    table_starts: Tensor
    pool: Tensor
    layer: int
    sinks: Tensor | None

    def prepare(
        self, into: triton_attention.AttentionBatch | None = None, tilings: tuple[Tiling, Tiling] | None = None
    ) -> triton_attention.AttentionBatch:
        return triton_attention.prepare_batch(
            self.spec,
            self.positions,
            self.query_starts,
            self.context_lens,
            self.block_table,
            self.table_starts,
            device=self.qkv.device,
            into=into,
            tilings=tilings,
        )

    def run(self, batch: triton_attention.AttentionBatch) -> Tensor:
        return triton_attention.attention(self.qkv, self.spec, batch, self.pool, self.layer, self.sinks)

    def expected(self) -> Tensor:
        return attention_oracle.attention(
            self.qkv,
            self.spec,
            self.query_starts,
            self.context_lens,
            self.block_table,
            self.table_starts,
            self.pool,
            self.layer,
            self.sinks,
        )


def make_step(
    spec: AttentionSpec,
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    layer: int = 1,
    sinks: bool = False,
) -> Step:
    """Make a step of sequences with `lengths` (tokens in the cache, new tokens).

    Blocks are drawn at random, half of them whole (stride 1), half of one layer (stride 0). Only the places of tokens
    that some query sees hold numbers, and blocks that no query sees are missing from the table.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-(cached + new) // spec.block_size) for cached, new in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    whole = order % 2 == 0
    # Whole blocks fill the front of the pool; the layer blocks of the others come after them.
    entries = torch.where(whole, order * NUM_LAYERS, ~(num_blocks * NUM_LAYERS + order)).int()
    shape = (num_blocks * (NUM_LAYERS + 1), spec.layer_block_elements)
    pool = torch.full(shape, math.nan, dtype=dtype, device=device).flatten().view(torch.uint8)
    key_blocks, value_blocks = attention_oracle.keys_and_values(layer_blocks(pool, spec, dtype), spec)
    kv_dims = [spec.head_dim, spec.value_head_dim]
    tables = []
    for (cached, new), table in zip(lengths, entries[: sum(counts)].split(counts), strict=True):
        first_key = max(0, cached + 1 - spec.window) if spec.window else 0
        seen = torch.arange(first_key, cached + new, device=device)
        entry = table.to(device).long()[seen // spec.block_size]
        index = torch.where(entry < 0, ~entry, entry + layer)
        tokens = torch.randn((len(seen), spec.num_kv_heads, sum(kv_dims)), generator=generator, device=device)
        keys, values = tokens.to(dtype).split(kv_dims, dim=2)
        key_blocks[index, :, seen % spec.block_size] = keys
        value_blocks[index, :, seen % spec.block_size] = values
        gone = torch.arange(len(table)) < first_key // spec.block_size
        tables.append(torch.where(gone, NO_BLOCK, table))
    new_tokens = [new for _, new in lengths]
    qkv = torch.randn((sum(new_tokens), sum(spec.qkv_sizes)), generator=generator, device=device) * 2
    return Step(
        spec=spec,
        qkv=qkv.to(dtype),
        positions=torch.cat([torch.arange(cached, cached + new, dtype=torch.int32) for cached, new in lengths]),
        query_starts=_starts(new_tokens),
        context_lens=torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        block_table=torch.cat(tables),
        table_starts=_starts(counts),
        pool=pool,
        layer=layer,
        sinks=torch.randn(spec.num_heads, generator=generator, device=device) if sinks else None,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|, Euclidean, of the worst row; NaN if any element is NaN."""
    difference = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(difference.max()) if not difference.isnan().any() else math.nan


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()
