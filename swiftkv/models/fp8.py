"""FP8 weights: e4m3 numbers that share a factor by the block of 128 x 128, by the row, or all together."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkv.arithmetic import ceil_div
from swiftkv.models.quantization import BLOCK


def unpack(matrix: Tensor, scale: Tensor, dtype: torch.dtype, num_shards: int = 1) -> Tensor:
    """Return float8 [rows, columns] times its factors, computed in float32 and rounded to `dtype`.

    `scale` is one factor, one for each row, or one for each block. Blocks begin anew with each of `num_shards` equal
    parts, one below the other, if there are as many as that takes: so MiMo-V2.5 stores its fused projections.
    """
    rows, columns = matrix.shape
    scale = scale.float()
    if scale.ndim < 2 or tuple(scale.shape) in ((1, 1), (rows, 1)):
        return matrix.float().mul_(scale.reshape(-1, 1)).to(dtype)
    part = rows if len(scale) == ceil_div(rows, BLOCK) else rows // num_shards
    row = torch.arange(rows, device=matrix.device)
    by_row = scale[row // part * ceil_div(part, BLOCK) + row % part // BLOCK]  # [rows, blocks across]
    unpacked = matrix.float()
    whole = columns // BLOCK
    unpacked[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).mul_(by_row[:, :whole, None])
    unpacked[:, whole * BLOCK :].mul_(by_row[:, whole:])
    return unpacked.to(dtype)
