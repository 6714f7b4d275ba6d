"""The tiers below the pool of an engine: connects storage, its threads and the scheduler between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv._core import Scheduler
from swiftkv._host import LockTimeout
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.host_medium import HostMedium
from swiftkv.storage.levels import Level, Levels
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage
from swiftkv.tier.host_pins import HostPins
from swiftkv.tier.keys import ObjectKeys, split_keys
from swiftkv.tier.loader import Loader
from swiftkv.tier.loads import Loads
from swiftkv.tier.messages import LevelStats, LoadStop, TierSpec, TierStats
from swiftkv.tier.rates import LoadPlanner
from swiftkv.tier.reach import Reach
from swiftkv.tier.stored_blocks import HOST_TIER, BlockName, StoredBlocks
from swiftkv.tier.writer import Writer, queue_memory

_CLOSE_PATIENCE_S = 2.0  # the longest wait for a thread to write its queue, or to return from a call
_LOCK_PATIENCE_S = 1.0
_NEWS_INTERVAL_S = 0.1
_TRIAL_INTERVAL_S = 1.0


class Tier:
    """A tier that keeps nothing, for an engine with neither host memory nor storage."""

    def before_step(self) -> None:
        """Take the blocks that storage has read, and give it blocks to write. Call between steps."""

    def added(self, request_id: int) -> None:
        """Note that a request was added to the scheduler. Call before any of its prompt is computed."""

    def admitted(self, request_id: int, cached_tokens: int) -> dict[int, str]:
        """Note that a request began with `cached_tokens` tokens from the cache.

        Return the tiers that the blocks loaded for it came from, by each block's index in the prompt.
        """
        return {}

    def met(self, request_id: int, first: int, end: int) -> dict[int, str]:
        """Note that a request skips blocks `first` to `end` of its prompt, because storage has loaded them meanwhile.

        Return their tiers as `admitted` does.
        """
        return {}

    def why_less(self, request_id: int) -> LoadStop | None:
        """Return why a request did not get all that the tiers below have of its prompt; `None` if it did.

        Call before `admitted`.
        """
        return None

    def forget(self, request_id: int) -> None:
        """Note that a request has ended."""

    def longest_rest_ms(self, limit_ms: int) -> int:
        """Return how long the engine may wait before `before_step`, at most `limit_ms`."""
        return limit_ms

    def stats(self) -> TierStats | None:
        return None

    def has_news(self) -> bool:
        """Return whether the statistics have changed since the last report: storage works while the engine rests."""
        return False

    def close(self) -> None:
        """Close everything, at the end of the engine."""


class StorageTier(Tier):
    """Storage below the pool: committed blocks are written to it, and read back for prompts that begin with them."""

    def __init__(
        self,
        opened: OpenStorage,
        scheduler: Scheduler,
        wake: Callable[[], None],
        *,
        groups: list[KVGroup],
        lender_pools: Callable[[int], Sequence[npt.NDArray[np.uint8]] | None],
        max_num_seqs: int,
        host: HostPins | None = None,
    ) -> None:
        """Start the threads of the tier. If a backend cannot register memory, close everything and raise its error.

        Args:
            wake: Called in the tier's threads when the engine should call `before_step`.
            lender_pools: Returns the memory of the lender of a link, one array per rank; `None` if it cannot be read in
                place.
            host: Reads the blocks that the cache holds in host memory. If `opened` works without host memory, these
                are blocks that were found before an earlier tier was left.
        """
        spec, levels, keys = opened.spec, opened.levels, opened.keys
        self._spec = spec
        self._name = opened.name
        self._scheduler = scheduler
        self._levels = levels
        self._num_dropped_before = scheduler.num_dropped_offers()  # while other storage was attached
        self._groups = groups
        self._reach = reach = opened.reach
        self._host = host
        self._lender_pools = lender_pools
        self._num_out_of_reach = 0  # blocks whose bytes cannot be read in place
        self._is_leaving = False
        stored = StoredBlocks(levels, keys)
        self._loader = Loader(stored, reach, wake)
        self._loads = Loads(
            spec,
            scheduler,
            self._loader,
            LoadPlanner(),
            groups=groups,
            reach=reach,
            max_num_seqs=max_num_seqs,
            host=opened.host,
        )
        self._writer = Writer(
            stored,
            reach,
            opened.queue,
            may_write=self._may_write,
            on_room=wake,
        )
        with ExitStack() as undo:
            undo.callback(self.end)
            for level in levels.levels:
                self._register_memory(level)
            undo.pop_all()
        self._next_trial_s = 0.0  # monotonic
        self._told = TierStats()
        self._told_s = 0.0  # monotonic
        scheduler.set_write_policy(spec.write_policy)

    def add_storage(self, opened: OpenStorage) -> None:
        """Add the storage of `opened` below host memory that was opened without it.

        If the backend cannot register memory, close it and raise its error.
        """
        storage = opened.levels.levels[-1]
        with ExitStack() as undo:
            undo.callback(storage.backend.close)
            self._register_memory(storage)
            undo.pop_all()
        self._levels.add(storage)
        self._name = opened.name

    def _register_memory(self, level: Level) -> None:
        if register := level.backend.capabilities.register:
            for memory in (*self._reach.read_memory(), self._writer.memory):
                register(memory)

    @property
    def has_storage(self) -> bool:
        """Whether there is more than host memory."""
        return self._name != HOST_TIER

    def before_step(self) -> None:
        self._loads.apply()
        self._store()

    def added(self, request_id: int) -> None:
        self._loads.consider(request_id)

    def admitted(self, request_id: int, cached_tokens: int) -> dict[int, str]:
        return self._loads.admitted(request_id, cached_tokens)

    def met(self, request_id: int, first: int, end: int) -> dict[int, str]:
        return self._loads.met(request_id, first, end)

    def why_less(self, request_id: int) -> LoadStop | None:
        return self._loads.why_less.get(request_id)

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
        put_failures = dict(writer.failures)  # a copy: the writer's thread adds to it
        failures |= {f"put {status.name.lower()}": count for status, count in put_failures.items()}
        num_dropped = self._scheduler.num_dropped_offers() - self._num_dropped_before
        return TierStats(
            backend=self._name,
            is_degraded=bool(self._levels.degraded_tiers),
            hit_tokens_total=loads.hit_tokens.total(),
            loads_total=loads.num_loads,
            loads_late_total=loads.num_late,
            loads_declined_total=loads.num_declined,
            loaded_blocks_total=loads.loaded_blocks,
            loaded_bytes_total=loads.loaded_bytes,
            stored_blocks_total=writer.stored_blocks,
            stored_bytes_total=writer.stored_bytes,
            dropped_stores_total=num_dropped + self._num_out_of_reach,
            failures_total=failures,
            queue_bytes=writer.queue_bytes,
            num_to_store=self._scheduler.num_offers() + writer.num_taken,
            num_loading=loads.num_waiting,
            levels=[_level_stats(level, loads.hit_tokens[level.tier]) for level in self._levels.levels],
        )

    def has_news(self) -> bool:
        stats, now_s = self.stats(), time.monotonic()
        is_at_work = stats.num_to_store > 0 or stats.num_loading > 0  # the figures then change all the time
        if stats == self._told or (is_at_work and now_s < self._told_s + _NEWS_INTERVAL_S):
            return False
        self._told, self._told_s = stats, now_s
        return True

    @property
    def is_reading(self) -> bool:
        """Whether storage may still read into blocks of the pool."""
        return self._loads.is_reading

    def take_back(self) -> None:
        """Take back blocks of the pool that storage no longer reads into."""
        self._loads.apply()

    def leave(self) -> None:
        """Give up all loads, and take no more offers. Blocks in the queue are still written."""
        self._leave(write_until_s=0.0)

    def end(self) -> None:
        """End the threads, after `leave`. Queued blocks are written for at most `_CLOSE_PATIENCE_S`.

        Call it from any thread.
        """
        self._loader.close()
        self._writer.close(_CLOSE_PATIENCE_S)
        self._levels.close()  # makes most hanging calls return
        self._loader.join(_CLOSE_PATIENCE_S)

    def close(self) -> None:
        """Write the blocks on offer and in the queue for at most about `close_patience_s`, and end the threads."""
        self._leave(write_until_s=time.monotonic() + self._spec.close_patience_s)
        self.end()

    def _leave(self, write_until_s: float) -> None:
        """Give up all loads, queue offers until `write_until_s` (monotonic), and then take no more offers.

        With write-back, all blocks in the prefix index are offered first: this is the last chance to write them.
        """
        self._loads.close()
        self._is_leaving = True
        if self._spec.write_policy == "write_back":
            self._offer_all()
        self._store()
        while self._writer.wait_for_room(write_until_s) and self._store():
            pass
        self._scheduler.set_write_policy("never")

    def _offer_all(self) -> None:
        """Offer all blocks in the prefix index, as the scheduler does when it begins to write through."""
        self._scheduler.set_write_policy("write_through")

    def _may_write(self) -> bool:
        """Return whether blocks may be written now. Loads go first, until the tier is left."""
        return self._is_leaving or not self._loads.is_reading

    def _store(self) -> int:
        """Copy blocks on offer into the queue as far as it has room. Return how many were taken off offer."""
        num_taken = 0
        if max_blocks := self._max_stores():
            block_keys, groups, links, offsets_bytes = self._scheduler.take_offers(max_blocks)
            num_taken = len(groups)
            blocks = []
            places = zip(groups.tolist(), links.tolist(), offsets_bytes.tolist(), strict=True)
            for key, (group, link, offset) in zip(split_keys(block_keys), places, strict=True):
                parts = self._parts_at(link, offset, self._groups[group].block_bytes)
                if parts is None:
                    self._num_out_of_reach += 1
                else:
                    blocks.append((BlockName(key, group), parts))
            if blocks:
                self._writer.add(blocks)
            self._scheduler.end_copying()  # from now on steps and peers may write to these blocks
        if self._may_write():
            self._writer.loads_changed()
        return num_taken

    def _parts_at(self, link: int, offset_bytes: int, num_bytes: int) -> Sequence[Tensor] | None:
        """Return the parts of a block, one for each rank: in the pools of the link's lender, or in our own if it is -1.

        What lies behind our own pool is in host memory. `None`: the lender's pools are out of reach.
        """
        end = offset_bytes + num_bytes
        if link >= 0:
            pools = self._lender_pools(link)
            return None if pools is None else [torch.from_numpy(pool[offset_bytes:end]) for pool in pools]
        if offset_bytes >= self._reach.pools[0].nbytes:
            assert self._host is not None
            return [self._host.block_at(offset_bytes)]
        return [pool[offset_bytes:end] for pool in self._reach.pools]

    def _max_stores(self) -> int:
        """Return how many blocks may be copied now: while storage is degraded, only one now and then, as a trial."""
        if not self._levels.is_degraded:
            return self._writer.num_free
        now_s = time.monotonic()
        if now_s < self._next_trial_s:
            return 0
        self._next_trial_s = now_s + _TRIAL_INTERVAL_S
        return min(1, self._writer.num_free)


@dataclass(frozen=True)
class OpenStorage:
    """Host memory and storage that are open, and the names of an engine's blocks there."""

    spec: TierSpec
    name: str  # the name of the last backend
    levels: Levels
    keys: ObjectKeys
    reach: Reach
    queue: Tensor  # the memory of the writer
    host_memory: GuardedMedium | None = None  # the first level, if it is host memory
    host: HostPins | None = None  # pins blocks of the first level, if steps read them there


def open_storage(
    spec: TierSpec,
    groups: list[KVGroup],
    runner: ModelRunner,
    *,
    host_memory: GuardedMedium | None = None,
    host: HostPins | None = None,
) -> OpenStorage:
    """Open host memory and storage for a model. Takes long, because it reads all weights; may run in any thread.

    Args:
        host_memory: Host memory that was opened before. It is used again: to map it once more would take as long as the
            kernel takes to enter all of its pages.
        host: Pins blocks in host memory, if the engine's steps read them there.

    Raises:
        ConfigError: The backend cannot be opened, the pools of other ranks cannot be mapped, or memory cannot be
            locked.
        FilesChangedError: The files of the weights were written to after they were loaded.
        OSError: The weights cannot be read, or the host memory cannot be mapped.
    """
    reach = runner.reach_pools()
    queue = queue_memory(reach, spec.queue_bytes, max(group.block_bytes for group in groups))
    keys = ObjectKeys(groups, runner.weights_fingerprint(), runner.rounding, len(reach.pools))
    levels = []
    name = HOST_TIER
    if spec.host_fd is None:
        host_memory = host = None
    else:
        if host_memory is None:
            medium = _begin(HostMedium.of(spec.host_fd, spec.host_member), spec.host_member)
            host_memory = GuardedMedium(medium, Breaker())
        levels.append(Level(HOST_TIER, SealedBackend(host_memory, keys.fingerprint)))
    if spec.backend is not None:
        options = parse_storage(spec.backend, "tiers.storage", Path(spec.directory))
        name = options.backend
        try:
            levels.append(Level("storage", open_backend(options, keys.fingerprint)))
        except ConfigError as error:
            raise ConfigError(f"tiers.storage.{error}") from error
    return OpenStorage(spec, name, Levels(levels), keys, reach, queue, host_memory, host)


def open_host_pins(runner: ModelRunner, spec: TierSpec | None) -> HostPins | None:
    """Return the object that pins blocks in host memory, if the runner's steps attend to them or copy them."""
    attended, source = runner.pool.host_blocks, runner.host_source
    memory = runner.pool.host_memory if source is None else source.memory
    if memory is None or spec is None:
        return None
    medium = _begin(HostMedium(memory, spec.host_member), spec.host_member)
    groups = (frozenset() if source is None else source.groups) | (
        frozenset() if attended is None else {attended.group}
    )
    return HostPins(medium, groups, runner.pool.host_offset_bytes)


def _begin(medium: HostMedium, member: int) -> HostMedium:
    """Have the kernel back host memory, and take away what an earlier process of this engine left behind in it."""
    with suppress(LockTimeout):  # the first call that gets the lock does it then
        medium.release_member(member, time.monotonic() + _LOCK_PATIENCE_S)
    medium.fill_ahead()
    return medium


def _level_stats(level: Level, hit_tokens: int) -> LevelStats:
    """Return the figures of one tier. Its threads may be counting meanwhile."""
    failures = {
        f"{operation} {status.name.lower()}": counts[status]
        for operation, counts in (("get", level.gets), ("put", level.puts))
        for status in Status
        if status is not Status.OK and counts[status]
    }
    return LevelStats(
        level.tier, level.backend.is_degraded, hit_tokens, level.gets[Status.OK], level.puts[Status.OK], failures
    )
