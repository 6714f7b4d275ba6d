"""Picks the kernels for a device. No other module knows that there are several kinds."""

from __future__ import annotations

import os

import torch

from swiftkv.errors import ConfigError
from swiftkv.kernels.ops import AnyOps

OPS_VARIABLE = "SWIFTKV_OPS"
"""Environment variable: `reference` has every model run on plain torch, for comparison; `triton` has models on the CPU
run on the kernels of GPUs, in Triton's interpreter, for tests."""

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def select_ops(device: torch.device | str) -> AnyOps:
    """Return the fastest kernels that `device` and this machine can run, unless the environment names others.

    Raises `ConfigError` if it names kernels that cannot be used.
    """
    device = torch.device(device)
    wanted = os.environ.get(OPS_VARIABLE, "")
    if wanted not in ("", "reference", "triton"):
        raise ConfigError(f"{OPS_VARIABLE}={wanted} in the environment is not reference or triton; unset it")
    if wanted == "reference":
        return reference_ops()
    if wanted == "triton" and device.type != "cuda" and os.environ.get(INTERPRET_VARIABLE) != "1":
        raise ConfigError(
            f"{OPS_VARIABLE}=triton on the device {device}: Triton compiles for GPUs; set {INTERPRET_VARIABLE}=1 to "
            f"run its interpreter, or unset {OPS_VARIABLE}"
        )
    if device.type == "cuda" or wanted == "triton":
        return triton_ops()
    if device.type == "cpu" and _cpu_is_supported():
        return cpu_ops()
    return reference_ops()


def cpu_ops() -> AnyOps:
    """Return the C++ kernels. Raises `ImportError` if the extension is not built."""
    from swiftkv.kernels import cpu

    return cpu


def triton_ops() -> AnyOps:
    """Return Triton and cuBLAS, for CUDA devices or interpreted. Raises `ImportError` if triton is not installed."""
    from swiftkv.kernels import triton_ops

    return triton_ops


def reference_ops() -> AnyOps:
    """Return plain torch, for any device."""
    from swiftkv.kernels import reference

    return reference


def _cpu_is_supported() -> bool:
    try:
        from swiftkv import _cpu

        _cpu.isa()
    except (ImportError, RuntimeError):  # not built for this platform, or the CPU has no AVX2
        return False
    except ValueError as error:  # of the environment
        raise ConfigError(f"{error}; or unset it") from None
    return True
