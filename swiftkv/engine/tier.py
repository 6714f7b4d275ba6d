"""An engine's part in tiers: puts storage, its threads and the scheduler together, between steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import ConfigError
from swiftkv.storage.backend import StorageBackend
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage
from swiftkv.tier.keys import ObjectKeys, split_keys, weights_fingerprint
from swiftkv.tier.loader import Loader
from swiftkv.tier.loads import Loads
from swiftkv.tier.messages import TierSpec, TierStats
from swiftkv.tier.rates import LoadPlanner
from swiftkv.tier.writer import Writer
from swiftkv.transport.base import Transport

_CLOSE_PATIENCE_S = 2.0
_NEWS_INTERVAL_S = 0.1
_TRIAL_INTERVAL_S = 1.0
_MIN_PREFILL_TOKENS = 32  # a step with fewer says little about the speed of prefills


class Tier:
    """A tier that keeps nothing, as an engine has it without `tiers.storage`."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when the engine should look whether there is something to do."""

    def before_step(self) -> None:
        """Apply what has come from storage, and send down what has been computed; between steps."""

    def added(self, request_id: int) -> None:
        """Note a request that the scheduler has got, and none of whose prompt is computed yet."""

    def admitted(self, request_id: int, cached_tokens: int) -> None:
        """Note with how many cached tokens a request began."""

    def computed(self, num_prompt_tokens: int, duration_s: float) -> None:
        """Note how long a step took."""

    def forget(self, request_id: int) -> None:
        """Note that a request has ended."""

    def longest_rest_ms(self, limit_ms: int) -> int:
        """Return how long the engine may wait before `before_step`, at most `limit_ms`."""
        return limit_ms

    def stats(self) -> TierStats | None:
        return None

    def has_news(self) -> bool:
        """Return whether there is more to report than before: storage goes on while the engine rests."""
        return False

    def close(self) -> None:
        os.close(self.wake_fd)


class StorageTier(Tier):
    """Storage below the pool: blocks that are committed go down, and come up for prompts that begin with them."""

    def __init__(
        self,
        spec: TierSpec,
        backend: StorageBackend,
        scheduler: Scheduler,
        keys: ObjectKeys,
        *,
        groups: list[KVGroup],
        pool: npt.NDArray[np.uint8],
        transport: Transport | None,
        max_num_seqs: int,
    ) -> None:
        """`transport` reaches the pools in which borrowed blocks lie, if any are borrowed."""
        super().__init__()
        self._is_closed = False
        self._scheduler = scheduler
        self._backend = backend
        self._groups = groups
        self._pool = pool
        self._transport = transport
        self._num_out_of_reach = 0  # blocks that lie where their bytes cannot be read in place
        self._planner = LoadPlanner()
        self._loader = Loader(backend, keys, self._wake)
        self._loads = Loads(
            spec, scheduler, self._loader, self._planner, groups=groups, pool=pool, max_num_seqs=max_num_seqs
        )
        self._writer = Writer(
            backend,
            keys,
            queue_bytes=spec.queue_bytes,
            max_block_bytes=max(group.block_bytes for group in groups),
            may_write=lambda: not self._loads.is_reading,
            on_room=self._wake,
        )
        self._next_trial_s = 0.0  # monotonic
        self._told = TierStats()
        self._told_s = 0.0  # monotonic
        scheduler.set_write_policy(spec.write_policy)

    def before_step(self) -> None:
        self._loads.apply()
        self._store()

    def added(self, request_id: int) -> None:
        self._loads.consider(request_id)

    def admitted(self, request_id: int, cached_tokens: int) -> None:
        self._loads.admitted(request_id, cached_tokens)

    def computed(self, num_prompt_tokens: int, duration_s: float) -> None:
        if num_prompt_tokens >= _MIN_PREFILL_TOKENS:
            self._planner.computed(num_prompt_tokens, duration_s)

    def forget(self, request_id: int) -> None:
        self._loads.forget(request_id)

    def longest_rest_ms(self, limit_ms: int) -> int:
        deadline_s = self._loads.next_deadline_s()
        if deadline_s is None:
            return limit_ms
        return max(1, min(limit_ms, round(1000 * (deadline_s - time.monotonic()))))

    def stats(self) -> TierStats:
        loads, writer = self._loads, self._writer
        failures = {f"get {status.name.lower()}": count for status, count in loads.failures.items()}
        failures |= {f"put {status.name.lower()}": count for status, count in writer.failures.items()}
        return TierStats(
            is_degraded=self._backend.is_degraded,
            hit_tokens_total=loads.hit_tokens,
            loads_total=loads.num_loads,
            loads_late_total=loads.num_late,
            loads_declined_total=loads.num_declined,
            loaded_blocks_total=loads.loaded_blocks,
            loaded_bytes_total=loads.loaded_bytes,
            stored_blocks_total=writer.stored_blocks,
            stored_bytes_total=writer.stored_bytes,
            dropped_stores_total=self._scheduler.num_dropped_offers() + self._num_out_of_reach,
            failures_total=failures,
            queue_bytes=writer.queue_bytes,
            num_to_store=self._scheduler.num_offers() + writer.num_taken,
            num_loading=loads.num_waiting,
        )

    def has_news(self) -> bool:
        stats, now_s = self.stats(), time.monotonic()
        if stats == self._told or (stats.num_to_store and now_s < self._told_s + _NEWS_INTERVAL_S):
            return False
        self._told, self._told_s = stats, now_s
        return True

    def close(self) -> None:
        """Write what is on its way down, as far as a moment suffices."""
        self._loads.close()
        self._loader.close()
        self._store()
        self._writer.close(_CLOSE_PATIENCE_S)
        self._backend.close()  # a call that hangs returns
        self._loader.join(_CLOSE_PATIENCE_S)
        self._is_closed = True
        super().close()

    def _store(self) -> None:
        """Copy what is to go down into the queue, as far as it has room; the rest stays on offer."""
        if max_blocks := self._max_stores():
            block_keys, groups, links, offsets_bytes = self._scheduler.take_offers(max_blocks)
            places = zip(groups.tolist(), links.tolist(), offsets_bytes.tolist(), strict=True)
            for key, (group, link, offset) in zip(split_keys(block_keys), places, strict=True):
                pool = self._pool_at(link)
                if pool is None:
                    self._num_out_of_reach += 1
                else:
                    self._writer.add(key, group, pool[offset : offset + self._groups[group].block_bytes])
            self._scheduler.end_copying()
        if not self._loads.is_reading:
            self._writer.loads_changed()

    def _pool_at(self, link: int) -> npt.NDArray[np.uint8] | None:
        """Return our own pool for -1, else that of the link's lender if it can be read in place."""
        if link < 0:
            return self._pool
        return None if self._transport is None else self._transport.lender_pool(link)

    def _max_stores(self) -> int:
        """Return how many blocks may be copied now: while storage is degraded, one now and then to find out."""
        if not self._backend.is_degraded:
            return self._writer.num_free
        now_s = time.monotonic()
        if now_s < self._next_trial_s:
            return 0
        self._next_trial_s = now_s + _TRIAL_INTERVAL_S
        return min(1, self._writer.num_free)

    def _wake(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self.wake_fd, 1)


def open_tier(config: EngineConfig, runner: ModelRunner, scheduler: Scheduler) -> Tier:
    """Open the tier that the configuration names. Raises `ConfigError` if its backend cannot be opened."""
    spec = config.storage
    if spec is None:
        return Tier()
    groups = [region.group for region in runner.pool.regions]
    keys = ObjectKeys(groups, weights_fingerprint(Path(config.path)), runner.kernels)
    options = parse_storage(spec.backend, "tiers.storage", Path(spec.directory))
    try:
        backend = open_backend(options, keys.fingerprint)
    except ConfigError as error:
        raise ConfigError(f"tiers.storage.{error}") from error
    return StorageTier(
        spec,
        backend,
        scheduler,
        keys,
        groups=groups,
        pool=runner.pool.tensor.numpy(),
        transport=runner.transport,
        max_num_seqs=config.max_num_seqs,
    )
