"""Prompts that storage loads, whole or in part, by the engine's thread, the loader's and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt
import pytest
import torch

from swiftkv import _core
from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys, split_keys
from swiftkv.tier.loader import Loader
from swiftkv.tier.loads import Loads
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.rates import LoadPlanner
from swiftkv.tier.reach import HostReach
from swiftkv.tier.stored_blocks import StoredBlocks
from tests.support.storage import TIMEOUT_S, Clock, GatedMedium, MemoryMedium, Owner

BLOCK = 16
NUM_BLOCKS = 10
FIRST_OF_BACK = 3
GROUP = KVGroup((0,), num_kv_heads=1, head_dim=32, dtype="float32", block_size=BLOCK)
KEYS = ObjectKeys([GROUP], "weights", "cpu")
PROMPT = np.arange(NUM_BLOCKS * BLOCK + 1, dtype=np.int32)
REQUEST = 1


def stored(medium: MemoryMedium, prompts: Sequence[npt.NDArray[np.int32]]) -> SealedBackend:
    """Return a backend that has all full blocks of these prompts."""
    backend = SealedBackend(GuardedMedium(medium, Breaker()), KEYS.fingerprint)
    for prompt in prompts:
        names = names_of(prompt)
        blocks = [memoryview(np.full(GROUP.block_bytes, i, np.uint8)) for i in range(len(names))]
        assert backend.put(names, blocks, time.monotonic() + TIMEOUT_S) == [Status.OK] * len(names)
    return backend


def names_of(prompt: npt.NDArray[np.int32]) -> list[bytes]:
    return [KEYS.of(block_key, 0) for block_key in split_keys(_core.block_keys(b"", prompt, block_size=BLOCK))]


def check_nothing_is_loading(loads: Loads, scheduler: _core.Scheduler) -> None:
    """Check that storage has let go of all blocks."""
    assert not loads.is_reading
    assert scheduler.stats().groups[0].loading == 0
    scheduler.check_invariants()


class Meeting:
    """A request that computes the front of its prompt, and a storage that is about to read the back.

    Computing a block takes as long as loading one. So five blocks of ten are to be computed, and half of these,
    `FIRST_OF_BACK`, are not loaded at all.
    """

    def __init__(self, prompt: npt.NDArray[np.int32] = PROMPT) -> None:
        self.prompt = prompt
        self.medium = GatedMedium()
        self.owner = Owner()
        self.names = names_of(prompt)
        self.scheduler = _core.Scheduler(
            [_core.GroupSpec(1, 2 * len(self.names), layer_block_bytes=GROUP.block_bytes)],
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=len(prompt) + 1,
        )
        seconds_per_token, seconds_per_step = 1.0, 0.001
        self.scheduler.remember_step_time([seconds_per_token, 0, 0, 0, 0, seconds_per_step])
        planner = LoadPlanner()
        planner.note_read(GROUP.block_bytes, BLOCK * seconds_per_token, now_s=time.monotonic())
        levels = Levels([Level("storage", stored(self.medium, [prompt]))])
        reach = HostReach([torch.zeros(2 * len(self.names) * GROUP.block_bytes, dtype=torch.uint8)])
        self.loader = Loader(StoredBlocks(levels, KEYS), reach, self.owner.wake)
        self.loads = Loads(
            TierSpec(backend=None, directory="/", prefetch_threshold=BLOCK, prefetch_timeout_base_s=10 * TIMEOUT_S),
            self.scheduler,
            self.loader,
            planner,
            groups=[GROUP],
            reach=reach,
            max_num_seqs=2,
        )

    def begin(self) -> None:
        """Send the request, and return once storage has been asked for its back."""
        no_stop = np.zeros(0, np.int32)
        self.scheduler.add_request(REQUEST, self.prompt, 1, 0, no_stop, b"", False)
        self.loads.consider(REQUEST)
        self.owner.wait_for_more(0)
        self.loads.apply()
        assert self.medium.is_asked.wait(TIMEOUT_S)

    def let_read(self, num_calls: int = 1000) -> None:
        """Let storage answer so many calls, and take over what the first of them has read."""
        count = self.owner.count
        self.medium.let_answer(num_calls)
        self.owner.wait_for_more(count)
        self.loads.apply()

    def close(self) -> None:
        self.medium.let_answer()
        self.loader.close()
        self.loader.join(TIMEOUT_S)

    def step(self) -> int:
        """Run a step, and return how many of the prompt's tokens are computed then."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        self.loads.apply()
        return int(plan.context_lens[0])


@pytest.fixture
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    """Return the meeting of `PROMPT`, or of the prompt that a test has it for."""
    with closing(Meeting(getattr(request, "param", PROMPT))) as meeting:
        yield meeting


def test_a_back_is_read_from_its_end(meeting: Meeting) -> None:
    """The request computes towards it, so what comes first must be what it reaches last."""
    meeting.begin()
    assert meeting.medium.asked == meeting.names[: FIRST_OF_BACK - 1 : -1]
    assert meeting.step() == FIRST_OF_BACK * BLOCK
    meeting.let_read()
    assert meeting.step() == len(PROMPT)
    assert (meeting.loads.num_late, meeting.loads.num_waiting) == (0, 0)
    meeting.scheduler.check_invariants()


def test_a_request_that_has_passed_its_back_does_not_wait_for_it(meeting: Meeting) -> None:
    """Storage reads nothing meanwhile; the load ends before the request does."""
    meeting.begin()
    while (num_computed := meeting.step()) < NUM_BLOCKS * BLOCK:
        assert (meeting.loads.num_late, meeting.loads.num_waiting) == (0, 1)
    assert num_computed == NUM_BLOCKS * BLOCK
    assert (meeting.loads.num_late, meeting.loads.num_waiting) == (1, 0)
    assert meeting.step() == len(PROMPT)
    meeting.let_read()
    check_nothing_is_loading(meeting.loads, meeting.scheduler)


def test_a_back_that_was_lost_after_it_was_found_is_computed(meeting: Meeting) -> None:
    """A part of it is read before, and counts; nobody waits for the rest, nor do stores."""
    meeting.begin()
    meeting.medium.drop(meeting.names[: FIRST_OF_BACK + 2])
    meeting.let_read()
    assert (meeting.loads.num_waiting, meeting.loads.loaded_blocks) == (0, NUM_BLOCKS - FIRST_OF_BACK - 2)
    check_nothing_is_loading(meeting.loads, meeting.scheduler)
    while meeting.step() < len(PROMPT):
        pass
    meeting.scheduler.check_invariants()


@pytest.mark.parametrize("meeting", [np.arange(150 * BLOCK + 1, dtype=np.int32)], indirect=True, ids=["long"])
def test_a_request_that_ends_between_two_parts_of_its_load_leaves_the_first_one_here(meeting: Meeting) -> None:
    meeting.begin()
    meeting.let_read(num_calls=1)
    num_read = meeting.loads.loaded_blocks
    assert num_read > 0
    assert meeting.scheduler.stats().groups[0].loading > 0
    count = meeting.owner.count
    meeting.scheduler.abort(np.array([REQUEST], np.uint64))
    meeting.loads.forget(REQUEST)
    meeting.medium.let_answer()
    while meeting.loads.is_reading:
        count = meeting.owner.wait_for_more(count)
        meeting.loads.apply()
    group = meeting.scheduler.stats().groups[0]
    assert (group.loading, group.cached) == (0, num_read)
    meeting.scheduler.check_invariants()


class Turns:
    """An engine with one seat, and a storage that has two prompts."""

    def __init__(self, medium: MemoryMedium, num_blocks: int) -> None:
        """The pool has that many blocks."""
        self.owner = Owner()
        self.prompts = [np.arange(i * 1000, i * 1000 + len(PROMPT), dtype=np.int32) for i in range(1, 3)]
        backend = stored(medium, self.prompts)
        self.scheduler = _core.Scheduler(
            [_core.GroupSpec(1, num_blocks, layer_block_bytes=GROUP.block_bytes)],
            block_size=BLOCK,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            max_model_len=len(PROMPT) + 1,
        )
        reach = HostReach([torch.zeros(num_blocks * GROUP.block_bytes, dtype=torch.uint8)])
        self.loader = Loader(StoredBlocks(Levels([Level("storage", backend)]), KEYS), reach, self.owner.wake)
        self.loads = Loads(
            TierSpec(backend=None, directory="/", prefetch_threshold=BLOCK, prefetch_timeout_base_s=10 * TIMEOUT_S),
            self.scheduler,
            self.loader,
            LoadPlanner(),
            groups=[GROUP],
            reach=reach,
            max_num_seqs=1,
        )

    def add(self, request_id: int, prompt: npt.NDArray[np.int32], max_tokens: int) -> None:
        self.scheduler.add_request(request_id, prompt, max_tokens, 0, np.zeros(0, np.int32), b"", False)

    def until(self, holds: Callable[[], bool]) -> None:
        """Take over what storage has done until this holds."""
        self.owner.until(holds, self.loads.apply)

    def close(self) -> None:
        self.loader.close()
        self.loader.join(TIMEOUT_S)

    def step(self) -> dict[int, int]:
        """Run a step, and return the tokens that requests found which began with it."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        self.loads.apply()
        return dict(zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True))


@pytest.fixture
def turns() -> Iterator[Turns]:
    """Return an engine whose pool has room for little more than one of the prompts."""
    with closing(Turns(MemoryMedium(name="turns"), NUM_BLOCKS + 4)) as turns:
        yield turns


def test_what_was_loaded_is_used_before_another_load_takes_its_room(turns: Turns) -> None:
    """The first prompt waits for the seat when its blocks are here, and the second for their room."""
    turns.add(1, PROMPT[:BLOCK], max_tokens=4)
    turns.step()
    for request_id, prompt in enumerate(turns.prompts, start=2):
        turns.add(request_id, prompt, max_tokens=1)
        turns.loads.consider(request_id)
    turns.until(lambda: turns.loads.num_waiting < 2)
    assert turns.loads.num_loads == 1
    found: dict[int, int] = {}
    while 2 not in found:
        found |= turns.step()
    turns.until(lambda: turns.loads.num_waiting == 0)
    found |= turns.step()
    assert found == {2: NUM_BLOCKS * BLOCK, 3: NUM_BLOCKS * BLOCK}
    assert (turns.loads.num_loads, turns.loads.num_late) == (2, 0)
    turns.scheduler.check_invariants()


class Stuck(Turns):
    """Storage that does not come back from reading the first prompt, and a pool with room for both."""

    def __init__(self) -> None:
        self.medium = GatedMedium()
        super().__init__(self.medium, 2 * NUM_BLOCKS + 4)

    def ask(self, request_id: int, prompt: npt.NDArray[np.int32]) -> None:
        self.add(request_id, prompt, max_tokens=1)
        self.loads.consider(request_id)

    @property
    def num_loading(self) -> int:
        return self.scheduler.stats().groups[0].loading

    def let_read(self) -> None:
        """Have the call return, and check that no block is left behind."""
        self.medium.let_answer()
        self.until(lambda: not self.loads.is_reading)
        check_nothing_is_loading(self.loads, self.scheduler)

    def close(self) -> None:
        self.medium.let_answer()
        super().close()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    with closing(Stuck()) as stuck:
        yield stuck


def test_who_stops_waiting_keeps_no_blocks_that_storage_was_not_handed(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load is behind a call that does not come back; both prompts are computed meanwhile."""
    clock = Clock(time.monotonic())
    monkeypatch.setattr("swiftkv.tier.loads.time", clock)
    for request_id, prompt in enumerate(stuck.prompts, start=1):
        stuck.ask(request_id, prompt)
    stuck.until(lambda: stuck.loads.num_loads == 2)
    assert stuck.medium.is_asked.wait(TIMEOUT_S)
    assert (stuck.num_loading, stuck.loads.num_waiting) == (2 * NUM_BLOCKS, 2)
    clock.now_s += 20 * TIMEOUT_S
    stuck.loads.apply()
    assert (stuck.num_loading, stuck.loads.num_waiting) == (NUM_BLOCKS, 0)
    stuck.scheduler.check_invariants()
    while stuck.scheduler.has_work():
        stuck.step()
    assert stuck.loads.is_reading
    stuck.let_read()


@pytest.mark.parametrize("meeting", [np.arange(150 * BLOCK + 1, dtype=np.int32)], indirect=True, ids=["long"])
def test_of_a_load_in_progress_only_what_storage_was_handed_stays(meeting: Meeting) -> None:
    meeting.begin()
    num_asked = len(meeting.medium.asked)
    assert meeting.scheduler.stats().groups[0].loading > num_asked
    meeting.scheduler.abort(np.array([REQUEST], np.uint64))
    meeting.loads.forget(REQUEST)
    assert meeting.scheduler.stats().groups[0].loading == num_asked
    meeting.let_read()
    check_nothing_is_loading(meeting.loads, meeting.scheduler)


def test_while_a_call_hangs_nobody_waits(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who waited before, nor who comes then; once it has returned, prompts wait again."""
    clock = Clock(time.monotonic())
    for module in ("loads", "loader"):
        monkeypatch.setattr(f"swiftkv.tier.{module}.time", clock)
    stuck.ask(1, stuck.prompts[0])
    stuck.until(lambda: stuck.loads.num_loads == 1)
    assert stuck.medium.is_asked.wait(TIMEOUT_S)
    deadline_s = stuck.loads.next_deadline_s()
    assert deadline_s is not None
    clock.now_s = deadline_s
    stuck.ask(2, stuck.prompts[1])
    stuck.loads.apply()
    assert stuck.loads.num_waiting == 1  # the second
    hangs_from_s = stuck.loads.next_deadline_s()
    assert hangs_from_s is not None
    assert hangs_from_s < deadline_s + TIMEOUT_S  # far before its own deadline
    clock.now_s = hangs_from_s
    stuck.loads.apply()
    assert stuck.loads.num_waiting == 0
    stuck.ask(3, stuck.prompts[1])
    assert stuck.loads.num_waiting == 0
    stuck.let_read()
    stuck.ask(4, stuck.prompts[1])
    assert stuck.loads.num_waiting == 1
