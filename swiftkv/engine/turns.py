"""The engine's part of the cores, or of the GPU, that it shares with other engines of its node.

On the cores the kernels themselves pause (`cpp_ext/cpu/turns.h`); the engine only says when it has a step to compute.
On a GPU, where nothing can pause a kernel, the engine waits before it launches a step.
"""

from __future__ import annotations

import os
from types import TracebackType

from swiftkv.engine.messages import ComputeStats, EngineConfig, ShareSpec


class Turns:
    """A context manager in which a step is launched. This one never waits."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def is_contended(self) -> bool:
        """Return whether steps that are launched ahead would be computed in another engine's turn."""
        return False

    def ended(self, duration_s: float) -> None:
        """Note that a step has kept its device busy for this time."""

    def rest(self) -> None:
        """Note that there is no step to launch."""

    def stats(self) -> ComputeStats | None:
        """Return the time so far, `None` if it is not counted."""
        return None


class SharedTurns(Turns):
    """Limits the kernels inside to this engine's part of the cores; they wait while it has none."""

    def __init__(self, share: ShareSpec, threads: int, num_ranks: int) -> None:
        """Each of `num_ranks` ranks has `threads` threads. The other ranks follow this one, and compute as much."""
        from swiftkv import _cpu  # not there on every platform

        num_cores = len(os.sched_getaffinity(0))
        self._turns = _cpu.Turns(
            share.table_fd, share.account, threads, share.weight, share.max_share, num_cores, num_ranks
        )

    def __enter__(self) -> None:
        self._turns.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.end()

    def stats(self) -> ComputeStats | None:
        return ComputeStats(self._turns.core_s, self._turns.waited_s)


class GpuTurns(Turns):
    """Limits this engine to its part of a GPU's time; a step waits before it is launched."""

    def __init__(self, share: ShareSpec) -> None:
        from swiftkv import _cpu  # not there on every platform

        self._turns = _cpu.DeviceTurns(share.table_fd, share.account, share.weight, share.max_share)

    def __enter__(self) -> None:
        self._turns.wait()

    def is_contended(self) -> bool:
        return self._turns.is_contended()

    def ended(self, duration_s: float) -> None:
        self._turns.charge(round(1e9 * duration_s))

    def rest(self) -> None:
        self._turns.rest()

    def stats(self) -> ComputeStats | None:
        return ComputeStats(self._turns.device_s, self._turns.waited_s)


def open_turns(config: EngineConfig, kernels: str) -> Turns:
    """Return the engine's turns. On the cores, only the C++ `kernels` can wait for them."""
    share = config.share
    if share is not None and share.resource == "gpu":
        return GpuTurns(share)
    if share is None or kernels != "cpu":
        return Turns()
    return SharedTurns(share, config.threads, config.tensor_parallel_size)
