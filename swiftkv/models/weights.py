"""The tensors of a checkpoint that a decoder reads, declared once: for loading them, and for sizing a node before it.

Imports no torch: `swiftkv plan` counts weights by these declarations, from `config.json` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swiftkv.arithmetic import ceil_div
from swiftkv.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint, and the part of it that a rank has."""

    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[slice, ...] = ()  # by dimension; the rest is whole. A slice may end behind the tensor: zeros follow
    stored_as: str | None = None  # None: under its own name

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return (*(part.stop - part.start for part in self.part), *self.shape[len(self.part) :])


@dataclass(frozen=True, slots=True)
class RankSlices:
    """One rank's part of a model's dimensions."""

    rank: int
    q: slice  # num_heads * head_dim
    kv: slice  # num_kv_heads * head_dim; ranks share a head where there are fewer heads than ranks
    mlp: slice  # intermediate_size
    vocab: slice  # all ranks' are as long, so the last ones may end behind the vocabulary

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, num_ranks: int) -> RankSlices:
        """Divide the whole model's `config`. Raises `ConfigError` if it cannot be divided by `num_ranks`."""
        part = config.of_rank(num_ranks)
        vocab_part = ceil_div(config.vocab_size, num_ranks)
        first_kv_head = rank * config.num_kv_heads // num_ranks
        return cls(
            rank=rank,
            q=_slice(rank * part.num_heads * config.head_dim, part.num_heads * config.head_dim),
            kv=_slice(first_kv_head * config.head_dim, part.num_kv_heads * config.head_dim),
            mlp=_slice(rank * part.intermediate_size, part.intermediate_size),
            vocab=_slice(rank * vocab_part, vocab_part),
        )


def num_parameters(weights: Mapping[str, Weight]) -> int:
    """Count the elements of a rank's matrices; norms and biases are under a thousandth of them.

    A matrix that serves twice in the same part, as an embedding that is the head too, counts once.
    """
    matrices = {(weight.stored_as or name, weight.part_shape) for name, weight in weights.items()}
    return sum(math.prod(shape) for _, shape in matrices if len(shape) > 1)


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)
