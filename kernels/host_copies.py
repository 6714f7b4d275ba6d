"""Copies between the host and a device, in order on its current stream, that do not block the host.

Torch keeps page-locked memory alive until it is copied. If the device is the host, the results are views.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the current content of `array` on `device`."""
    return _staged(array, device).to(device, non_blocking=True)


def write(array: npt.NDArray[Any], target: Tensor) -> None:
    """Copy the current content of `array` [N] to the first N elements of `target`."""
    target[: len(array)].copy_(_staged(array, target.device), non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Return `tensor` on the host, valid once its device has done everything launched so far."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return new host memory, uint8 [num_bytes], that `device` copies from and to by itself.

    Raises `RuntimeError` if no such memory is left. Torch keeps it for later calls when it is no longer used.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _staged(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
