"""The engine's part of the cores that it shares with the other engines of its node.

The kernels themselves pause (`cpp_ext/cpu/turns.h`); the engine only says when it has a step to compute.
"""

from __future__ import annotations

import os
from types import TracebackType

from swiftkv.engine.messages import ComputeStats, EngineConfig, ShareSpec


class Turns:
    """A context manager in which a step is computed. This one never waits."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stats(self) -> ComputeStats | None:
        """Return the core time so far, `None` if it is not counted."""
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


def open_turns(config: EngineConfig, kernels: str) -> Turns:
    """Return the engine's turns; only the C++ `kernels` can wait for them."""
    if config.share is None or kernels != "cpu":
        return Turns()
    return SharedTurns(config.share, config.threads, config.tensor_parallel_size)
