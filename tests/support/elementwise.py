"""A decoder's operations between its matrix products, in plain torch on any device, and steps to try them on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.triton_layout import NO_BLOCK

EPS = 1e-6
NUM_LAYERS = 3
MAX_LEN = 200


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm in float64, but rounded to the dtype where the kernel rounds."""
    wide = x.double()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return (normal.double() * weight.double()).to(x.dtype)


@dataclass(frozen=True)
class Step:
    """The tokens of several sequences, and their places."""

    positions: Tensor
    query_starts: Tensor
    block_table: Tensor
    table_starts: Tensor
    token_entries: Tensor  # as computed in Python


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_step(block_size: int, lengths: list[tuple[int, int]], num_blocks: int, seed: int) -> Step:
    """Make a step of sequences (context length, its cached part), in random blocks: half whole, half of one layer."""
    rng = random.Random(seed)
    free = [block * NUM_LAYERS for block in range(num_blocks // 2)]
    free += [~index for index in range(num_blocks // 2 * NUM_LAYERS, num_blocks * NUM_LAYERS)]
    rng.shuffle(free)
    positions, entries, query_starts, table_starts, table = [], [], [0], [0], []
    for context_len, num_cached in lengths:
        first_written = num_cached // block_size
        blocks = [NO_BLOCK] * first_written  # entries before the new tokens must not be read
        blocks += [free.pop() for _ in range(first_written, -(-context_len // block_size))]
        positions += range(num_cached, context_len)
        entries += [blocks[position // block_size] for position in range(num_cached, context_len)]
        table += blocks
        query_starts.append(len(positions))
        table_starts.append(len(table))
    return Step(int32(positions), int32(query_starts), int32(table), int32(table_starts), int32(entries))


def cos_sin_table(rotary_dim: int) -> Tensor:
    frequencies = 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(MAX_LEN)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def split_heads(qkv: Tensor, spec: AttentionSpec) -> list[Tensor]:
    """Return q, k and v of `qkv`, `[tokens, heads, dim]` each, views."""
    dims = spec.head_dim, spec.head_dim, spec.value_head_dim
    return [x.unflatten(1, (-1, dim)) for x, dim in zip(qkv.split(spec.qkv_sizes, dim=1), dims, strict=True)]


def turned(x: Tensor, norm: Tensor | None, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Return x `[tokens, heads, head_dim]` as transformers normalises and rotates it, in x's dtype."""
    if norm is not None:
        x = exact_norm(x, norm)
    rotary_dim = cos_sin.shape[1]
    cos, sin = (t.repeat(1, 2)[positions.long(), None].to(x.dtype) for t in cos_sin.chunk(2, dim=1))
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    low, high = part.chunk(2, dim=-1)
    return torch.cat([part * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)
