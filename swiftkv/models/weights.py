"""The tensors of a checkpoint that a decoder reads, declared once for loading them and for sizing a node.

Imports no torch: `swiftkv plan` counts weights by these declarations, from `config.json` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swiftkv.arithmetic import ceil_div
from swiftkv.models.config import AttentionKind, DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A tensor that holds several weights, and the part of it that is one of them."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]
    num_shards: ClassVar = 1

    def of(self, packed: Tensor) -> Tensor:
        """Return the weight, a view."""
        return packed[self.index]


@dataclass(frozen=True, slots=True)
class ShardedRows:
    """A matrix that holds parts of several ranks, one below the other, and the rows of each that form one weight."""

    name: str
    shape: tuple[int, int]
    num_shards: int
    rows: slice  # the rows of a shard

    def of(self, packed: Tensor) -> Tensor:
        """Return the weight: the rows of one shard after those of another; a copy if there are several."""
        of_shards: Tensor = packed.unflatten(0, (self.num_shards, -1))[:, self.rows]
        return of_shards.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, and the part of it that a rank has."""

    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[slice, ...] = ()  # by dimension; the rest is whole. Zeros fill a slice that ends beyond the tensor
    stored_as: str | None = None  # None: under its own name
    packed: PackedPart | ShardedRows | None = None  # None: never part of another tensor

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return (*(part.stop - part.start for part in self.part), *self.shape[len(self.part) :])


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The names of one expert's three linear layers in a checkpoint."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class HeadSlices:
    """One rank's part of the heads of one attention kind."""

    q: slice  # num_heads * head_dim
    k: slice  # num_kv_heads * head_dim; ranks share a head where there are fewer heads than ranks
    v: slice  # num_kv_heads * value_head_dim
    out: slice  # num_heads * value_head_dim
    heads: slice  # num_heads

    @classmethod
    def of(cls, kind: AttentionKind, part: AttentionKind, rank: int, num_ranks: int) -> HeadSlices:
        """Return one rank's slices of `kind`, the whole model's. `part` is the same kind as one rank has it."""
        heads = _slice(rank * part.num_heads, part.num_heads)
        kv_heads = _slice(rank * kind.num_kv_heads // num_ranks, part.num_kv_heads)
        return cls(
            q=_times(heads, kind.head_dim),
            k=_times(kv_heads, kind.head_dim),
            v=_times(kv_heads, kind.value_head_dim),
            out=_times(heads, kind.value_head_dim),
            heads=heads,
        )


@dataclass(frozen=True, slots=True)
class RankSlices:
    """One rank's part of a model's dimensions."""

    rank: int
    num_ranks: int
    heads: tuple[HeadSlices, ...]  # by attention kind
    mlp: slice  # intermediate_size
    vocab: slice  # equally long on all ranks, so the last ones may end beyond the vocabulary

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, num_ranks: int) -> RankSlices:
        """Divide the whole model's `config`. Raises `ConfigError` if it cannot be divided by `num_ranks`."""
        part = config.of_rank(num_ranks)
        vocab_part = ceil_div(config.vocab_size, num_ranks)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            heads=tuple(
                HeadSlices.of(kind, of_rank, rank, num_ranks)
                for kind, of_rank in zip(config.attention, part.attention, strict=True)
            ),
            mlp=_slice(rank * part.intermediate_size, part.intermediate_size),
            vocab=_slice(rank * vocab_part, vocab_part),
        )

    def of_size(self, size: int) -> slice:
        """Return this rank's part of a dimension of `size`, which the number of ranks divides."""
        return _slice(self.rank * (size // self.num_ranks), size // self.num_ranks)


def num_parameters(weights: Mapping[str, Weight]) -> int:
    """Count the elements of a rank's matrices; norms and biases are less than a thousandth of them.

    A matrix whose same part is used twice, such as an embedding that is also the head, counts once.
    """
    matrices = {(weight.stored_as or name, weight.part_shape) for name, weight in weights.items()}
    return sum(math.prod(shape) for _, shape in matrices if len(shape) > 1)


def _times(part: slice, width: int) -> slice:
    """Return the elements of these heads, each `width` long."""
    return slice(part.start * width, part.stop * width)


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)
