"""The storage tier of an engine: its settings, and the figures that the engine reports about it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from swiftkv.policies import IoBackend, PrefetchPolicy, WritePolicy
from swiftkv.tier_config import DEFAULT_QUEUE_BYTES, StorageConfig

LoadStop = Literal["late", "corrupt", "failed", "declined"]
"""The reasons why a prompt got less from a tier than was there; declined: computing was expected to be as fast."""


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiers below the pool of one engine: host memory, storage, or both."""

    backend: dict[str, Any] | None  # the options of storage, as `storage_options.parse_storage` takes them
    directory: str  # the directory to which paths in these options are relative
    host_fd: int | None = None  # the descriptor of host memory, inherited; see `storage.host_medium.HostMedium`
    host_member: int = 0  # the engine's number among those that use this memory at the same time
    io_backend: IoBackend = "kernel"  # how a GPU copies layers from host memory, without lenders
    write_policy: WritePolicy = "write_through"
    prefetch_policy: PrefetchPolicy = "timeout"
    prefetch_threshold: int = 256  # the fewest tokens to load; fewer are computed
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    queue_bytes: int = DEFAULT_QUEUE_BYTES  # host memory for blocks on their way down

    def host_alone(self) -> TierSpec | None:
        """Return the spec for the same host memory without storage; `None` without host memory."""
        if self.host_fd is None:
            return None
        return TierSpec(
            None, self.directory, host_fd=self.host_fd, host_member=self.host_member, io_backend=self.io_backend
        )

    @property
    def close_patience_s(self) -> float:
        """The seconds for which an ending engine goes on writing: longer with `write_back`, which stores late."""
        return 10.0 if self.write_policy == "write_back" else 2.0


class LevelStats(msgspec.Struct, array_like=True, frozen=True):
    """One tier below the pool. Totals count from the start of the engine; blocks are of one KV group each."""

    tier: str  # host or storage
    is_degraded: bool = False  # calls are refused for a while after too many failures or slow ones, or a call hangs
    hit_tokens_total: int = 0  # prompt tokens whose KV came from there, and was used
    loaded_blocks_total: int = 0
    stored_blocks_total: int = 0
    failures_total: dict[str, int] = {}  # blocks that were not read or written, by "get corrupt" and the like

    def after(self, past: LevelStats) -> LevelStats:
        """Return these figures, with the totals of this tier while it was attached before."""
        return LevelStats(
            self.tier,
            self.is_degraded,
            self.hit_tokens_total + past.hit_tokens_total,
            self.loaded_blocks_total + past.loaded_blocks_total,
            self.stored_blocks_total + past.stored_blocks_total,
            dict(Counter(self.failures_total) + Counter(past.failures_total)),
        )


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """All tiers below the pool together. Totals count from the start of the engine. Blocks are of one KV group each."""

    is_degraded: bool = False  # one of them is
    hit_tokens_total: int = 0  # prompt tokens whose KV came from there, and was used
    loads_total: int = 0  # prompts for which something was read
    loads_late_total: int = 0  # loads that were given up before their end
    loads_declined_total: int = 0  # prompts that storage had, where computing was expected to be as fast
    loaded_blocks_total: int = 0
    loaded_bytes_total: int = 0
    stored_blocks_total: int = 0
    stored_bytes_total: int = 0
    dropped_stores_total: int = 0  # blocks that left the pool before there was room for them in the queue
    failures_total: dict[str, int] = {}  # blocks that were not read or written, by "get corrupt" and the like
    queue_bytes: int = 0
    num_to_store: int = 0  # blocks that wait to be written, in the queue and before it
    num_loading: int = 0  # prompts that wait for storage at the moment
    backend: str | None = None  # the name of the backend; None: storage was detached
    levels: list[LevelStats] = []  # each of the tiers

    def after(self, past: TierStats) -> TierStats:
        """Return these figures, with the totals of storage that was attached before."""
        totals = {name: getattr(self, name) + getattr(past, name) for name in _TOTALS}
        failures = dict(Counter(self.failures_total) + Counter(past.failures_total))
        now = {level.tier: level for level in self.levels}
        levels = [now.pop(level.tier, LevelStats(level.tier)).after(level) for level in past.levels]
        return msgspec.structs.replace(self, failures_total=failures, levels=[*levels, *now.values()], **totals)


_TOTALS = [name for name in TierStats.__struct_fields__ if name.endswith("_total") and name != "failures_total"]


def tier_spec(storage: StorageConfig, directory: Path, io_backend: IoBackend) -> TierSpec:
    """Return the spec for a `tiers.storage` section, whose relative paths start at `directory`."""
    return TierSpec(
        backend=storage.backend,
        directory=str(directory),
        io_backend=io_backend,
        write_policy=storage.write_policy,
        prefetch_policy=storage.prefetch_policy,
        prefetch_threshold=storage.prefetch_threshold,
        prefetch_timeout_base_s=storage.prefetch_timeout_base,
        prefetch_timeout_per_ki_token_s=storage.prefetch_timeout_per_ki_token,
        queue_bytes=storage.queue,
    )
