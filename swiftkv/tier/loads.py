"""The prompts that wait for storage: which blocks are searched and loaded for them, and when they stop waiting."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler
from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Status
from swiftkv.tier.expected_hits import ExpectedHits
from swiftkv.tier.host_pins import HostPins, Int32Array, SearchPins
from swiftkv.tier.keys import split_keys
from swiftkv.tier.load_choice import LoadChooser, Stretch, WaitingPrompt, num_needed
from swiftkv.tier.loader import Load, Loader, PartRead, Search, Target
from swiftkv.tier.messages import LoadStop, TierSpec
from swiftkv.tier.rates import LoadPlanner
from swiftkv.tier.reach import Reach, Span
from swiftkv.tier.stored_blocks import HOST_TIER, BlockName

_LONGEST_WAIT_S = 60.0
"""The longest wait for storage, even with `wait_complete`. After it, the prompt is computed."""

_TRIES_IN_VAIN = 2


_WHY_LESS: dict[Status | None, LoadStop] = {
    Status.CORRUPT: "corrupt",
    Status.FAILED: "failed",
    Status.LATE: "late",
}


@dataclass(frozen=True, slots=True)
class _Searching:
    """Storage is asked which blocks it has."""

    search: Search


@dataclass(frozen=True, slots=True)
class _WithoutRoom:
    """Storage has blocks that are worth loading. The pool has had no room for them yet."""

    is_stored: npt.NDArray[np.uint8]  # [num_keys * groups]
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class _Loading:
    """Storage reads blocks; if they are a back, the request may begin with the front of its prompt."""

    load: Load
    is_back: bool
    unread: dict[Target, None]  # the targets that are not read yet, in order


@dataclass(slots=True)
class _Wait:
    """A request that is held until its blocks are loaded, or computes its front while its back is loaded."""

    prompt: WaitingPrompt
    deadline_s: float  # monotonic
    pins: SearchPins | None  # its blocks in host memory, until the scheduler takes them over
    state: _Searching | _WithoutRoom | _Loading

    @property
    def request_id(self) -> int:
        return self.prompt.request_id

    @property
    def pinned(self) -> npt.NDArray[np.int32] | None:
        """The chunks that are pinned for it, -1 where there is none: [num_keys * groups]."""
        return None if self.pins is None else self.pins.chunks

    @property
    def computes_front(self) -> bool:
        """Whether it may begin with the front of its prompt while the back is loaded."""
        return isinstance(self.state, _Loading) and self.state.is_back


class Loads:
    """Holds requests while storage is asked for their missing blocks, and has the scheduler make room for these.

    Everything here runs in the engine's thread, between two steps. A request

    1. is held on arrival while storage is searched for its blocks (`consider`);
    2. goes on at once if none are worth loading (`_found`);
    3. waits until the pool has room for them (`_begin`, `_try_again`);
    4. goes on when they are read (`_read`), or computes the front of its prompt while the back is read.

    Blocks that steps read in host memory need no reading here: the search has pinned and verified them. Those that
    steps attend to there need no room, either; the next step copies the others to the pool.

    Storage is asked only once for a request. At its deadline the request goes on with the blocks that have come by
    then, whatever storage does (`apply`, `_give_up`). While a call hangs, no request is held.
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
        host: HostPins | None = None,
    ) -> None:
        """`host` is there if steps read blocks in host memory."""
        self._spec = spec
        self._scheduler = scheduler
        self._loader = loader
        self._planner = planner
        self._groups = groups
        self._reach = reach
        self._pool_bytes = reach.pools[0].nbytes
        self._host = host
        self._max_num_seqs = max_num_seqs
        self._block_size = groups[0].block_size
        self._chooser = LoadChooser(spec, scheduler, planner, groups=groups, num_ranks=len(reach.pools))
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
        pins = None if self._host is None else self._host.search(len(is_resident))
        search = Search(request_id, block_keys, len(self._groups), cells, deadline_s, pins)
        prompt = WaitingPrompt(request_id, num_keys, num_usable)
        self._waits[request_id] = _Wait(prompt, deadline_s, pins, _Searching(search))
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
                self.num_late += isinstance(wait.state, _Loading)
                self.why_less[wait.request_id] = "late"
                self._give_up(wait)
            elif self._has_passed_back(wait):
                self.num_late += wait.request_id in self._expected  # it reached its back before storage did
                self._give_up(wait)
        self._try_again()

    def _try_again(self) -> None:
        """Begin loads for which there was no room.

        Each try looks at a whole prompt, and thousands of requests may wait. So a round stops after two tries without
        success: the request that has waited longest is tried first, and then the others in rotation.
        """
        blocked = [(wait, wait.state) for wait in self._waits.values() if isinstance(wait.state, _WithoutRoom)]
        others = deque(blocked[1:])
        others.rotate(-self._turn)
        num_in_vain = 0
        for wait, state in [*blocked[:1], *others]:
            num_in_vain += not self._begin(wait, state)
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

    def _has_passed_back(self, wait: _Wait) -> bool:
        """Return whether a request computes its front, and has computed all blocks of its back that are still unread.

        They are read from the last to the first, so the first of `unread` is the last in the prompt.
        """
        if not isinstance(wait.state, _Loading) or not wait.state.is_back:
            return False
        return next(iter(wait.state.unread)).index < self._scheduler.num_planned_blocks(wait.request_id)

    def _found(self, search: Search) -> None:
        wait = self._waits.get(search.request_id)
        if wait is None or not isinstance(wait.state, _Searching) or wait.state.search is not search:
            return
        is_stored = np.zeros(wait.prompt.num_keys * len(self._groups), np.uint8)
        assert search.found is not None
        is_stored[search.cells] = search.found
        self.failures.update(search.failures)
        if Status.CORRUPT in search.failures:
            self.why_less[search.request_id] = "corrupt"
        stretch = self._stretch_worth_loading(wait, is_stored)
        if stretch is None:
            self._let_go(wait)
            return
        wait.state = _WithoutRoom(is_stored, stretch)
        self._begin(wait, wait.state)

    def _stretch_worth_loading(self, wait: _Wait, is_stored: npt.NDArray[np.uint8]) -> Stretch | None:
        choice = self._chooser.choose(
            wait.prompt,
            is_stored,
            wait.pinned,
            reading_bytes=self._reading_bytes,
            # If other requests wait, computing would delay them, and a load does not.
            may_compute=len(self._waits) == 1 and self._only_held_requests_wait(),
            now_s=time.monotonic(),
        )
        if choice.is_declined:
            self.num_declined += 1
            self.why_less[wait.request_id] = "declined"
        return choice.stretch

    def _begin(self, wait: _Wait, blocked: _WithoutRoom) -> bool:
        """Load the blocks that storage has of a prompt; let its request go if that is not worth it any more.

        Return false if there is no room, and the request goes on waiting.
        """
        begin, is_back = blocked.stretch.begin, blocked.stretch.is_back
        length = self._scheduler.loadable(wait.request_id, blocked.is_stored, blocked.stretch.end, wait.pinned)
        block_keys, is_resident, num_usable = self._scheduler.look_up(wait.request_id)
        if length <= num_usable or self._is_here(is_resident, begin, length):
            self._let_go(wait)
            return True
        indices, groups, blocks, offsets, has_pin = self._scheduler.begin_load(
            wait.request_id, length, begin, wait.pinned
        )
        if not len(blocks):
            return False
        expected = ExpectedHits(wait.prompt.num_usable, length, is_back)
        self._expected[wait.request_id] = expected
        self.num_loads += 1
        pinned = has_pin != 0
        if pinned.any():
            expected.tiers |= self._hand_over(wait, indices[pinned], groups[pinned], blocks[pinned], offsets[pinned])
        left = ~pinned
        targets = self._targets(block_keys, is_back, indices[left], groups[left], blocks[left], offsets[left])
        if not targets:
            self._let_go(wait)
            return True
        load = Load(wait.request_id, targets, wait.deadline_s, self._reach.fence())
        wait.state = _Loading(load, is_back, unread=dict.fromkeys(targets))
        self._reading_bytes += _num_bytes(targets)
        self._loader.submit(load)
        if is_back:
            self.why_less[wait.request_id] = "declined"
            self._scheduler.meet(wait.request_id, length)
        return True

    def _hand_over(
        self,
        wait: _Wait,
        indices: Int32Array,
        groups: Int32Array,
        blocks: Int32Array,
        offsets_bytes: npt.NDArray[np.int64],
    ) -> dict[int, str]:
        """Use blocks in host memory, whose pins the scheduler has taken over. Return their tiers by index."""
        assert wait.pins is not None
        wait.pins.hand_over(indices * len(self._groups) + groups)
        attended = offsets_bytes >= self._pool_bytes
        if attended.any():
            self._scheduler.end_load(groups[attended], blocks[attended], is_loaded=True)
        self.loaded_blocks += len(blocks)
        self.loaded_bytes += sum(self._groups[group].block_bytes for group in groups[~attended].tolist())
        return dict.fromkeys(indices.tolist(), HOST_TIER)

    def _targets(
        self,
        block_keys: bytes,
        is_back: bool,
        indices: Int32Array,
        groups: Int32Array,
        blocks: Int32Array,
        offsets_bytes: npt.NDArray[np.int64],
    ) -> list[Target]:
        """Return blocks of the pool that storage shall read into, in the order of reading.

        Tails of windows are read first, because without them the rest is of no use, then blocks from the first to the
        last. If the front is computed meanwhile, all blocks are read from the last to the first.
        """
        by_index = (groups, indices)
        order = np.lexsort(by_index)[::-1] if is_back else np.lexsort((*by_index, self._is_full[groups]))
        keys = list(split_keys(block_keys))
        rows = zip(*(array[order].tolist() for array in (indices, groups, blocks, offsets_bytes)), strict=True)
        return [
            Target(BlockName(keys[index], group), index, block, self._span_at(offset, group))
            for index, group, block, offset in rows
        ]

    def _is_here(self, is_resident: npt.NDArray[np.uint8], first: int, length: int) -> bool:
        """Return whether the pool has all blocks that a prefix of `length` blocks needs from block `first` on."""
        cells = is_resident.reshape(-1, len(self._groups))
        return all(
            cells[length - num_needed(group, first, length) : length, g].all() for g, group in enumerate(self._groups)
        )

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
        if wait is None or not isinstance(wait.state, _Loading) or wait.state.load is not part.load:
            return
        for target in part.targets:
            del wait.state.unread[target]
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
        match wait.state:
            case _Searching(search):
                self._loader.withdraw(search)
            case _Loading(load, unread=unread):
                not_begun = self._loader.withdraw(load)
                if unread:
                    self._scheduler.forget_loading(*_arrays(list(unread)))
                self._end(not_begun, is_loaded=False)
        self._let_go(wait)

    def _let_go(self, wait: _Wait) -> None:
        if wait.pins is not None:
            wait.pins.give_back()
        del self._waits[wait.request_id]
        self._scheduler.let_go(wait.request_id)


def _arrays(targets: Sequence[Target]) -> tuple[Int32Array, Int32Array]:
    """Return groups and blocks as arrays, for the core."""
    groups = np.array([target.name.group for target in targets], np.int32)
    return groups, np.array([target.block for target in targets], np.int32)


def _num_bytes(targets: Sequence[Target]) -> int:
    return sum(target.span.num_bytes for target in targets)
