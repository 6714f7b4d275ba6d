"""Tensor parallelism as in Megatron (arXiv:1909.08053, section 3): where the ranks of one model meet.

Heads, the inner size of the MLP or of each expert, and the vocabulary are divided; the residual stream and the
embedding are on every rank. Ranks meet after attention and after the MLP, where their products are added up, and when
logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swiftkv.errors import TransferError
from swiftkv.kernels.experts import Choices, PackedExperts
from swiftkv.kernels.ops import AnyOps, PackedLinear, PackedMlp

_TWO_PHASES_FROM_BYTES = 1 << 20
"""The size from which sums take two phases; smaller ones are cheaper in one exchange that moves more bytes."""


class Communicator(Protocol):
    """The ranks that share one model. All of them make the same calls in the same order.

    Tensors are contiguous, on the rank's device. Raises `EngineError` when another rank has gone.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Return every rank's `part`, on all ranks: [size, *part.shape]."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return part `rank` of every rank's `parts` [size, ...], in the order of the ranks: [size, ...]."""

    def gather(self, part: Tensor) -> Tensor | None:
        """Return every rank's `part` on rank 0: [size, *part.shape]; None elsewhere."""


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


def agree(communicator: Communicator, failure: TransferError | None) -> None:
    """Wait until every rank has called this, each with its failure or `None`. Only for ranks on the CPU.

    If any rank has failed, raises `TransferError` on every rank: its own `failure`, or one that names another rank.
    """
    failed = communicator.all_gather(torch.tensor([failure is not None], dtype=torch.uint8)).flatten().nonzero()
    if failure is not None:
        raise failure
    if len(failed):
        raise TransferError(f"rank {int(failed[0])} of this engine failed to do its part")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The kernels of one rank, and the products where all ranks meet."""

    ops: AnyOps
    communicator: Communicator
    vocab_size: int

    @property
    def is_alone(self) -> bool:
        """Say whether the model is not divided."""
        return self.communicator.size == 1

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        """Return the sum of all ranks' products, [M, N]; `x` and `w` are this rank's part of the inputs."""
        return self._sum(self.ops.linear(x, w))

    def linear_residual(self, x: Tensor, w: PackedLinear, residual: Tensor) -> None:
        """Add all ranks' products to `residual` [M, N]; `x` and `w` are this rank's part of the inputs."""
        if self.is_alone:
            self.ops.linear_residual(x, w, residual)
        else:
            add_all(residual, self.ops.linear(x, w), self.communicator)

    def gated_mlp(self, x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
        """Return the sum of all ranks' gated MLPs of x [M, K], [M, N]; the weights are this rank's part of them."""
        return self._sum(self.ops.gated_mlp(x, mlp))

    def add_gated_mlp(self, x: Tensor, mlp: PackedMlp[PackedLinear]) -> None:
        """Add all ranks' gated MLPs of x [M, K] to x; the weights are this rank's part of them."""
        if self.is_alone:
            self.ops.add_gated_mlp(x, mlp)
        else:
            add_all(x, self.ops.gated_mlp(x, mlp), self.communicator)

    def add_experts(self, x: Tensor, choices: Choices, experts: PackedExperts, residual: Tensor) -> None:
        """Add all ranks' experts to `residual` [T, hidden_size]; `experts` are this rank's parts of all of them."""
        if self.is_alone:
            self.ops.add_experts(x, choices, experts, residual)
        else:
            partial = torch.zeros_like(residual)
            self.ops.add_experts(x, choices, experts, partial)
            add_all(residual, partial, self.communicator)

    def logits(self, x: Tensor, w: PackedLinear) -> Tensor:
        """Return all logits [M, vocab_size] on rank 0, [M, 0] elsewhere; `w` is this rank's part of the vocabulary."""
        if self.is_alone:
            return self.ops.logits(x, w)
        parts = self.communicator.gather(self.ops.logits(x, w))  # [size, M, vocab_size / size]
        if parts is None:
            return torch.empty(len(x), 0, device=x.device)
        return parts.transpose(0, 1).reshape(len(x), -1)[:, : self.vocab_size].contiguous()

    def _sum(self, product: Tensor) -> Tensor:
        if self.is_alone:
            return product
        total = torch.zeros_like(product)
        add_all(total, product, self.communicator)
        return total


def add_all(residual: Tensor, partial: Tensor, communicator: Communicator) -> None:
    """Add the sum of all ranks' `partial` to `residual`, both contiguous; in float32, rounded once.

    Each element is summed in the order of the ranks, in one phase or in two (each rank sums a part of the elements, and
    sends it to all). So a row does not depend on the rest of the batch, which it would in a ring or a tree.
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
