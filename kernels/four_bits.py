"""Matrices in four bits, as quantized checkpoints have them. Kernels that keep them so take them as they are.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MXFP4_GROUP = 32
"""Inputs that share a factor in MXFP4."""
_GROUP_MULTIPLE, _MAX_GROUP = 32, 128


def kernel_group_size(group_size: int) -> int | None:
    """Return the size of the parts in which kernels take a group of inputs; `None` if they do not take it."""
    part = math.gcd(group_size, _MAX_GROUP)
    return None if part % _GROUP_MULTIPLE else part


def four_bit_bytes(shape: tuple[int, int], group_size: int, *, has_zeros: bool) -> int:
    """Return the bytes that a matrix takes packed: codes, and for each group a float32 and perhaps a zero."""
    rows, columns = shape
    return rows * columns // 2 + rows * (columns // group_size) * (4 + has_zeros)


@dataclass(frozen=True, slots=True)
class FourBitMatrix:
    """A matrix [N, K] of weights (values[code] - zero) * factor, computed in float32 and rounded to `dtype`.

    The inputs of a row are in groups of equal size, each with a factor and, if the matrix has any, a zero.
    """

    codes: Tensor  # uint8 [N, K], each below 16
    factors: Tensor  # float32 [N, groups]
    zeros: Tensor | None  # uint8 [N, groups]
    values: tuple[float, ...]  # of the 16 codes
    dtype: torch.dtype  # of the weights

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """The bytes that the matrix takes packed."""
        return four_bit_bytes(self.shape, self.group_size, has_zeros=self.zeros is not None)

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.factors.shape[1]

    def __getitem__(self, rows: slice) -> FourBitMatrix:
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], factors=self.factors[rows], zeros=zeros)

    def unpack(self) -> Tensor:
        """Return the weights [N, K]."""
        values = self.factors.new_tensor(self.values)
        weights = values[self.codes.int()].unflatten(1, (-1, self.group_size))  # [N, groups, group_size]
        if self.zeros is not None:
            weights -= self.zeros.unsqueeze(-1)
        weights *= self.factors.unsqueeze(-1)
        rounded: Tensor = weights.flatten(1).to(self.dtype)
        return rounded


def unpacked(weights: Tensor | FourBitMatrix) -> Tensor:
    """Return weights [N, K] as a tensor."""
    return weights.unpack() if isinstance(weights, FourBitMatrix) else weights
