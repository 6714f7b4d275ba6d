"""Picks the kernels for a device. Nothing else knows that there are several kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from swiftkv.errors import ConfigError

OPS_VARIABLE = "SWIFTKV_OPS"
"""Environment variable: `reference` has every model run on plain torch, for comparison; `triton` has models on the CPU
run on the kernels of GPUs, in Triton's interpreter, for tests."""

INTERPRET_VARIABLE = "TRITON_INTERPRET"


class PackedLinear(Protocol):
    """Weights of a linear layer, in whatever form the kernels read; each kind of kernels has its own."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One kind of kernels: the functions of `kernels/reference.py`, where their meaning is written down."""

    name: Literal["cpu", "reference", "triton"]
    set_num_threads: Callable[[int], None]
    pack_linear: Callable[..., PackedLinear]
    linear: Callable[..., Tensor]
    linear_residual: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    norm_linear: Callable[..., Tensor]
    norm_gate_up_silu: Callable[..., Tensor]
    logits: Callable[..., Tensor]
    embed: Callable[..., Tensor]
    prepare_batch: Callable[..., Any]
    rope_write_kv: Callable[..., None]
    attention: Callable[..., Tensor]


def select_ops(device: torch.device | str) -> Ops:
    """The fastest kernels that `device` and this machine can run, unless the environment says which.

    Raises `ConfigError` if it says what cannot be.
    """
    device = torch.device(device)
    wanted = os.environ.get(OPS_VARIABLE, "")
    if wanted not in ("", "reference", "triton"):
        raise ConfigError(f"{OPS_VARIABLE}={wanted} in the environment is not reference or triton; unset it")
    if wanted == "reference":
        ops = reference_ops()
        return replace(ops, prepare_batch=partial(ops.prepare_batch, device=device))
    if wanted == "triton" and device.type != "cuda" and os.environ.get(INTERPRET_VARIABLE) != "1":
        raise ConfigError(
            f"{OPS_VARIABLE}=triton on the device {device}: Triton compiles for GPUs; set {INTERPRET_VARIABLE}=1 to "
            f"run its interpreter, or unset {OPS_VARIABLE}"
        )
    if device.type == "cuda" or wanted == "triton":
        return triton_ops(device)
    if device.type == "cpu" and _cpu_is_supported():
        return cpu_ops()
    return reference_ops()


def cpu_ops() -> Ops:
    """The C++ kernels. Raises `ImportError` if the extension is not built."""
    from swiftkv.kernels import cpu, cpu_attention

    return _collect("cpu", cpu, cpu_attention)


def triton_ops(device: torch.device) -> Ops:
    """Triton and cuBLAS, on a CUDA device or interpreted. Raises `ImportError` if triton is not installed."""
    from swiftkv.kernels import triton_ops

    ops = _collect("triton", triton_ops, triton_ops)
    return replace(ops, prepare_batch=partial(ops.prepare_batch, device=device))


def reference_ops() -> Ops:
    """Plain torch, on any device."""
    from swiftkv.kernels import reference

    return _collect("reference", reference, reference)


def _collect(name: Literal["cpu", "reference", "triton"], layers: ModuleType, attention: ModuleType) -> Ops:
    return Ops(
        name=name,
        set_num_threads=layers.set_num_threads,
        pack_linear=layers.pack_linear,
        linear=layers.linear,
        linear_residual=layers.linear_residual,
        rms_norm=layers.rms_norm,
        norm_linear=layers.norm_linear,
        norm_gate_up_silu=layers.norm_gate_up_silu,
        logits=layers.logits,
        embed=layers.embed,
        prepare_batch=attention.prepare_batch,
        rope_write_kv=attention.rope_write_kv,
        attention=attention.attention,
    )


def _cpu_is_supported() -> bool:
    try:
        from swiftkv import _cpu

        _cpu.isa()
    except (ImportError, RuntimeError):  # not built for this platform, or the CPU has no AVX2
        return False
    return True
