"""A prompt whose back is loaded while its front is computed, by the engine's thread, the loader's and the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from swiftkv import _core
from swiftkv.cache.geometry import KVGroup
from swiftkv.storage.backend import Parts, Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.keys import ObjectKeys, split_keys
from swiftkv.tier.loader import Loader
from swiftkv.tier.loads import Loads
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.rates import LoadPlanner
from tests.support.storage import TIMEOUT_S, MemoryMedium, Owner

BLOCK = 16
NUM_BLOCKS = 10
FIRST_OF_BACK = 3
GROUP = KVGroup((0,), num_kv_heads=1, head_dim=32, dtype="float32", block_size=BLOCK)
KEYS = ObjectKeys([GROUP], "weights", "cpu")
PROMPT = np.arange(NUM_BLOCKS * BLOCK + 1, dtype=np.int32)
REQUEST = 1


class GatedMedium(MemoryMedium):
    """A medium that notes what it is to read, and reads nothing before the test lets it."""

    def __init__(self) -> None:
        super().__init__(name=str(id(self)))
        self.asked: list[bytes] = []
        self.is_asked = threading.Event()
        self.may_read = threading.Event()

    def read(self, keys: Sequence[bytes], into: Sequence[Parts], deadline_s: float) -> list[Status]:
        self.asked += keys
        self.is_asked.set()
        assert self.may_read.wait(TIMEOUT_S)
        return super().read(keys, into, deadline_s)


class Meeting:
    """A request that computes the front of its prompt, and a storage that is about to read the back.

    Computing a block takes as long as loading one. So five blocks of ten are to be computed, and half of these,
    `FIRST_OF_BACK`, are not loaded at all.
    """

    def __init__(self) -> None:
        self.medium = GatedMedium()
        self.owner = Owner()
        stored = SealedBackend(GuardedMedium(self.medium, Breaker()), KEYS.fingerprint)
        self.names = [
            KEYS.of(block_key, 0) for block_key in split_keys(_core.block_keys(b"", PROMPT, block_size=BLOCK))
        ]
        blocks = [memoryview(np.full(GROUP.block_bytes, i, np.uint8)) for i in range(NUM_BLOCKS)]
        assert stored.put(self.names, blocks, time.monotonic() + TIMEOUT_S) == [Status.OK] * NUM_BLOCKS
        self.scheduler = _core.Scheduler(
            [_core.GroupSpec(1, 2 * NUM_BLOCKS, layer_block_bytes=GROUP.block_bytes)],
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=len(PROMPT) + 1,
        )
        seconds_per_token, seconds_per_step = 1.0, 0.001
        self.scheduler.remember_step_time([seconds_per_token, 0, 0, 0, 0, seconds_per_step])
        planner = LoadPlanner()
        planner.note_read(GROUP.block_bytes, BLOCK * seconds_per_token, now_s=time.monotonic())
        self.loader = Loader(Levels([Level("storage", stored)]), KEYS, self.owner.wake)
        self.loads = Loads(
            TierSpec(backend=None, directory="/", prefetch_threshold=BLOCK, prefetch_timeout_base_s=10 * TIMEOUT_S),
            self.scheduler,
            self.loader,
            planner,
            groups=[GROUP],
            pool=np.zeros(2 * NUM_BLOCKS * GROUP.block_bytes, np.uint8),
            max_num_seqs=2,
        )

    def begin(self) -> None:
        """Send the request, and return once storage has been asked for its back."""
        no_stop = np.zeros(0, np.int32)
        self.scheduler.add_request(REQUEST, PROMPT, 1, 0, no_stop, b"", False)
        self.loads.consider(REQUEST)
        self.owner.wait_for_more(0)
        self.loads.apply()
        assert self.medium.is_asked.wait(TIMEOUT_S)

    def step(self) -> int:
        """Run a step, and return how many of the prompt's tokens are computed then."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        self.loads.apply()
        return int(plan.context_lens[0])


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    try:
        yield meeting
    finally:
        meeting.medium.may_read.set()
        meeting.loader.close()
        meeting.loader.join(TIMEOUT_S)


def test_a_back_is_read_from_its_end(meeting: Meeting) -> None:
    """The request computes towards it, so what comes first must be what it reaches last."""
    meeting.begin()
    assert meeting.medium.asked == meeting.names[: FIRST_OF_BACK - 1 : -1]
    assert meeting.step() == FIRST_OF_BACK * BLOCK
    count = meeting.owner.count
    meeting.medium.may_read.set()
    meeting.owner.wait_for_more(count)
    meeting.loads.apply()
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
    count = meeting.owner.count
    meeting.medium.may_read.set()
    meeting.owner.wait_for_more(count)
    meeting.loads.apply()
    assert not meeting.loads.is_reading
    assert meeting.scheduler.stats().groups[0].loading == 0
    meeting.scheduler.check_invariants()
