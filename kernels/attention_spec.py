"""The shape of attention in the layers of one KV group. Every implementation obeys it."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 16, 256
"""The divisor and the maximum of head sizes, of keys and of values, that every implementation supports."""


def is_head_dim(dim: int) -> bool:
    """Return whether every implementation supports heads of `dim`."""
    return 0 < dim <= MAX_HEAD_DIM and dim % HEAD_DIM_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The heads of one KV group, as this rank computes them, and the blocks that hold their keys and values.

    An implementation obeys every field, or raises `ValueError` for a value that it does not support.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the size of a query and of a key
    block_size: int  # tokens per block
    scale: float  # multiplies query · key
    window: int = 0  # tokens that a query sees, itself included; 0: all of them
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: unchanged
    v_head_dim: int | None = None  # the size of a value and of a result; None: head_dim

    @property
    def value_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The elements of q, of k and of v in a row of `qkv`."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_head_dim,
        )

    @property
    def out_size(self) -> int:
        """The elements of a row of attention's result."""
        return self.num_heads * self.value_head_dim

    @property
    def layer_block_elements(self) -> int:
        """The elements of `block_size` tokens' keys and values in one layer."""
        return self.block_size * self.num_kv_heads * (self.head_dim + self.value_head_dim)
