"""The storage tier of an engine: its settings, and the figures that the engine reports about it."""

from __future__ import annotations

from typing import Any

import msgspec

from swiftkv.policies import PrefetchPolicy, WritePolicy


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The storage tier of one engine."""

    backend: dict[str, Any]  # the options of the backend, as `storage_options.parse_storage` takes them
    directory: str  # where relative paths in them start
    write_policy: WritePolicy = "write_through"
    prefetch_policy: PrefetchPolicy = "timeout"
    prefetch_threshold: int = 256  # tokens: fewer are computed
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    queue_bytes: int = 64 << 20  # of blocks on their way down, in host memory


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """Totals count from the start of the engine. Blocks are of one KV group each."""

    is_degraded: bool = False  # the backend failed or was slow too often, and is left alone for a while
    hit_tokens_total: int = 0  # prompt tokens whose KV came from storage, and was used
    loads_total: int = 0  # prompts for which something was read
    loads_late_total: int = 0  # of them, those that were not waited for to the end
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
