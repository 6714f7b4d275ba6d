"""Checks of tensors for the C++ kernels, which see only addresses."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels.experts import GatedActivation

DTYPES = {
    torch.float32: _cpu.DType.F32,
    torch.bfloat16: _cpu.DType.BF16,
    torch.float16: _cpu.DType.F16,
}


@cache
def native_activation(activation: GatedActivation) -> _cpu.GatedActivation:
    return _cpu.GatedActivation(activation.alpha, activation.cubic, activation.limit, activation.up_offset)


def norm_weight_kind(weight: Tensor, dtype: torch.dtype, width: int) -> _cpu.NormWeight:
    """Return how a norm of `dtype` uses its weight. Raises `ValueError` for one that it cannot use."""
    check(weight, dtype if weight.dtype == dtype else torch.float32, (width,), "norm_weight")
    return _cpu.NormWeight.SAME_DTYPE if weight.dtype == dtype else _cpu.NormWeight.FLOAT32


def check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raise `ValueError` unless dtype and shape fit. C++ sees only an address, and would access other memory."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)}, contiguous={x.is_contiguous()}; need contiguous {dtype} {shape}"
        )
