"""The prompts that wait for storage: which blocks are searched and loaded for them, and when they stop waiting."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler
from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Status
from swiftkv.tier.expected_hits import ExpectedHits
from swiftkv.tier.keys import split_keys
from swiftkv.tier.loader import Load, Loader, PartRead, Search, Target
from swiftkv.tier.messages import LoadStop, TierSpec
from swiftkv.tier.rates import LoadPlanner, num_not_loaded
from swiftkv.tier.reach import Reach, Span
from swiftkv.tier.stored_blocks import BlockName

_LONGEST_WAIT_S = 60.0
"""The longest wait for storage, even with `wait_complete`. After it, the prompt is computed."""

_TRIES_IN_VAIN = 2


_WHY_LESS: dict[Status | None, LoadStop] = {
    Status.CORRUPT: "corrupt",
    Status.FAILED: "failed",
    Status.LATE: "late",
}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The blocks of a prompt that storage should load: from `begin` to `end`, without those that are in the pool."""

    begin: int
    end: int

    @property
    def is_back(self) -> bool:
        """Whether the request computes the blocks before the stretch meanwhile. Otherwise it waits for the load."""
        return self.begin > 0


_NOTHING = _Stretch(0, 0)


@dataclass(slots=True)
class _Wait:
    """A request that is held until its blocks are loaded, or computes its front while its back is loaded."""

    request_id: int
    num_keys: int
    num_usable: int  # blocks that it could use on arrival
    deadline_s: float  # monotonic
    asked: Search | Load
    is_stored: npt.NDArray[np.uint8] | None = None  # [num_keys * groups]; None: not known yet
    stretch: _Stretch | None = None  # None: not decided
    unread: dict[Target, None] = field(default_factory=dict)  # the targets of the load that are not read yet, in order

    @property
    def load(self) -> Load | None:
        return self.asked if isinstance(self.asked, Load) else None

    @property
    def computes_front(self) -> bool:
        """Whether it may begin with the front of its prompt while the back is loaded."""
        return self.load is not None and self.stretch is not None and self.stretch.is_back


class Loads:
    """Holds requests while storage is asked for their missing blocks, and has the scheduler make room for these.

    Everything here runs in the engine's thread, between two steps. A request asks storage only once, and goes on at its
    deadline with the blocks that have come by then, whatever storage does. While a call hangs, no request is held.
    """

    def __init__(
        self,
        spec: TierSpec,
        scheduler: Scheduler,
        loader: Loader,
        planner: LoadPlanner,
        *,
        groups: Sequence[KVGroup],
        reach: Reach,
        max_num_seqs: int,
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._loader = loader
        self._planner = planner
        self._groups = groups
        self._reach = reach
        self._max_num_seqs = max_num_seqs
        self._block_size = groups[0].block_size
        self._is_full = np.array([group.kind != "window" for group in groups])
        self._waits: dict[int, _Wait] = {}
        self._expected: dict[int, ExpectedHits] = {}  # by request
        self._turn = 0  # rotates the requests whose loads find no room: see `_try_again`
        self._reading_bytes = 0  # all bytes of loads that have not ended
        self.why_less: dict[int, LoadStop] = {}  # by request that has not begun: why it got less than storage had
        self.failures: Counter[Status] = Counter()
        self.hit_tokens: Counter[str] = Counter()  # by tier
        self.num_loads = 0
        self.num_late = 0
        self.num_declined = 0
        self.loaded_blocks = 0
        self.loaded_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waits)

    @property
    def is_reading(self) -> bool:
        """Whether a request waits, or blocks are being read: stores wait meanwhile. From any thread."""
        return self._reading_bytes > 0 or len(self._waits) > 0

    def next_deadline_s(self) -> float | None:
        """Return the time, on the monotonic clock, at which the next request stops waiting at the latest."""
        if not self._waits:
            return None
        return min(self._loader.hung_from_s, *(wait.deadline_s for wait in self._waits.values()))

    def consider(self, request_id: int) -> None:
        """Hold a request that has just arrived if storage may have more of its prompt than the pool."""
        if self._loader.is_hung:
            return
        now_s = time.monotonic()
        block_keys, is_resident, num_usable = self._scheduler.look_up(request_id)
        num_keys = len(is_resident) // len(self._groups)
        num_missing = (num_keys - num_usable) * self._block_size
        if num_missing < self._spec.prefetch_threshold:
            return
        cells = np.flatnonzero(is_resident == 0)
        deadline_s = now_s + self._patience_s(num_missing)
        search = Search(request_id, block_keys, len(self._groups), cells, deadline_s)
        self._waits[request_id] = _Wait(request_id, num_keys, num_usable, deadline_s, search)
        self._scheduler.hold(request_id)
        self._loader.submit(search)

    def apply(self) -> None:
        """Handle the results of searches and reads, and let go of requests whose deadlines have passed."""
        for done in self._loader.take_done():
            if isinstance(done, Search):
                self._found(done)
            else:
                self._read(done)
        now_s = time.monotonic()
        is_hung = self._loader.is_hung
        is_alone = bool(self._waits) and self._spec.prefetch_policy == "best_effort" and self._only_held_requests_wait()
        for wait in list(self._waits.values()):
            if now_s >= wait.deadline_s or is_hung or (is_alone and not wait.computes_front):
                self.num_late += wait.load is not None
                self.why_less[wait.request_id] = "late"
                self._give_up(wait)
            elif wait.computes_front and self._is_passed(wait):
                self.num_late += wait.request_id in self._expected  # it reached its back before storage did
                self._give_up(wait)
        self._try_again()

    def _try_again(self) -> None:
        """Begin loads for which there was no room.

        Each try looks at a whole prompt, and thousands of requests may wait. So a round stops after two tries without
        success: the request that has waited longest is tried first, and then the others in rotation.
        """
        blocked = [wait for wait in self._waits.values() if wait.stretch is not None and wait.load is None]
        others = deque(blocked[1:])
        others.rotate(-self._turn)
        num_in_vain = 0
        for wait in [*blocked[:1], *others]:
            self._begin(wait)
            num_in_vain += wait.load is None and wait.request_id in self._waits
            if num_in_vain == _TRIES_IN_VAIN:
                self._turn += 1
                return

    def forget(self, request_id: int) -> None:
        """Note that a request has ended."""
        self._expected.pop(request_id, None)
        self.why_less.pop(request_id, None)
        if wait := self._waits.get(request_id):
            self._give_up(wait)

    def admitted(self, request_id: int, cached_tokens: int) -> dict[int, str]:
        """Note that a request began with `cached_tokens` tokens from the cache.

        Return the tiers of the blocks that were loaded for it, by index in the prompt.
        """
        self.why_less.pop(request_id, None)
        tiers = self._take_hits(request_id, 0, cached_tokens // self._block_size)
        if request_id in self._expected and not self._expected[request_id].is_back:
            del self._expected[request_id]
        return tiers

    def met(self, request_id: int, first: int, end: int) -> dict[int, str]:
        """Note that a request skips the back of its prompt, blocks `first` to `end`, and return their tiers."""
        tiers = self._take_hits(request_id, first, end)
        self._expected.pop(request_id, None)
        return tiers

    def _take_hits(self, request_id: int, first: int, end: int) -> dict[int, str]:
        if (expected := self._expected.get(request_id)) is None:
            return {}
        tiers = expected.tiers_of_hits(first, end)
        for tier, num_blocks in Counter(tiers.values()).items():
            self.hit_tokens[tier] += num_blocks * self._block_size
        return tiers

    def close(self) -> None:
        """Give up all searches and loads."""
        for wait in list(self._waits.values()):
            self._give_up(wait)

    def _patience_s(self, num_tokens: int) -> float:
        spec = self._spec
        if spec.prefetch_policy == "wait_complete":
            return _LONGEST_WAIT_S
        return spec.prefetch_timeout_base_s + spec.prefetch_timeout_per_ki_token_s * num_tokens / 1024

    def _only_held_requests_wait(self) -> bool:
        """Return whether a held request could run at once: a slot is free, and no other request waits."""
        stats = self._scheduler.stats()
        num_held = sum(not wait.computes_front for wait in self._waits.values())
        return stats.num_waiting == num_held and stats.num_running < self._max_num_seqs

    def _is_passed(self, wait: _Wait) -> bool:
        """Return whether a request has computed all blocks of its back that are still to be read.

        They are read from the last to the first, so the first of `unread` is the last in the prompt.
        """
        return next(iter(wait.unread)).index < self._scheduler.num_planned_blocks(wait.request_id)

    def _found(self, search: Search) -> None:
        wait = self._waits.get(search.request_id)
        if wait is None or wait.asked is not search:
            return
        wait.is_stored = np.zeros(wait.num_keys * len(self._groups), np.uint8)
        wait.is_stored[search.cells] = np.array(search.found, np.uint8)
        self._begin(wait)

    def _begin(self, wait: _Wait) -> None:
        """Load the blocks that storage has of a prompt if there is room; let its request go if that is not worth it.

        Tails of windows are read first, because without them the rest is of no use, then blocks from the first to the
        last. If the front is computed meanwhile, all blocks are read from the last to the first.
        """
        assert wait.is_stored is not None
        if wait.stretch is None:
            wait.stretch = self._stretch_worth_loading(wait, wait.is_stored)
        begin, is_back = wait.stretch.begin, wait.stretch.is_back
        length = self._scheduler.loadable(wait.request_id, wait.is_stored, wait.stretch.end)
        block_keys, is_resident, num_usable = self._scheduler.look_up(wait.request_id)
        if length <= num_usable or self._is_here(is_resident, begin, length):
            self._let_go(wait)
            return
        indices, groups, blocks, offsets_bytes = self._scheduler.begin_load(wait.request_id, length, begin)
        if not len(blocks):
            return
        order = np.lexsort((groups, indices))[::-1] if is_back else np.lexsort((groups, indices, self._is_full[groups]))
        keys = list(split_keys(block_keys))
        targets = [
            Target(BlockName(keys[index], group), index, block, self._span_at(offset, group))
            for index, group, block, offset in zip(
                *(array[order].tolist() for array in (indices, groups, blocks, offsets_bytes)), strict=True
            )
        ]
        load = wait.asked = Load(wait.request_id, targets, wait.deadline_s, self._reach.fence())
        wait.unread = dict.fromkeys(targets)
        self._reading_bytes += _num_bytes(targets)
        self._expected[wait.request_id] = ExpectedHits(wait.num_usable, length, is_back)
        self.num_loads += 1
        self._loader.submit(load)
        if is_back:
            self.why_less[wait.request_id] = "declined"
            self._scheduler.meet(wait.request_id, length)

    def _stretch_worth_loading(self, wait: _Wait, is_stored: npt.NDArray[np.uint8]) -> _Stretch:
        """Return which blocks of a prompt storage should read.

        `wait_complete` reads all that storage has, without asking the planner.
        """
        length = self._scheduler.loadable(wait.request_id, is_stored, wait.num_keys)
        num_tokens = (length - wait.num_usable) * self._block_size
        if num_tokens < self._spec.prefetch_threshold:
            return _NOTHING
        if self._spec.prefetch_policy == "wait_complete":
            return _Stretch(0, length)
        if first := self._first_of_back(wait, length):
            return _Stretch(first, length)
        num_bytes = self._load_bytes(wait.num_usable, length)
        compute_s = self._compute_s(wait, 0, length - wait.num_usable)
        if self._planner.is_worth_loading(num_bytes, self._reading_bytes, compute_s):
            return _Stretch(0, length)
        self.num_declined += 1
        self.why_less[wait.request_id] = "declined"
        if not self._planner.begins_trial(time.monotonic()):
            return _NOTHING
        shorter = min(length, wait.num_usable + ceil_div(self._spec.prefetch_threshold, self._block_size))
        usable = self._scheduler.loadable(wait.request_id, is_stored, shorter)
        return _Stretch(0, usable if usable > wait.num_usable else length)

    def _first_of_back(self, wait: _Wait, length: int) -> int | None:
        """Return the first block to load if the blocks before it should be computed at the same time.

        `None` if loading or computing all blocks is as good. `None`, too, if other requests wait: computing would delay
        them, and a load does not.
        """
        if not self._scheduler.can_meet or len(self._waits) > 1 or not self._only_held_requests_wait():
            return None
        num_blocks = length - wait.num_usable
        num_computed = self._planner.num_to_compute(
            num_blocks,
            lambda count: self._load_bytes(wait.num_usable + count, length),
            self._reading_bytes,
            lambda count: self._compute_s(wait, 0, count),
        )
        if num_computed is None or (num_blocks - num_computed) * self._block_size < self._spec.prefetch_threshold:
            return None
        return wait.num_usable + num_not_loaded(
            num_computed, lambda begin, end: self._compute_s(wait, begin, end) or 0.0
        )

    def _compute_s(self, wait: _Wait, begin: int, end: int) -> float | None:
        """Return the seconds to compute blocks `begin` to `end`, counted from the first that was not usable on arrival.

        `None` if step times are not known yet.
        """
        return self._scheduler.prefill_s(
            (wait.num_usable + begin) * self._block_size, (wait.num_usable + end) * self._block_size
        )

    def _is_here(self, is_resident: npt.NDArray[np.uint8], first: int, length: int) -> bool:
        """Return whether the pool has all blocks that a prefix of `length` blocks needs from block `first` on."""
        cells = is_resident.reshape(-1, len(self._groups))
        return all(
            cells[length - num_needed(group, first, length) : length, g].all() for g, group in enumerate(self._groups)
        )

    def _load_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of the blocks from `begin` on that a prefix of `end` blocks needs, of all ranks."""
        return len(self._reach.pools) * sum(num_needed(group, begin, end) * group.block_bytes for group in self._groups)

    def _span_at(self, offset_bytes: int, group: int) -> Span:
        return Span(offset_bytes, self._groups[group].block_bytes, len(self._reach.pools))

    def _read(self, part: PartRead) -> None:
        num_read = part.num_read
        read_bytes = _num_bytes(part.targets[:num_read])
        self._end(part.targets[:num_read], is_loaded=True)
        self._end(part.targets[num_read:], is_loaded=False)
        if expected := self._expected.get(part.load.request_id):
            expected.tiers.update((target.index, tier) for target, tier in zip(part.targets, part.tiers, strict=False))
        self.loaded_blocks += num_read
        self.loaded_bytes += read_bytes
        self.failures.update(status for status in part.statuses if status is not None and status is not Status.OK)
        if any(status in (Status.OK, Status.LATE) for status in part.statuses):
            self._planner.note_read(read_bytes, part.took_s, time.monotonic())
        wait = self._waits.get(part.load.request_id)
        if wait is None or wait.asked is not part.load:
            return
        for target in part.targets:
            del wait.unread[target]
        if num_read < len(part.targets) and (why := _WHY_LESS.get(part.statuses[num_read])):
            self.why_less[wait.request_id] = why
        if part.is_last:
            self._let_go(wait)

    def _end(self, targets: Sequence[Target], is_loaded: bool) -> None:
        if targets:
            self._scheduler.end_load(*_arrays(targets), is_loaded)
            self._reading_bytes -= _num_bytes(targets)

    def _give_up(self, wait: _Wait) -> None:
        """Stop waiting for storage. Blocks that it may be reading into stay taken until the read ends."""
        not_begun = self._loader.withdraw(wait.asked)
        if wait.unread:
            self._scheduler.forget_loading(*_arrays(list(wait.unread)))
        self._end(not_begun, is_loaded=False)
        self._let_go(wait)

    def _let_go(self, wait: _Wait) -> None:
        del self._waits[wait.request_id]
        self._scheduler.let_go(wait.request_id)


def _arrays(targets: Sequence[Target]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return groups and blocks as arrays, for the core."""
    groups = np.array([target.name.group for target in targets], np.int32)
    return groups, np.array([target.block for target in targets], np.int32)


def num_needed(group: KVGroup, begin: int, end: int) -> int:
    """Return how many blocks from `begin` on a prefix of `end` blocks needs: with a window, those of the tail."""
    return min(end - begin, group.tail_blocks) if group.kind == "window" else end - begin


def _num_bytes(targets: Sequence[Target]) -> int:
    return sum(target.span.num_bytes for target in targets)
