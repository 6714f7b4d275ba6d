"""Unpacks quantized matrices: FP8, or integers of 8, 4 or 2 bits, times the factors that they share.

A row of a matrix has the weights of one output. The columns of a row are in groups, each with a factor and, if the
numbers are not symmetric, a zero: the number that means 0. A weight is (number - zero) * factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError
from swiftkv.kernels.weight_codes import FP8, INT8, KERNEL_GROUPS, CodedMatrix, Coding
from swiftkv.models.quantization import BLOCK, QuantizedTensors, group_columns

_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row, out of eight, of each number in an AWQ word, the lowest bits first."""
_HALF = 128
"""The number of integers of eight bits that are less than 0."""
_LARGE_FACTOR = 2.0**100
_ROWS_AT_ONCE = 64
"""The rows that are unpacked at once, so that a matrix never exists in float32 and its steps stay in the cache."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix or some of its rows, not yet unpacked."""

    numbers: Tensor  # [rows, columns], or int32 [rows, words] if bits is set
    bits: int | None  # of a number in a word, the lowest bits first
    factors: Tensor  # float32 [rows, groups]
    zeros: Tensor | None  # [rows, groups]
    group: Tensor  # int64 [columns], the group of each column, on the CPU
    code_bits: int | None = None  # the bits of numbers that are integers from 0 on; None: they are not

    def with_rows(self, of_rows: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """Return the matrix with other rows, or on another device: `of_rows` converts each tensor that has rows."""
        zeros = None if self.zeros is None else of_rows(self.zeros)
        return replace(self, numbers=of_rows(self.numbers), factors=of_rows(self.factors), zeros=zeros)

    def coded(self, columns: slice, dtype: torch.dtype) -> CodedMatrix | None:
        """Return these columns of the rows as codes; `None` if kernels do not take them or their groups."""
        group = _kernel_groups(self.group[columns])
        if group is None:
            return None
        numbers = self.numbers if self.bits is None else along_rows(self.numbers, self.bits)
        codes = numbers[:, : len(self.group)][:, columns].contiguous()  # the last word may not be full
        codes, coding, zeros = _coding(codes, self.code_bits, self.zeros)
        if coding is FP8 and not _has_only_small_numbers(codes, self.factors):
            return None
        return CodedMatrix(
            codes=codes,
            coding=coding,
            factors=self.factors[:, group],
            zeros=None if zeros is None else zeros[:, group].to(torch.int8),
            dtype=dtype,
        )

    def unpack(self, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return these columns of the rows, rounded from float32 to `dtype`."""
        group = self.group[columns]
        in_order = _groups_in_order(group)
        group = group.to(self.numbers.device)
        unpacked = torch.empty(len(self.numbers), len(group), dtype=dtype, device=self.numbers.device)
        for begin in range(0, len(self.numbers), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            numbers = self.numbers[rows] if self.bits is None else along_rows(self.numbers[rows], self.bits)
            weights = numbers[:, : len(self.group)][:, columns].float()  # the last word may not be full
            by_group = weights if in_order is None else weights.unflatten(1, (in_order.stop - in_order.start, -1))
            for values, operate in ((self.zeros, Tensor.sub_), (self.factors, Tensor.mul_)):
                if values is not None and in_order is None:
                    operate(by_group, values[rows].index_select(1, group))
                elif values is not None:
                    operate(by_group, values[rows, in_order].unsqueeze(-1))
            unpacked[rows] = weights
        return unpacked


def _coding(numbers: Tensor, code_bits: int | None, zeros: Tensor | None) -> tuple[Tensor, Coding, Tensor | None]:
    """Return a matrix's codes, their coding, and its zeros if any is not 0."""
    if numbers.dtype == torch.float8_e4m3fn:
        return numbers.view(torch.uint8), FP8, None
    if code_bits is not None and code_bits <= 4:
        assert zeros is not None, "packed numbers have zeros"
        values = torch.arange(16.0)
        if (zeros == zeros[0, 0]).all():
            values, zeros = values - zeros[0, 0], None
        return numbers, Coding("four_bits", tuple(values.tolist())), zeros
    codes = numbers.view(torch.uint8)
    if code_bits is not None:  # they are from 0 on
        assert zeros is not None, "packed numbers have zeros"
        codes, zeros = codes ^ _HALF, zeros.int() - _HALF
    return codes, INT8, zeros if zeros is not None and zeros.any() else None


def _has_only_small_numbers(codes: Tensor, factors: Tensor) -> bool:
    """Return whether FP8's codes are numbers, and all products with their factors are far from infinity."""
    return not ((codes & 127) == 127).any() and bool((factors.abs() < _LARGE_FACTOR).all())


def _kernel_groups(group: Tensor) -> Tensor | None:
    """Return the group of each run of columns that kernels take as one group, with the longest possible runs.

    Return `None` if there are no such runs.
    """
    for size in KERNEL_GROUPS:
        if len(group) % size == 0:
            of_run = group.view(-1, size)
            if (of_run == of_run[:, :1]).all():
                return of_run[:, 0]
    return None


def _groups_in_order(group: Tensor) -> slice | None:
    """Return the groups of some columns; `None` unless they are consecutive, with equally many of the columns."""
    first, stop = int(group[0]), int(group[-1]) + 1
    if stop <= first or len(group) % (stop - first):
        return None
    in_order = group.view(stop - first, -1) == torch.arange(first, stop).unsqueeze(-1)
    return slice(first, stop) if in_order.all() else None


def quantized_matrix(stored: QuantizedTensors, tensor_of: Callable[[str], Tensor]) -> QuantizedMatrix:
    """Return the matrix that some tensors of a checkpoint hold. Raises `CheckpointError` for a group out of range."""
    rows, _ = stored.matrix
    numbers, scale = tensor_of(stored.numbers), tensor_of(stored.scale)
    is_by_row = stored.form in ("numbers", "compressed")
    factors = factors_by_row(scale, stored.matrix, stored.num_shards) if is_by_row else scale.t().float()
    bits: int | None = stored.bits
    if stored.form == "numbers":
        bits = None
    elif stored.form == "awq":
        bits, numbers = None, awq_numbers(numbers)[:rows]
    elif stored.form != "compressed":
        numbers = numbers.t()
    return QuantizedMatrix(
        numbers=numbers,
        bits=bits,
        factors=factors,
        zeros=_symmetric(stored, factors) if stored.zeros is None else _zeros(stored, tensor_of(stored.zeros)),
        group=_groups(stored, tensor_of, factors.shape[1], group_columns(stored, tuple(scale.shape))),
        code_bits=None if stored.form == "numbers" else stored.bits,
    )


def _symmetric(stored: QuantizedTensors, factors: Tensor) -> Tensor | None:
    """Return the zeros of numbers that have none in the checkpoint: packed ones are stored with an offset."""
    return None if stored.form == "numbers" else torch.tensor(1 << stored.bits - 1).expand_as(factors)


def _zeros(stored: QuantizedTensors, zeros: Tensor) -> Tensor:
    """Return the zeros of a matrix, [rows, groups], by its tensor of them."""
    rows, _ = stored.matrix
    match stored.form:
        case "numbers":
            return factors_by_row(zeros, stored.matrix, stored.num_shards)
        case "compressed":
            return across_rows(zeros.reshape(len(zeros), -1), stored.bits)[:rows]
        case "awq":
            return awq_numbers(zeros)[:rows]
        case "gptq" | "gptq_v2":
            return gptq_zeros(zeros, stored.bits, less_one=stored.form == "gptq")[:rows]


def _groups(stored: QuantizedTensors, tensor_of: Callable[[str], Tensor], num_groups: int, group_size: int) -> Tensor:
    """Return the group of each column, int64."""
    _, columns = stored.matrix
    group = None if stored.group is None else tensor_of(stored.group).long()
    if group is None or -1 in group:  # compressed-tensors writes -1 where the order of columns has no effect
        return torch.arange(columns).div_(group_size, rounding_mode="floor")
    if int(group.min()) < 0 or int(group.max()) >= num_groups:
        raise CheckpointError(f"tensor {stored.group} has groups that are not among the {num_groups} of {stored.scale}")
    return group


def factors_by_row(scale: Tensor, shape: tuple[int, int], num_shards: int = 1) -> Tensor:
    """Return the factors of a matrix as float32 [rows, groups].

    `scale` is one factor, one for each row, one for each group of a row, or one for each block. With `num_shards` equal
    parts below each other, each part may begin with a new block, as in MiMo-V2.5's fused projections. The number of
    factors tells whether it does.
    """
    rows, _ = shape
    scale = scale.float()
    if scale.ndim < 2 or tuple(scale.shape) in ((1, 1), (rows, 1)):
        return scale.reshape(-1, 1).expand(rows, 1)
    if len(scale) == rows > 1:
        return scale
    part = rows if len(scale) == ceil_div(rows, BLOCK) else rows // num_shards
    row = torch.arange(rows)
    return scale[row // part * ceil_div(part, BLOCK) + row % part // BLOCK]


def along_rows(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 [rows, words], as uint8 [rows, numbers]; those of a row are packed together."""
    octets = words.contiguous().view(torch.uint8)  # x86 and Arm store the lowest bits first
    if bits == 8:
        return octets
    # Each byte is copied once for each number in it. Each copy is shifted so that its number begins the byte.
    octets = octets.to(torch.int16 if bits == 4 else torch.int32)
    spread = octets.clone()
    for place in range(1, 8 // bits):
        spread |= octets << place * (8 - bits)
    spread &= sum(((1 << bits) - 1) << 8 * place for place in range(8 // bits))
    return spread.view(torch.uint8)


def across_rows(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the numbers in int32 [words, columns], as uint8 [numbers, columns]; those of a column are packed together.

    `order` has the row of each number in a word, the lowest bits first; they follow each other if it is `None`.
    """
    words = words.contiguous()
    numbers = torch.empty(len(words), 32 // bits, words.shape[1], dtype=torch.uint8, device=words.device)
    for place, row in enumerate(order or range(32 // bits)):
        numbers[:, row] = (words >> place * bits).bitwise_and_((1 << bits) - 1)
    return numbers.flatten(0, 1)


def awq_numbers(words: Tensor) -> Tensor:
    """Return the numbers of AWQ's int32 [columns, words], as uint8 [rows, columns]."""
    return across_rows(words.t(), 32 // len(_AWQ_ROWS), _AWQ_ROWS)


def gptq_zeros(words: Tensor, bits: int, *, less_one: bool) -> Tensor:
    """Return the zeros of GPTQ's int32 [groups, words], as uint8 [rows, groups].

    With `less_one`, they are stored less one. Programs subtract that from whole words, so a zero of 0 borrows from the
    next.
    """
    if less_one:
        words = words + sum(1 << place for place in range(0, 32, bits))
    return across_rows(words.t(), bits)
