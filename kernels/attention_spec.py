"""The shape of attention in the layers of one KV group, which every implementation obeys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The heads of one KV group, as this rank computes them, and the blocks that hold their keys and values.

    An implementation obeys every field, or raises `ValueError` for what it does not have.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    scale: float  # multiplies query · key
    window: int = 0  # tokens a query looks back on, itself included; 0: all of them
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: as they are
