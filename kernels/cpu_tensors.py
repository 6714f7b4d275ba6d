"""Tensors as the C++ kernels take them: by address, so that dtype and shape are checked here."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkv import _cpu

DTYPES = {
    torch.float32: _cpu.DType.F32,
    torch.bfloat16: _cpu.DType.BF16,
    torch.float16: _cpu.DType.F16,
}


def check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raise `ValueError` for a tensor that C++, which sees only an address, would read or write wildly."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)}, contiguous={x.is_contiguous()}; need contiguous {dtype} {shape}"
        )
