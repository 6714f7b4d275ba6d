"""Tensor parallelism as in Megatron (arXiv:1909.08053, section 3): what part of a model a rank has, where ranks meet.

Heads, the inner size of the MLP and the vocabulary are divided; the residual stream and the embedding are on every
rank. Ranks meet behind attention and behind the MLP, where their products are added up, and when logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.kernels.dispatch import Ops, PackedLinear
from swiftkv.models.config import DecoderConfig

_TWO_PHASES_FROM_BYTES = 1 << 20
"""Sums of fewer bytes are cheaper in one exchange that moves more."""


class Communicator(Protocol):
    """The ranks that share one model. All of them make the same calls in the same order.

    Tensors are contiguous, on the rank's device. Raises `EngineError` when another rank has gone.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Everybody's `part`, on every rank: [size, *part.shape]."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Part `rank` of everybody's `parts` [size, ...], in the order of the ranks: [size, ...]."""

    def gather(self, part: Tensor) -> Tensor | None:
        """Everybody's `part` on rank 0: [size, *part.shape]; None elsewhere."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A model that is not divided."""

    rank: int = 0
    size: int = 1

    def all_gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts

    def gather(self, part: Tensor) -> Tensor | None:
        return part.unsqueeze(0)


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class RankSlices:
    """A rank's part of a model's dimensions."""

    q: slice  # num_heads * head_dim
    kv: slice  # num_kv_heads * head_dim; ranks share a head where there are fewer heads than ranks
    mlp: slice  # intermediate_size
    vocab: slice  # all ranks' are as long, so the last ones may end behind the vocabulary

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, num_ranks: int) -> RankSlices:
        """`config` is the whole model's; `config.of_rank(num_ranks)` has said that it can be divided."""
        part = config.of_rank(num_ranks)
        vocab_part = ceil_div(config.vocab_size, num_ranks)
        first_kv_head = rank * config.num_kv_heads // num_ranks
        return cls(
            q=_slice(rank * part.num_heads * config.head_dim, part.num_heads * config.head_dim),
            kv=_slice(first_kv_head * config.head_dim, part.num_kv_heads * config.head_dim),
            mlp=_slice(rank * part.intermediate_size, part.intermediate_size),
            vocab=_slice(rank * vocab_part, vocab_part),
        )


def parallel_ops(ops: Ops, communicator: Communicator, vocab_size: int) -> Ops:
    """`ops` for a rank's part of a model: `linear_residual` takes a part of the inputs and adds up everybody's
    products, `logits` of a part of the vocabulary are all logits on rank 0, and [R, 0] elsewhere."""
    if communicator.size == 1:
        return ops

    def linear_residual(x: Tensor, w: PackedLinear, residual: Tensor) -> None:
        add_all(residual, ops.linear(x, w), communicator)

    def logits(x: Tensor, w: PackedLinear) -> Tensor:
        parts = communicator.gather(ops.logits(x, w))  # [size, R, vocab_size / size]
        if parts is None:
            return torch.empty(len(x), 0, device=x.device)
        return parts.transpose(0, 1).reshape(len(x), -1)[:, :vocab_size].contiguous()

    return replace(ops, linear_residual=linear_residual, logits=logits)


def add_all(residual: Tensor, partial: Tensor, communicator: Communicator) -> None:
    """residual += the sum of everybody's `partial`, both contiguous; in float32, rounded once.

    Each element is summed in the order of the ranks, in one phase or in two (everybody sums a part of the elements,
    and sends it round), so a row does not depend on the rest of the batch, which it would in a ring or a tree.
    """
    size = communicator.size
    if partial.nbytes < _TWO_PHASES_FROM_BYTES or partial.numel() % size:
        residual.copy_(_sum_in_order(residual, communicator.all_gather(partial)))
        return
    parts = communicator.all_to_all(partial.view(size, -1))
    mine = _sum_in_order(residual.view(size, -1)[communicator.rank], parts).to(residual.dtype)
    residual.view(size, -1).copy_(communicator.all_gather(mine))


def _sum_in_order(residual: Tensor, parts: Tensor) -> Tensor:
    total = residual.to(torch.promote_types(residual.dtype, torch.float32), copy=True)
    for part in parts:
        total += part
    return total


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)
