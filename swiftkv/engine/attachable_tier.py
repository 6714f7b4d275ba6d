"""Storage that is attached to an engine and detached from it while it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from swiftkv._core import Scheduler
from swiftkv.engine.messages import AttachStorage, DetachStorage, EngineConfig, StorageChanged
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.tier import OpenStorage, StorageTier, Tier, open_host_pins, open_storage
from swiftkv.errors import SwiftkvError
from swiftkv.models.batch import Int32Array
from swiftkv.tier.messages import LevelStats, LoadStop, TierSpec, TierStats
from swiftkv.tier.stored_blocks import HOST_TIER
from swiftkv.wakeup import Wakeup

_T = TypeVar("_T")
_FAILURES = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SwiftkvError, TypeError, ValueError)
"""The errors that a backend, which may be a user's class, may raise."""
_READ_PATIENCE_S = 2.0
_LEAVING_POLL_MS = 100
_OPEN_AGAIN_S = 10.0
_OPENING_PATIENCE_S = 30.0
"""The longest time for which a restarted engine waits for its storage before it serves without it."""

logger = logging.getLogger(__name__)


class AttachableTier(Tier):
    """The tier of an engine: the attached storage, or a `Tier` that keeps nothing.

    Storage is opened and closed in a thread, because either may take seconds. Only one change is made at a time. Once
    storage is detached, it gets no more work. The blocks that it is still reading into return to the pool when the read
    ends; if a call hangs, this may be after the change has ended.

    Host memory stays, whatever storage comes and goes below it. Only during a change nothing is read from there but
    what steps attend to.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler) -> None:
        """Open the storage that the configuration names.

        Raises `ConfigError`, `OSError` or an error of a user's class if that fails. A restarted engine raises nothing:
        if opening fails or takes long, it serves with host memory alone, and tries again from time to time.
        """
        self.wakeup = Wakeup()
        """Wakes the engine when there may be something to do."""
        self._config = config
        self._runner = runner
        self._scheduler = scheduler
        self._groups = [region.group for region in runner.pool.regions]
        self._host = open_host_pins(runner, config.storage)
        self._host_memory = None if self._host is None else self._host.guarded  # None: it was not opened yet
        self._num_attended = 0  # hits on blocks that steps attend to in host memory, without loads
        self._tier = Tier()
        self._change: _Opening | _Leaving | None = None  # the change in progress
        self._stuck: list[StorageTier] = []  # closed, but a read has not returned
        self._past: TierStats | None = None  # the totals of storage that was detached
        self._answers: list[StorageChanged] = []
        self._open_again_s: float | None = None  # monotonic: when to try once more
        if config.storage is not None and config.has_served:
            self._open_with_patience(config.storage)
        elif config.storage is not None:
            self._tier = self._tier_of(self._opener(config.storage)())

    def attach(self, message: AttachStorage) -> None:
        """Begin to open storage; `take_answers` returns the outcome.

        A failure does not end the retries to open the configured storage.
        """
        if not self._can_begin(message.change_id, has_storage=False):
            return
        if isinstance(self._tier, StorageTier):
            self._begin_to_leave(self._tier, message.change_id, then=message.storage)
        else:
            self._change = _Opening(self._begin_to_open(message.storage), message.change_id)

    def detach(self, message: DetachStorage) -> None:
        """Stop using storage at once, and close it; `take_answers` returns the answer once it is closed."""
        if self._due_s is not None:
            self._open_again_s = None
            if not self._has_storage:
                self._answers.append(StorageChanged(message.change_id, None))
                return
        if self._can_begin(message.change_id, has_storage=True):
            assert isinstance(self._tier, StorageTier)
            self._begin_to_leave(self._tier, message.change_id)

    def take_answers(self) -> list[StorageChanged]:
        """Return the answers to changes that are over, each once."""
        answers, self._answers = self._answers, []
        return answers

    def before_step(self) -> None:
        self._go_on()
        if self._host is not None:
            self._host.before_step(self._scheduler)  # first: what the tier finds now is used by this step
        self._tier.before_step()

    def added(self, request_id: int) -> None:
        self._tier.added(request_id)

    def why_less(self, request_id: int) -> LoadStop | None:
        return self._tier.why_less(request_id)

    def admitted(self, request_id: int, cached_tokens: int) -> dict[int, str]:
        return self._tier.admitted(request_id, cached_tokens)

    def attended(self, loaded: Mapping[int, str], host_blocks: Int32Array) -> dict[int, str]:
        """Note that a request has found blocks in host memory, where steps attend to them.

        Return the tiers of these and of the `loaded` blocks, by each block's index in the prompt.
        """
        were_there = [index for index in host_blocks.tolist() if index not in loaded]
        self._num_attended += len(were_there)
        return {**loaded, **dict.fromkeys(were_there, HOST_TIER)}

    def met(self, request_id: int, first: int, end: int) -> dict[int, str]:
        return self._tier.met(request_id, first, end)

    def forget(self, request_id: int) -> None:
        self._tier.forget(request_id)

    def longest_rest_ms(self, limit_ms: int) -> int:
        if isinstance(self._change, _Leaving):
            return min(limit_ms, _LEAVING_POLL_MS)
        if self._due_s is not None:
            limit_ms = min(limit_ms, max(0, int(1000 * (self._due_s - time.monotonic()))))
        return self._tier.longest_rest_ms(limit_ms)

    def stats(self) -> TierStats | None:
        """Return the totals of all storage that was ever attached; `None` if none was."""
        stats = (self._change.tier if isinstance(self._change, _Leaving) else self._tier).stats()
        if self._waits_for_storage:
            stats = self._without_storage(stats or TierStats())
        if self._num_attended:
            num_tokens = self._num_attended * self._config.block_size
            attended = LevelStats(HOST_TIER, hit_tokens_total=num_tokens)
            stats = (stats or TierStats()).after(TierStats(hit_tokens_total=num_tokens, levels=[attended]))
        if self._past is None:
            return stats
        return (stats or TierStats()).after(self._past)

    @property
    def _due_s(self) -> float | None:
        """The time of the next try to open the configured storage; `None` without one, or while a change is made."""
        return self._open_again_s if self._change is None else None

    @property
    def _waits_for_storage(self) -> bool:
        """Whether the storage of the configuration could not be opened yet."""
        is_trying = isinstance(self._change, _Opening) and self._change.change_id is None
        return is_trying or self._open_again_s is not None

    def _without_storage(self, stats: TierStats) -> TierStats:
        """Add the configured storage, which could not be opened yet, to the figures as a degraded tier."""
        assert self._config.storage is not None
        assert self._config.storage.backend is not None
        levels = [*stats.levels, LevelStats("storage", is_degraded=True)]
        backend = self._config.storage.backend["backend"]
        return msgspec.structs.replace(stats, is_degraded=True, backend=backend, levels=levels)

    def has_news(self) -> bool:
        return self._tier.has_news()

    def close(self) -> None:
        """Close storage. A change in progress ends with the process."""
        self._tier.close()
        if self._host is not None:
            self._host.close()
        self.wakeup.close()

    @property
    def _has_storage(self) -> bool:
        return isinstance(self._tier, StorageTier) and self._tier.has_storage

    def _can_begin(self, change_id: int, *, has_storage: bool) -> bool:
        """Return whether a change can begin. If not, answer it with the reason."""
        why_not = None
        if self._change is not None:
            why_not = "storage is being attached or detached; try again later"
        elif has_storage != self._has_storage:
            why_not = "no storage is attached" if has_storage else "storage is attached; detach it first"
        if why_not is not None:
            self._answers.append(StorageChanged(change_id, why_not))
            return False
        return True

    def _go_on(self) -> None:
        """Take the results of threads that have ended, and begin whatever is due."""
        for stuck in self._stuck:
            stuck.take_back()
        self._stuck = [stuck for stuck in self._stuck if stuck.is_reading]
        if isinstance(self._change, _Opening) and self._change.work.is_over:
            opening, self._change = self._change, None
            self._take_opened(opening)
        if self._due_s is not None and time.monotonic() >= self._due_s:
            assert self._config.storage is not None
            self._open_again_s = None
            self._change = _Opening(self._begin_to_open(self._config.storage))
        if isinstance(self._change, _Leaving):
            self._leave(self._change)

    def _open_with_patience(self, spec: TierSpec) -> None:
        opening = self._begin_to_open(spec)
        if not opening.ends_within(_OPENING_PATIENCE_S):
            logger.warning(
                "storage is still being opened after %g s; serving without it meanwhile", _OPENING_PATIENCE_S
            )
            self._change = _Opening(opening)
        elif (error := self._use(opening.result)) is not None or opening.result is None:
            self._try_later(opening.error or error)
        if not isinstance(self._tier, StorageTier):
            self._use_host_memory()

    def _use_host_memory(self) -> None:
        """Use host memory alone, if there is any. If that fails, use none."""
        configured = self._config.storage
        if configured is None or (spec := configured.host_alone()) is None:
            return
        if self._waits_for_storage:  # which will be added to this tier, and its policies hold then
            spec = msgspec.structs.replace(configured, backend=None)
        try:
            self._tier = self._tier_of(self._opener(spec)())
        except _FAILURES as error:
            logger.warning("host memory cannot be used: %s", error)

    def _use(self, opened: OpenStorage | None) -> Exception | None:
        """Use storage if it was opened, below host memory if that is in use already. Return the error if that fails."""
        if opened is not None:
            try:
                if isinstance(self._tier, StorageTier):
                    self._tier.add_storage(opened)
                else:
                    self._tier = self._tier_of(opened)
            except _FAILURES as error:
                return error
        return None

    def _take_opened(self, opening: _Opening) -> None:
        """Use storage that was opened. If opening failed, report the failure, or try again later."""
        opened, error = opening.work.result, opening.work.error
        if (failure := self._use(opened)) is not None:
            opened, error = None, failure
        if opened is not None:
            self._open_again_s = None
        if opening.change_id is not None:
            why_not = str(error or "it failed; the node's standard error has the reason")
            self._answers.append(StorageChanged(opening.change_id, None if opened is not None else why_not))
            if opened is None:
                self._use_host_memory()
        elif opened is None:
            self._try_later(error)
        else:
            logger.warning("storage can be used again")

    def _try_later(self, error: Exception | None) -> None:
        logger.warning("storage cannot be used; trying again every %g s: %s", _OPEN_AGAIN_S, error or "see above")
        self._open_again_s = time.monotonic() + _OPEN_AGAIN_S

    def _leave(self, leaving: _Leaving) -> None:
        """Close storage once it reads nothing, or at the end of the patience: closing ends most calls that hang."""
        tier = leaving.tier
        tier.before_step()
        if leaving.closing is None:
            if not tier.is_reading or time.monotonic() >= leaving.patience_ends_s:
                leaving.closing = _Work("storage closing", tier.end, self.wakeup.wake)
        elif leaving.closing.is_over:
            if tier.is_reading:
                self._stuck.append(tier)
            last = tier.stats()
            last = last if self._past is None else last.after(self._past)
            self._past = msgspec.structs.replace(
                last, backend=None, is_degraded=False, queue_bytes=0, num_to_store=0, num_loading=0
            )
            self._change = None
            if leaving.then is not None:
                self._change = _Opening(self._begin_to_open(leaving.then), leaving.change_id)
            else:
                self._use_host_memory()
                self._answers.append(StorageChanged(leaving.change_id, None))

    def _begin_to_leave(self, tier: StorageTier, change_id: int, then: TierSpec | None = None) -> None:
        """Stop using the tiers that are open, and begin to close them. Afterwards open those of `then`, if any."""
        tier.leave()
        self._change = _Leaving(tier, change_id, time.monotonic() + _READ_PATIENCE_S, then)
        self._tier = Tier()

    def _begin_to_open(self, spec: TierSpec) -> _Work[OpenStorage]:
        return _Work("storage opening", self._opener(spec), self.wakeup.wake)

    def _opener(self, spec: TierSpec) -> Callable[[], OpenStorage]:
        return lambda: open_storage(spec, self._groups, self._runner, host_memory=self._host_memory, host=self._host)

    def _tier_of(self, opened: OpenStorage) -> StorageTier:
        self._host_memory = self._host_memory or opened.host_memory
        return StorageTier(
            opened,
            self._scheduler,
            self.wakeup.wake,
            groups=self._groups,
            lender_pools=self._runner.lender_pools,
            max_num_seqs=self._config.max_num_seqs,
            host=self._host,
        )


class _Work(Generic[_T]):
    """A call that runs in a thread of its own. `result` or `error` is set when it is over."""

    def __init__(self, name: str, work: Callable[[], _T], wake: Callable[[], None]) -> None:
        self.result: _T | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._work = work
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end, and return whether it has come."""
        self._thread.join(timeout_s)
        return self.is_over

    def _run(self) -> None:
        try:
            self.result = self._work()
        except _FAILURES as error:
            self.error = error
        finally:
            self.is_over = True
            self._wake()


@dataclass
class _Opening:
    """Storage that is being opened: for a change, or because opening the configured storage is tried again."""

    work: _Work[OpenStorage]
    change_id: int | None = None


@dataclass
class _Leaving:
    """Tiers that are being closed: at `patience_ends_s` (monotonic) even if a call has not returned."""

    tier: StorageTier
    change_id: int
    patience_ends_s: float
    then: TierSpec | None  # what is opened afterwards; `None`: host memory, if there is any
    closing: _Work[None] | None = None
