"""Layers of a decoder on a GPU: torch's matrix products (cuBLAS), and Triton kernels for all that lies between.

Activations are contiguous CUDA tensors of the weights' dtype, bfloat16 or float16. `kernels/reference.py` has the same
functions in plain torch. They differ where a matrix product's result is stored before the next stage takes it up: it is
rounded to the dtype there, as transformers' models round it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.reference import PackedLinear, pack_linear
from swiftkv.kernels.triton_attention import attention, prepare_batch
from swiftkv.kernels.triton_elementwise import rms_norm, rope_write_kv, silu_and_mul

__all__ = [
    "PackedLinear",
    "attention",
    "embed",
    "linear",
    "linear_residual",
    "logits",
    "norm_gate_up_silu",
    "norm_linear",
    "pack_linear",
    "prepare_batch",
    "rms_norm",
    "rope_write_kv",
    "set_num_threads",
]


def set_num_threads(n: int) -> None:
    """A GPU shares its work between its multiprocessors by itself."""


def linear(x: Tensor, w: PackedLinear) -> Tensor:
    """x [M, K] @ w.T + bias -> [M, N]."""
    assert not w.interleaved
    return F.linear(x, w.weight, w.bias)


def linear_residual(x: Tensor, w: PackedLinear, residual: Tensor) -> None:
    """residual [M, N] += x [M, K] @ w.T + bias in place; rounded once, and once more if there is a bias."""
    assert not w.interleaved
    if w.bias is not None:
        residual += w.bias
    residual.addmm_(x, w.weight.t())


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, w: PackedLinear) -> Tensor:
    """linear(rms_norm(x [M, K], norm_weight [K], eps), w) -> [M, N]."""
    return linear(rms_norm(x, norm_weight, eps), w)


def norm_gate_up_silu(x: Tensor, norm_weight: Tensor, eps: float, w: PackedLinear) -> Tensor:
    """gate, up = linear(rms_norm(x [M, K], norm_weight [K], eps), w), rounded; silu(gate) * up -> [M, N / 2]."""
    assert w.interleaved
    return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), w.weight, w.bias))


def logits(x: Tensor, w: PackedLinear) -> Tensor:
    """x [M, K] @ w.T + bias -> float32 [M, N], the sums as they were kept."""
    assert not w.interleaved
    if x.dtype == torch.float32:
        return F.linear(x, w.weight, w.bias)
    product = torch.mm(x, w.weight.t(), out_dtype=torch.float32)
    return product if w.bias is None else product + w.bias


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, K] for token_ids int32 [T], on the host too -> [T, K]. Ids outside [0, V) end the process."""
    return F.embedding(token_ids.to(table.device, non_blocking=True), table)
