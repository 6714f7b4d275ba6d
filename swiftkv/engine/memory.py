"""The bytes of KV that an engine may have on its device: arithmetic on measurements of its own process.

Nothing is subtracted from the device's free memory: engines that start together would each count the other's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swiftkv.errors import ConfigError
from swiftkv.kernels.cuda_runtime import bytes_beside_torch
from swiftkv.units import DeviceShare, PoolMemory

GRAPH_BYTES = 1 << 30
"""The most bytes that the CUDA graphs of an engine may take."""

RUNTIME_BYTES = 1 << 30
"""Bytes set aside for what torch's allocator does not count: CUDA's context, kernels, and libraries' workspaces."""

_LATER_BYTES = 256 << 20  # allocated beside torch after the largest step


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The bytes of its device that an engine uses besides KV."""

    weights_bytes: int
    activation_bytes: int  # the most that the largest step needs beyond the weights
    graph_bytes: int = 0  # allowed to CUDA graphs
    runtime_bytes: int = RUNTIME_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.graph_bytes + self.runtime_bytes

    def __str__(self) -> str:
        return (
            f"weights {_gib(self.weights_bytes)} + activations {_gib(self.activation_bytes)} + CUDA graphs "
            f"{_gib(self.graph_bytes)} + runtime {_gib(self.runtime_bytes)}"
        )


def kv_bytes_on_host(memory: PoolMemory) -> int:
    """Return the bytes of a pool in host memory. Raises `ConfigError` for a part of a GPU."""
    if isinstance(memory, DeviceShare):
        raise ConfigError(
            f"kv_cache.memory: {memory} is a part of a GPU, and this engine has none; write a size such as 4GiB"
        )
    return memory.num_bytes


def kv_bytes_on_device(memory: PoolMemory, device_bytes: int, use: DeviceUse, minimum_bytes: int) -> int:
    """Return the bytes of a pool on a device of `device_bytes`.

    Raises `ConfigError`, with the sum, if the engine does not fit or the pool would be less than `minimum_bytes`.
    """
    if isinstance(memory, DeviceShare):
        part = memory.part
        if not 0 < part <= 1:
            raise ConfigError(f"kv_cache.memory: a part of the device is more than 0 and at most 1, not {float(part)}")
        share_bytes = math.floor(part * device_bytes)
        kv_bytes = share_bytes - use.total_bytes
        if kv_bytes < minimum_bytes:
            raise ConfigError(
                f"kv_cache.memory: {float(part):.0%} of {_gib(device_bytes)} is {_gib(share_bytes)}; minus {use} "
                f"leaves {_gib(kv_bytes)} for KV, but one sequence of max_model_len needs {_gib(minimum_bytes)}"
            )
        return kv_bytes
    kv_bytes = memory.num_bytes
    if kv_bytes < minimum_bytes:
        raise ConfigError(
            f"kv_cache.memory: {_gib(kv_bytes)} are less than the {_gib(minimum_bytes)} that one sequence of "
            "max_model_len needs"
        )
    if kv_bytes + use.total_bytes > device_bytes:
        raise ConfigError(
            f"kv_cache.memory: KV {_gib(kv_bytes)} + {use} = {_gib(kv_bytes + use.total_bytes)}, but the device has "
            f"only {_gib(device_bytes)}"
        )
    return kv_bytes


def measure_use(device: torch.device, largest_step: Callable[[], None], graph_bytes: int = 0) -> DeviceUse:
    """Measure the memory of this process on `device` now (weights), and the most that `largest_step` adds to it.

    Call it once, when the weights are loaded and before there is a pool. The memory of other processes does not count.
    `graph_bytes` is set aside for CUDA graphs, which are captured later.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights_bytes = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_reserved(device) - weights_bytes
    torch.cuda.empty_cache()
    return DeviceUse(weights_bytes, activation_bytes, graph_bytes, runtime_bytes(bytes_beside_torch(device)))


def runtime_bytes(measured_bytes: int | None) -> int:
    """Return the bytes to set aside beside torch's allocator, given those measured after the largest step, if any."""
    return RUNTIME_BYTES if measured_bytes is None else max(RUNTIME_BYTES, measured_bytes + _LATER_BYTES)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
