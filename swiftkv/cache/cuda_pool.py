"""The pool of an engine on a CUDA device: one allocation of its own that peers on the machine can map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swiftkv.cache.geometry import GroupRegion, KVGroup, lay_out, pool_bytes_of
from swiftkv.cache.pool import Pool, SharedHostMemory, region_view
from swiftkv.errors import NoRoomError
from swiftkv.kernels.cuda_runtime import CudaRuntimeError, DeviceMemory


class CudaPool:
    """One allocation in device memory, with the regions of all KV groups as in `cache.pool.Pool`."""

    def __init__(
        self, groups: Sequence[tuple[KVGroup, int]], device: torch.device, shares_extents: bool = False
    ) -> None:
        """Allocate zeros for `groups`, (group, number of blocks). Raises `NoRoomError` where they do not fit."""
        self.regions: tuple[GroupRegion, ...] = lay_out(groups, shares_extents)
        self.nbytes = pool_bytes_of(self.regions)
        torch.cuda.empty_cache()  # gives back memory that only loading the weights needed
        try:
            self._memory = DeviceMemory(self.nbytes, device)
        except CudaRuntimeError as error:
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            raise NoRoomError(
                f"kv_cache.memory: {device} has no {self.nbytes} bytes for the pool: {free_bytes} of its {total_bytes} "
                f"are free ({error})"
            ) from error
        self.tensor: torch.Tensor = self._memory.tensor()  # uint8 [nbytes]

    @property
    def host_blocks(self) -> None:
        """No host memory lies beside memory of a device."""

    @property
    def host_memory(self) -> None:
        """No host memory lies beside memory of a device."""

    host_offset_bytes = 0

    def identity(self) -> tuple[()]:
        """Return nothing: memory of a device has no descriptor."""
        return ()

    def region_tensor(self, index: int) -> torch.Tensor:
        """Return group `index`'s bytes as uint8 `[num_blocks, num_layers, layer_block_bytes]`, a view."""
        return region_view(self.tensor, self.regions[index])

    def attended_tensor(self, index: int) -> torch.Tensor:
        """Return all that kernels may attend to as group `index`'s layer blocks: its region, flat."""
        return self.region_tensor(index).view(-1)

    def fill_ahead(self) -> None:
        """Do nothing: memory of a device is backed when it is allocated."""

    def ipc_handle(self) -> bytes:
        """Return a handle by which another process maps the pool, from its first byte on."""
        return self._memory.ipc_handle()


def allocate_pool(
    groups: Sequence[tuple[KVGroup, int]],
    device: torch.device,
    name: str = "pool",
    shares_extents: bool = False,
    host: SharedHostMemory | None = None,
) -> Pool | CudaPool:
    """Allocate the pool of an engine that runs on `device`. Only a pool on the CPU has `host` beside it.

    Raises `NoRoomError` or `OSError` without room.
    """
    if device.type == "cuda":
        return CudaPool(groups, device, shares_extents)
    return Pool(groups, name, shares_extents, host)
