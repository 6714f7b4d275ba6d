"""The `Ops` of GPUs: torch's matrix products (cuBLAS), and Triton kernels for everything between.

Activations are contiguous CUDA tensors of the weights' dtype, bfloat16 or float16. Where a matrix product is stored
before the next stage reads it, it is rounded to the dtype, as in transformers' models. There results differ from those
of `kernels/reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.ops import PackedMlp
from swiftkv.kernels.reference import PackedLinear, deferred, keeps_codes, pack_linear
from swiftkv.kernels.reference_experts import PackedExperts, pack_experts, route
from swiftkv.kernels.triton_attention import attention, prepare_batch
from swiftkv.kernels.triton_elementwise import gated, rms_norm, rope_write_kv
from swiftkv.kernels.triton_experts import add_experts

__all__ = [
    "PackedExperts",
    "PackedLinear",
    "add_experts",
    "add_gated_mlp",
    "attention",
    "deferred",
    "embed",
    "gated_mlp",
    "keeps_codes",
    "linear",
    "linear_residual",
    "logits",
    "name",
    "norm_linear",
    "pack_experts",
    "pack_linear",
    "prepare_batch",
    "rms_norm",
    "rms_norm_residual",
    "rope_write_kv",
    "rounding",
    "route",
    "set_num_threads",
]

name = rounding = "triton"


def set_num_threads(n: int) -> None:
    """Do nothing: a GPU shares its work between its multiprocessors by itself."""


def linear(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias, [M, N]."""
    assert not w.interleaved
    return F.linear(x, w.weight, w.bias)


def linear_residual(x: Tensor, w: PackedLinear, residual: Tensor) -> None:
    """Add x [M, K] @ w.T + bias to `residual` [M, N] in place; rounded once, and once more if there is a bias."""
    assert not w.interleaved
    if w.bias is not None:
        residual += w.bias
    residual.addmm_(x, w.weight.t())


def rms_norm_residual(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    """Add rms_norm(x [M, K], weight [K], eps) to `residual` [M, K] in place; both norm and sum are rounded."""
    residual += rms_norm(x, weight, eps)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, w: PackedLinear) -> Tensor:
    """Return linear(rms_norm(x [M, K], norm_weight [K], eps), w), [M, N]."""
    return linear(rms_norm(x, norm_weight, eps), w)


def gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
    """Return linear(a, down), [M, N], of the activation a of gate and up, each rounded to the dtype."""
    return linear(_gate_up(x, mlp), mlp.down)


def add_gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> None:
    """Add the gated MLP of x [M, K] to x in place, as `linear_residual` adds."""
    linear_residual(_gate_up(x, mlp), mlp.down, x)


def logits(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias in float32, [M, N], the sums as they were kept."""
    assert not w.interleaved
    if x.dtype == torch.float32:
        return F.linear(x, w.weight, w.bias)
    product = torch.mm(x, w.weight.t(), out_dtype=torch.float32)
    return product if w.bias is None else product + w.bias


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of table [V, K] for token_ids int32 [T], which may be on the host; an id outside [0, V) is fatal."""
    return F.embedding(token_ids.to(table.device, non_blocking=True), table)


def _gate_up(x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
    assert mlp.gate_up.interleaved
    normed = rms_norm(x, mlp.norm, mlp.norm_eps)
    return gated(F.linear(normed, mlp.gate_up.weight, mlp.gate_up.bias), mlp.activation)
