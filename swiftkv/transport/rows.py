"""A pool as rows of bytes at any offset, for transports that send them through the host."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.transport.base import DevicePool, Int64Array, SharedPool
from swiftkv.transport.fence import Fence

_WORD_BYTES = 8


class Rows(Protocol):
    """The rows of one pool. `take` and `put` return when the bytes are there."""

    nbytes: int

    def begin_thread(self) -> None:
        """Prepare the calling thread. From now on only this thread may make the other calls, except `fence`."""

    def take(self, offsets: Int64Array, width_bytes: int) -> Tensor:
        """Return the bytes at `offsets [k]` in host memory, uint8 [k, width_bytes]."""

    def put(self, offsets: Int64Array, rows: Tensor) -> None:
        """Write `rows`, uint8 [k, width_bytes] in host memory, at `offsets [k]`; no two overlap."""

    def fence(self) -> Fence:
        """Return a fence after all work that the calling thread has launched on the pool's device so far."""


def rows_of(pool: SharedPool | DevicePool) -> Rows:
    return DeviceRows(pool) if isinstance(pool, DevicePool) else HostRows(pool)


class HostRows:
    """The rows of a pool in host memory."""

    def __init__(self, pool: SharedPool) -> None:
        self.nbytes = pool.nbytes
        self._bytes = pool.tensor.numpy()

    def begin_thread(self) -> None:
        """Do nothing: every thread can use host memory."""

    def take(self, offsets: Int64Array, width_bytes: int) -> Tensor:
        return torch.from_numpy(self._at(width_bytes)[offsets])

    def put(self, offsets: Int64Array, rows: Tensor) -> None:
        self._at(rows.shape[1])[offsets] = rows.numpy()

    def fence(self) -> Fence:
        return Fence(torch.device("cpu"))

    def _at(self, width_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a view, uint8 [nbytes - width_bytes + 1, width_bytes], whose row `i` begins at byte `i`."""
        return np.lib.stride_tricks.as_strided(self._bytes, (self.nbytes - width_bytes + 1, width_bytes), (1, 1))


class DeviceRows:
    """The rows of a pool on a CUDA device, which are copied on a CUDA stream of their own."""

    def __init__(self, pool: DevicePool) -> None:
        self.nbytes = pool.nbytes
        self._pool = pool.tensor
        self._device = pool.tensor.device
        self._stream = _rows_stream(self._device)

    def begin_thread(self) -> None:
        """Choose the pool's GPU: a new thread is on GPU 0, and would make a context of half a GiB there."""
        torch.cuda.set_device(self._device)

    def take(self, offsets: Int64Array, width_bytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return gather_rows(self._pool, torch.from_numpy(offsets).to(self._device), width_bytes).cpu()

    def put(self, offsets: Int64Array, rows: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            scatter_rows(self._pool, torch.from_numpy(offsets).to(self._device), rows.to(self._device))
            self._stream.synchronize()

    def fence(self) -> Fence:
        return Fence(self._device)


@cache
def _rows_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream for all rows of a device: the same one each time.

    All attachments can share it, because the host waits for each copy. Torch has only a few streams, and hands them out
    again and again. If every attachment took a new one, rows would in time be copied on the stream of a capture, and
    break that.
    """
    return torch.cuda.Stream(device)


def gather_rows(pool: Tensor, offsets: Tensor, width_bytes: int) -> Tensor:
    """Return uint8 [k, width_bytes]: the rows of `pool` (uint8, flat) at int64 `offsets [k]`; all multiples of 8."""
    words = _word_indices(offsets, width_bytes)
    return pool.view(torch.int64)[words].view(torch.uint8)


def scatter_rows(pool: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Write `rows`, uint8 [k, width_bytes], where `gather_rows` would read them."""
    words = _word_indices(offsets, rows.shape[1])
    pool.view(torch.int64)[words] = rows.view(torch.int64)


def _word_indices(offsets: Tensor, width_bytes: int) -> Tensor:
    """Return int64 [k, width_bytes / 8]: layer blocks are whole words, and begin at whole words."""
    assert width_bytes % _WORD_BYTES == 0
    return offsets[:, None] // _WORD_BYTES + torch.arange(width_bytes // _WORD_BYTES, device=offsets.device)
