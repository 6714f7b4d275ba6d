"""The properties of a GPU by which the tiles and grids of kernels are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a GPU. Memory is in bytes; `capability` is 90 for NVIDIA's 9.0."""

    capability: int
    num_sms: int
    shared_bytes_per_sm: int

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that one program can ask for: each takes 1 KiB more."""
        return self.shared_bytes_per_sm - 1024

    @property
    def has_tensor_memory_accelerator(self) -> bool:
        return self.capability >= 90

    @property
    def multiplies_from_shared_memory(self) -> bool:
        """Whether matrix products read shared memory, not registers: on Hopper and large Blackwells."""
        return 90 <= self.capability < 120

    def programs_per_sm(self, shared_bytes: int, most: int) -> int:
        """Return how many programs with `shared_bytes` each run on a multiprocessor, at least 1 and at most `most`."""
        return max(1, min(most, self.shared_bytes_per_sm // (shared_bytes + 1024)))


H100 = DeviceLimits(90, 132, 228 << 10)
A100 = DeviceLimits(80, 108, 164 << 10)
L4 = DeviceLimits(89, 58, 100 << 10)
RTX_5090 = DeviceLimits(120, 170, 100 << 10)


@cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Return the limits of `device`; without a GPU an H100's, so that the interpreter checks the schedule of one."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    capability = found.major * 10 + found.minor
    return DeviceLimits(capability, found.multi_processor_count, found.shared_memory_per_multiprocessor)
