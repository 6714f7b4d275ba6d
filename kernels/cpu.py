"""The `Ops` of the CPU: linear layers over packed weights, RMSNorm and embedding here, attention in `cpu_attention`.

Activations are contiguous CPU tensors of the weights' dtype: float32, bfloat16 or float16. Sums are kept in float32. A
row of a result depends only on its own row of the input, bit for bit, and not on other rows or the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv._cpu import PackedLinear
from swiftkv.kernels.cpu_attention import attention, prepare_batch, rope_write_kv
from swiftkv.kernels.cpu_deferral import deferred, empty
from swiftkv.kernels.cpu_experts import PackedExperts, add_experts, pack_experts, route
from swiftkv.kernels.cpu_packing import keeps_codes, pack_linear
from swiftkv.kernels.cpu_tensors import DTYPES, check, native_activation, norm_weight_kind
from swiftkv.kernels.ops import PackedMlp

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

name = "cpu"
rounding = f"cpu {_cpu.isa()}{' amx' if _cpu.amx_is_emulated() else ''}"
"""Names how these kernels round: each instruction set sums in an order of its own."""

_TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


def set_num_threads(n: int) -> None:
    """Share the work of every kernel between `n` threads, the calling one included.

    Raises `OSError` if the system does not give this process so many; then the calling one works alone.
    """
    try:
        _cpu.set_num_threads(n)
    except RuntimeError as error:
        raise OSError(str(error)) from None


def linear(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias, [M, N]."""
    out = empty((x.shape[0], w.out_features), x.dtype)
    _multiply(x, w, None, 0.0, _cpu.Epilogue.STORE, out)
    return out


def linear_residual(x: Tensor, w: PackedLinear, residual: Tensor) -> None:
    """Add x [M, K] @ w.T + bias to `residual` [M, N] in place, rounded once after the float32 sum."""
    _multiply(x, w, None, 0.0, _cpu.Epilogue.RESIDUAL, residual)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, w: PackedLinear) -> Tensor:
    """Return linear(rms_norm(x [M, K], norm_weight [K], eps), w), [M, N]."""
    out = empty((x.shape[0], w.out_features), x.dtype)
    _multiply(x, w, norm_weight, eps, _cpu.Epilogue.STORE, out)
    return out


def gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> Tensor:
    """Return linear(a, down), [M, N], of the activation a of gate, up = norm_linear(x, norm, norm_eps, gate_up)."""
    out = empty((x.shape[0], mlp.down.out_features), x.dtype)
    _multiply_gated(x, mlp, _cpu.Epilogue.STORE, out)
    return out


def add_gated_mlp(x: Tensor, mlp: PackedMlp[PackedLinear]) -> None:
    """Add the gated MLP of x [M, K] to x in place, rounded once after the float32 sum."""
    _multiply_gated(x, mlp, _cpu.Epilogue.RESIDUAL, x)


def logits(x: Tensor, w: PackedLinear) -> Tensor:
    """Return x [M, K] @ w.T + bias in float32, [M, N]."""
    out = empty((x.shape[0], w.out_features), torch.float32)
    _multiply(x, w, None, 0.0, _cpu.Epilogue.STORE, out)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [M, K] / sqrt(mean(x^2) + eps) times weight [K] (`Ops.rms_norm`)."""
    rows, k = x.shape
    check(x, x.dtype, (rows, k), "x")
    kind = norm_weight_kind(weight, x.dtype, k)
    out = empty((rows, k), x.dtype)
    _cpu.rms_norm(x.data_ptr(), rows, k, weight.data_ptr(), kind, eps, DTYPES[x.dtype], out.data_ptr())
    return out


def rms_norm_residual(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    """Add rms_norm(x [M, K], weight [K], eps) to `residual` [M, K] in place; both norm and sum are rounded."""
    rows, k = x.shape
    check(x, x.dtype, (rows, k), "x")
    check(residual, x.dtype, (rows, k), "residual")
    kind = norm_weight_kind(weight, x.dtype, k)
    _cpu.rms_norm_residual(x.data_ptr(), rows, k, weight.data_ptr(), kind, eps, DTYPES[x.dtype], residual.data_ptr())


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of table [V, K] for token_ids int32 [T], [T, K]. Raises `IndexError` for an id outside [0, V)."""
    vocab_size, k = table.shape
    check(token_ids, torch.int32, (token_ids.numel(),), "token_ids")
    check(table, table.dtype, (vocab_size, k), "table")
    out = empty((token_ids.numel(), k), table.dtype)
    _cpu.embed(
        token_ids.data_ptr(),
        token_ids.numel(),
        table.data_ptr(),
        vocab_size,
        k * table.element_size(),
        out.data_ptr(),
    )
    return out


def _multiply(
    x: Tensor,
    w: PackedLinear,
    norm_weight: Tensor | None,
    eps: float,
    epilogue: _cpu.Epilogue,
    out: Tensor,
) -> None:
    assert not w.interleaved, "interleaved weights belong to gated MLPs"
    rows, dtype = x.shape[0], _TORCH_DTYPES[w.dtype]
    check(x, dtype, (rows, w.in_features), "x")
    no_norm = _cpu.NormWeight.SAME_DTYPE
    norm_kind = no_norm if norm_weight is None else norm_weight_kind(norm_weight, dtype, w.in_features)
    check(out, out.dtype, (rows, w.out_features), "out")
    _cpu.linear(
        w,
        x.data_ptr(),
        rows,
        0 if norm_weight is None else norm_weight.data_ptr(),
        norm_kind,
        eps,
        epilogue,
        DTYPES[out.dtype],
        out.data_ptr(),
    )


def _multiply_gated(x: Tensor, mlp: PackedMlp[PackedLinear], epilogue: _cpu.Epilogue, out: Tensor) -> None:
    gate_up, down = mlp.gate_up, mlp.down
    rows, dtype = x.shape[0], _TORCH_DTYPES[gate_up.dtype]
    assert gate_up.interleaved
    assert not down.interleaved
    assert (down.in_features, down.dtype) == (gate_up.out_features // 2, gate_up.dtype)
    check(x, dtype, (rows, gate_up.in_features), "x")
    check(out, dtype, (rows, down.out_features), "out")
    _cpu.gated_mlp(
        gate_up,
        down,
        x.data_ptr(),
        rows,
        mlp.norm.data_ptr(),
        norm_weight_kind(mlp.norm, dtype, gate_up.in_features),
        mlp.norm_eps,
        native_activation(mlp.activation),
        epilogue,
        out.data_ptr(),
    )
