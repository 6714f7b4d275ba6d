"""The layout of keys and values in a pool that the Triton kernels read and write.

A layer block holds `block_size` tokens of one layer, in the model's dtype: keys `[num_kv_heads, block_size, head_dim]`,
then values `[num_kv_heads, block_size, v_head_dim]`. The keys of one head in a block are contiguous, and so are its
values. So a tile of keys is a few long runs of bytes, and with blocks of 64 tokens and more a rectangle that the tensor
memory accelerator can fetch by itself.

The helpers take and return numbers of elements, 64 bits wide: pools are larger than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec

NO_BLOCK = -(1 << 31)
"""`swiftkv._core.NO_BLOCK`, for machines on which the extension is not built."""

NO_BLOCK_JIT = tl.constexpr(NO_BLOCK)


@triton.jit
def layer_block_index(entry: tl.tensor, layer: tl.tensor) -> tl.tensor:
    """Return the layer block, int64, that a table entry names at `layer`: `entry + layer`, `~entry` if negative.

    Follow it only where `entry != NO_BLOCK_JIT`.
    """
    return tl.where(entry < 0, ~entry, entry + layer).to(tl.int64)


@triton.jit
def layer_block_offset(
    index: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tl.tensor:
    """Return the first element of layer block `index`, int64."""
    return index * (NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + VALUE_DIM))


@triton.jit
def key_offset(head: tl.tensor, offset: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Return the first element, in a layer block, of kv head `head`'s key of the token at `offset` in the block."""
    return (head * BLOCK_SIZE + offset) * HEAD_DIM


@triton.jit
def value_offset(
    head: tl.tensor,
    offset: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tl.tensor:
    """Return the first element, in a layer block, of kv head `head`'s value of the token at `offset` in the block."""
    return NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + (head * BLOCK_SIZE + offset) * VALUE_DIM


def layer_blocks(pool: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Return the layer blocks of the pool, uint8 and flat, `[N, layer_block_elements]`, a view."""
    nbytes = spec.layer_block_elements * dtype.itemsize
    return pool[: pool.numel() // nbytes * nbytes].view(dtype).view(-1, spec.layer_block_elements)
