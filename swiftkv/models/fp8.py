"""FP8 weights: e4m3 numbers that share a factor by the block of 128 x 128, by the row, or all together."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.models.quantization import BLOCK


def factors_by_row(scale: Tensor, rows: int, num_shards: int = 1) -> Tensor:
    """Return the factors of a matrix as float32 [rows, blocks across], or [rows, 1] if a row has only one.

    `scale` is one factor, one for each row, or one for each block. Blocks begin anew with each of `num_shards` equal
    parts, one below the other, if there are as many as that takes: so MiMo-V2.5 stores its fused projections.
    """
    scale = scale.float()
    if scale.ndim < 2 or tuple(scale.shape) in ((1, 1), (rows, 1)):
        return scale.reshape(-1, 1).expand(rows, 1)
    part = rows if len(scale) == ceil_div(rows, BLOCK) else rows // num_shards
    row = torch.arange(rows)
    return scale[row // part * ceil_div(part, BLOCK) + row % part // BLOCK]


def unpack(numbers: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float8 [rows, columns] times the `factors_by_row` of these rows, rounded from float32 to `dtype`."""
    unpacked = numbers.float()
    whole = numbers.shape[1] // BLOCK if factors.shape[1] > 1 else 0  # blocks
    unpacked[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).mul_(factors[:, :whole, None])
    unpacked[:, whole * BLOCK :].mul_(factors[:, whole:])
    return unpacked.to(dtype)
