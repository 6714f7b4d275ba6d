"""Matrices as codes of four or eight bits, as quantized checkpoints have them. Kernels may keep the codes in memory.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MXFP4_GROUP = 32
"""Inputs that share a factor in MXFP4."""
KERNEL_GROUPS = (128, 64, 32)
"""The group sizes, in inputs, that kernels take, the best one first."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The meaning of codes: code `i` stands for `values[i]`."""

    kind: Literal["four_bits", "int8", "fp8"]
    values: tuple[float, ...]

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 4 if self.kind == "four_bits" else 8


def _fp8_values() -> tuple[float, ...]:
    """Return the numbers of float8_e4m3fn: a sign, four bits of exponent, three of mantissa, and one NaN of each sign.

    OCP 8-bit Floating Point Specification 1.0, section 5.
    """
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(8 + mantissa) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for mantissa in range(8)]
    magnitudes = (*subnormal, *normal[:-1], math.nan)
    return (*magnitudes, *(-x for x in magnitudes))


INT8 = Coding("int8", tuple(float(code - 256 if code > 127 else code) for code in range(256)))
"""Integers in two's complement."""
FP8 = Coding("fp8", _fp8_values())
"""Numbers of float8_e4m3fn."""


def kernel_group_size(group_size: int) -> int | None:
    """Return the size of the parts into which kernels divide a group of inputs; `None` if they cannot."""
    return next((size for size in KERNEL_GROUPS if group_size % size == 0), None)


def coded_bytes(shape: tuple[int, int], bits: int, group_size: int, *, has_zeros: bool) -> int:
    """Return the bytes of a packed matrix: its codes, and for each group a float32 factor and perhaps a zero."""
    rows, columns = shape
    return rows * columns * bits // 8 + rows * (columns // group_size) * (4 + has_zeros)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [N, K] of weights (value of the code - zero) * factor, computed in float32 and rounded to `dtype`.

    The inputs of a row are in groups of equal size, each with a factor and, if the matrix has any, a zero.
    """

    codes: Tensor  # uint8 [N, K]
    coding: Coding
    factors: Tensor  # float32 [N, groups]
    zeros: Tensor | None  # int8 [N, groups]
    dtype: torch.dtype  # of the weights

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """The bytes that the matrix takes packed."""
        return coded_bytes(self.shape, self.coding.bits, self.group_size, has_zeros=self.zeros is not None)

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.factors.shape[1]

    def __getitem__(self, rows: slice) -> CodedMatrix:
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], factors=self.factors[rows], zeros=zeros)

    def unpack(self) -> Tensor:
        """Return the weights [N, K]."""
        values = self.factors.new_tensor(self.coding.values)
        weights = values[self.codes.int()].unflatten(1, (-1, self.group_size))  # [N, groups, group_size]
        if self.zeros is not None:
            weights -= self.zeros.unsqueeze(-1)
        weights *= self.factors.unsqueeze(-1)
        rounded: Tensor = weights.flatten(1).to(self.dtype)
        return rounded


def unpacked(weights: Tensor | CodedMatrix) -> Tensor:
    """Return weights [N, K] as a tensor."""
    return weights.unpack() if isinstance(weights, CodedMatrix) else weights
