"""Weights as the CPU's kernels read them. See `kernels.cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftkv._cpu import CodeKind, PackedLinear
from swiftkv.kernels.cpu_tensors import DTYPES
from swiftkv.kernels.reference import biases_of
from swiftkv.kernels.weight_codes import CodedMatrix, Coding, unpacked

_KINDS = {"four_bits": CodeKind.FOUR_BITS, "int8": CodeKind.INT8, "fp8": CodeKind.FP8}


def keeps_codes(dtype: torch.dtype) -> bool:
    """Return whether matrices of `dtype` stay codes in memory. Each use unpacks them, piece by piece."""
    return dtype in (torch.bfloat16, torch.float16)


def pack_linear(
    weights: Sequence[Tensor | CodedMatrix],
    biases: Sequence[Tensor | None] | None = None,
    interleave: bool = False,
) -> PackedLinear:
    """Copy weights [N_i, K] into the layout that this CPU's kernels read.

    Weights stay codes if all of them are codes in one format. The results are those of the unpacked weights, bit for
    bit. Raises `ValueError` if the weights differ in K or dtype, or the dtype has no kernel.
    """
    biases = biases_of(weights, biases)
    dtype = weights[0].dtype
    if dtype not in DTYPES:
        raise ValueError(f"no CPU kernel for {dtype}: use float32, bfloat16 or float16")
    bias_rows = [None if b is None else b.to(torch.float32).contiguous() for b in biases]
    coded = [w for w in weights if isinstance(w, CodedMatrix)]
    if keeps_codes(dtype) and len(coded) == len(weights) and len(set(map(_format_of, coded))) == 1:
        return _pack_codes(coded, bias_rows, interleave)
    rows = [unpacked(w).contiguous() for w in weights]
    sources = [(w.data_ptr(), w.shape[0], _address(b)) for w, b in zip(rows, bias_rows, strict=True)]
    return PackedLinear(sources, rows[0].shape[1], DTYPES[dtype], interleave)


def _pack_codes(matrices: Sequence[CodedMatrix], biases: Sequence[Tensor | None], interleave: bool) -> PackedLinear:
    like = matrices[0]
    kind = _KINDS[like.coding.kind]
    values = like.coding.values if kind == CodeKind.FOUR_BITS else ()
    parts = [
        (m.codes.contiguous(), m.factors.contiguous(), None if m.zeros is None else m.zeros.contiguous())
        for m in matrices
    ]
    sources = [
        (codes.data_ptr(), factors.data_ptr(), _address(zeros), len(codes), _address(bias))
        for (codes, factors, zeros), bias in zip(parts, biases, strict=True)
    ]
    return PackedLinear(sources, kind, values, like.group_size, like.shape[1], DTYPES[like.dtype], interleave)


def _format_of(matrix: CodedMatrix) -> tuple[int, bool, Coding]:
    return matrix.group_size, matrix.zeros is None, matrix.coding


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
