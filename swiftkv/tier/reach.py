"""Moves blocks between the pools of an engine and the host memory that storage reads and writes.

A pool in host memory is read and written in place. Blocks of a pool on a device are copied through page-locked memory:
a block is one contiguous run of bytes, so a copy engine moves it in one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from swiftkv.errors import ConfigError
from swiftkv.kernels.host_copies import page_locked
from swiftkv.storage.buffers import staging_bytes
from swiftkv.tier.stored_blocks import RankParts
from swiftkv.transport.fence import Fence
from swiftkv.units import format_size


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one block: the same range of bytes in the pool of every rank."""

    offset_bytes: int
    part_bytes: int  # of each rank
    num_ranks: int

    @property
    def num_bytes(self) -> int:
        return self.num_ranks * self.part_bytes

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.part_bytes

    def of(self, pool: Tensor) -> Tensor:
        return pool[self.offset_bytes : self.end_bytes]


class Reach(Protocol):
    """The pools of all ranks, as the threads of a tier use them. One thread reads storage, and one writes to it."""

    @property
    def pools(self) -> Sequence[Tensor]:
        """The pools of all ranks, uint8 [pool bytes], our own first."""

    @property
    def max_read_bytes(self) -> float:
        """The most bytes that `landing` has room for at once; a block always finds room."""

    def begin_thread(self) -> None:
        """Prepare the calling thread. Call it first in each thread that uses this object or waits for its `fence`."""

    def fence(self) -> Fence:
        """Return a fence for everything that steps have launched so far: it may still use blocks that are free by now.

        Call it in the engine's thread.
        """

    def read_memory(self) -> Sequence[memoryview]:
        """Return all memory in which `landing` lies."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return new host memory for blocks on their way down, uint8 [num_bytes]. Raises `ConfigError` without room."""

    def landing(self, spans: Sequence[Span]) -> list[RankParts]:
        """Return the memory that storage reads these blocks into, until the next call."""

    def land(self, spans: Sequence[Span]) -> None:
        """Put the first blocks of the last `landing` in their places; return when they are there.

        The steps that use the previous contents of these places must have ended.
        """

    def take(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy computed blocks to a `buffer`. `copies` are (target, source). Return when all are copied."""


class HostReach:
    """The `Reach` of pools in host memory: storage reads into the blocks themselves."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self.pools = pools
        self._bytes = [pool.numpy().data for pool in pools]
        self.max_read_bytes = math.inf

    def begin_thread(self) -> None:
        """Do nothing: every thread can use host memory."""

    def fence(self) -> Fence:
        return Fence(self.pools[0].device)

    def read_memory(self) -> Sequence[memoryview]:
        return self._bytes

    def buffer(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError:
            raise ConfigError(
                f"tiers: there is no memory for blocks that wait to be written ({format_size(num_bytes)}); lower "
                "tiers.storage.queue"
            ) from None

    def landing(self, spans: Sequence[Span]) -> list[RankParts]:
        return [[pool[span.offset_bytes : span.end_bytes] for pool in self._bytes] for span in spans]

    def land(self, spans: Sequence[Span]) -> None:
        """Do nothing: the blocks are in their places."""

    def take(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            target.numpy()[:] = source.numpy()  # numpy copies in this thread; torch would use the steps' threads


Direction = Literal["up", "down"]


class CopyLane:
    """Copies that run in order beside the steps, on a CUDA stream of their own. Without a GPU they run at once."""

    def __init__(self, device: torch.device, direction: Direction) -> None:
        self._device = device
        self._stream = _copy_stream(device, direction) if device.type == "cuda" else None

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Fence:
        """Copy each source to its target, and return a fence that marks the end; the host does not wait."""
        with ExitStack() as context:
            # The mode is per thread, and a pool that was allocated in inference mode can be written only in it.
            context.enter_context(torch.inference_mode())
            if self._stream is not None:
                context.enter_context(torch.cuda.device(self._device))  # a new thread begins with the first GPU
                context.enter_context(torch.cuda.stream(self._stream))
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            return Fence(self._device)


@cache
def _copy_stream(device: torch.device, direction: Direction) -> torch.cuda.Stream:
    """Return the CUDA stream for copies in one direction: the same one each time.

    Torch has only a few streams, and hands them out again and again. If every attached storage took a new one, copies
    would in time share a stream with steps, or with the capture of CUDA graphs.
    """
    return torch.cuda.Stream(device)


class DeviceReach:
    """The `Reach` of pools on a device: blocks pass through page-locked memory.

    The host waits for each copy, so copies and steps need no order on the device:

    - A block that goes down does not change any more, because the host has seen the end of its step. While the engine's
      thread waits for the copy, the device computes the step that was launched ahead.
    - A block that comes up counts as loading until the loader's thread has seen the end of its copy. Steps that use the
      block are launched after that.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        max_block_bytes: int,
        open_lane: Callable[[torch.device, Direction], CopyLane] = CopyLane,
    ) -> None:
        """`max_block_bytes`: one rank's part of the largest block. Raises `ConfigError` if no memory can be locked.

        Each direction has a lane of its own, because a GPU has a copy engine for each.
        """
        self.pools = pools
        self._device = pools[0].device
        self._staging = self.buffer(staging_bytes(len(pools) * max_block_bytes))
        self.max_read_bytes = float(len(self._staging))
        self._up, self._down = open_lane(self._device, "up"), open_lane(self._device, "down")

    def begin_thread(self) -> None:
        """Choose the pools' GPU: a new thread is on GPU 0, and would make a context of half a GiB there."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def fence(self) -> Fence:
        return Fence(self._device)

    def read_memory(self) -> Sequence[memoryview]:
        return [self._staging.numpy().data]

    def buffer(self, num_bytes: int) -> Tensor:
        try:
            return page_locked(num_bytes, self._device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"tiers: {num_bytes} bytes of host memory cannot be locked for {self._device}: {reason}; lower "
                "tiers.storage.queue, or free memory"
            ) from error

    def landing(self, spans: Sequence[Span]) -> list[RankParts]:
        return [[part.numpy().data for part in parts] for parts in self._landing_parts(spans)]

    def land(self, spans: Sequence[Span]) -> None:
        self._up.copy(
            (span.of(pool), part)
            for span, parts in zip(spans, self._landing_parts(spans), strict=True)
            for pool, part in zip(self.pools, parts, strict=True)
        ).wait()

    def take(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._down.copy(copies).wait()

    def _landing_parts(self, spans: Sequence[Span]) -> Iterator[Sequence[Tensor]]:
        """Yield the places of blocks in the staging memory, one after the other, with a part for each rank."""
        end = 0
        for span in spans:
            begin, end = end, end + span.num_bytes
            assert end <= len(self._staging), "a read is at most as large as the memory for it"
            yield self._staging[begin:end].split(span.part_bytes)


def reach_of(pools: Sequence[Tensor], max_block_bytes: int) -> Reach:
    """Return the `Reach` of the pools of all ranks, which are all in host memory or all on devices."""
    if pools[0].device.type == "cpu":
        return HostReach(pools)
    return DeviceReach(pools, max_block_bytes)
