"""Prompts whose blocks lie in host memory: they are pinned and used there, and every pin is given back once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swiftkv import _core
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.host_blocks import HostChunks
from swiftkv.cache.pool import Pool, SharedHostMemory
from swiftkv.storage.backend import Status
from swiftkv.storage.breaker import Breaker, GuardedMedium
from swiftkv.storage.envelope import SealedBackend, verify
from swiftkv.storage.host_medium import HostMedium, make_host_memory
from swiftkv.storage.levels import Level, Levels
from swiftkv.tier.host_pins import HostPins
from swiftkv.tier.keys import ObjectKeys, split_keys
from swiftkv.tier.load_choice import LoadChooser, Stretch, WaitingPrompt
from swiftkv.tier.loader import Loader
from swiftkv.tier.loads import Loads, _Searching
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.rates import LoadPlanner
from swiftkv.tier.reach import HostReach
from swiftkv.tier.stored_blocks import StoredBlocks
from tests.support.storage import TIMEOUT_S, Clock, GatedMedium, Owner

BLOCK = 16
NUM_BLOCKS = 10
GROUP = KVGroup((0, 1), num_kv_heads=1, head_dim=32, dtype="float32", block_size=BLOCK)
KEYS = ObjectKeys([GROUP], "weights", "cpu")
PROMPT = np.arange(NUM_BLOCKS * BLOCK + 1, dtype=np.int32)
NAMES = [KEYS.of(key, 0) for key in split_keys(_core.block_keys(b"", PROMPT, block_size=BLOCK))]
HOST_BYTES = 8 << 20
ALL = range(NUM_BLOCKS)


class SlowToFind(GatedMedium):
    """Storage that answers what it has, and what it reads, only when it is permitted to."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self.wait()
        return super().exists(keys, deadline_s)


class Scene:
    """An engine with host memory and storage below its pool; `host` and `storage` have these blocks of `PROMPT`."""

    def __init__(
        self, host: Sequence[int], storage: Sequence[int] = (), pool_blocks: int = NUM_BLOCKS + 4, rate: float = 0.0
    ) -> None:
        """`rate`: how many blocks storage reads while one is computed, if that is known."""
        fd = make_host_memory(HOST_BYTES, GROUP.block_bytes)
        self.writer = HostMedium.of(fd, 1)
        geometry = HostChunks(self.writer.chunks_offset_bytes, self.writer.chunk_bytes, self.writer.num_chunks)
        self.pool = Pool([(GROUP, pool_blocks)], host=SharedHostMemory(fd, HOST_BYTES, geometry))
        os.close(fd)
        assert self.pool.host_blocks is not None
        assert self.pool.host_memory is not None
        self.medium = HostMedium(self.pool.host_memory)
        self.pins = HostPins(self.medium, {0})
        self.storage = SlowToFind()
        self.owner = Owner()
        self.put(self.writer, host)
        self.put(self.storage, storage)
        blocks = self.pool.host_blocks
        self.scheduler = _core.Scheduler(
            [
                _core.GroupSpec(
                    GROUP.num_layers,
                    pool_blocks,
                    layer_block_bytes=GROUP.layer_block_bytes,
                    host_first=blocks.first,
                    host_stride=blocks.stride,
                    num_host_blocks=blocks.count,
                )
            ],
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=len(PROMPT) + 1,
        )
        self.planner = LoadPlanner()
        if rate:
            self.scheduler.remember_step_time([1.0, 0, 0, 0, 0, 0.001])
            self.planner.note_read(GROUP.block_bytes, BLOCK / rate, now_s=time.monotonic())
        self.spec = TierSpec(
            backend=None, directory="/", prefetch_threshold=BLOCK, prefetch_timeout_base_s=10 * TIMEOUT_S
        )
        self.levels = Levels(
            [
                Level("host", SealedBackend(self.pins.guarded, KEYS.fingerprint)),
                Level("storage", SealedBackend(GuardedMedium(self.storage, Breaker()), KEYS.fingerprint)),
            ]
        )
        reach = HostReach([self.pool.tensor])
        self.loader = Loader(StoredBlocks(self.levels, KEYS), reach, self.owner.wake)
        self.loads = Loads(
            self.spec,
            self.scheduler,
            self.loader,
            self.planner,
            groups=[GROUP],
            reach=reach,
            max_num_seqs=2,
            host=self.pins,
        )

    def put(self, medium: HostMedium | SlowToFind, indices: Sequence[int]) -> None:
        backend = SealedBackend(GuardedMedium(medium, Breaker()), KEYS.fingerprint)
        names = [NAMES[i] for i in indices]
        blocks = [memoryview(np.full(GROUP.block_bytes, 1 + i, np.uint8)) for i in indices]
        assert backend.put(names, blocks, time.monotonic() + TIMEOUT_S) == [Status.OK] * len(names)

    def ask(self, request_id: int = 1, prompt: npt.NDArray[np.int32] = PROMPT, max_tokens: int = 1) -> None:
        self.scheduler.add_request(request_id, prompt, max_tokens, 0, np.zeros(0, np.int32), b"", False)
        self.loads.consider(request_id)

    def until(self, holds: Callable[[], bool]) -> None:
        """Take over what storage has done until this holds."""
        self.owner.until(holds, self.loads.apply)

    def go_on(self) -> None:
        """Let storage answer, until no prompt waits for it."""
        self.storage.let_answer()
        self.until(lambda: not self.loads.is_reading)

    def step(self) -> dict[int, int]:
        """Run a step, and return the tokens that requests found which began with it."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        self.loads.apply()
        return dict(zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True))

    def pinned(self) -> list[int]:
        return [chunk for chunk, by in enumerate(self.medium._memory.pinned_by(range(self.medium.num_chunks))) if by]

    def finish(self) -> None:
        """Run what is left; then no pin must be."""
        while self.scheduler.has_work():
            self.step()
        self.scheduler.reset_prefix_cache()
        self.pins.before_step(self.scheduler)
        assert not self.pinned()
        self.scheduler.check_invariants()
        self.medium._memory.check_invariants(time.monotonic() + TIMEOUT_S)

    def close(self) -> None:
        self.loads.close()
        self.loader.close()
        self.storage.let_answer()
        self.loader.join(TIMEOUT_S)
        self.pins.close()
        assert not self.pinned()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Return a scene with the arguments that a test has for it."""
    with closing(Scene(**request.param)) as scene:
        yield scene


def with_scene(**arguments: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [arguments], indirect=True, ids=[""])


@with_scene(host=ALL)
def test_what_host_memory_has_is_used_there(scene: Scene) -> None:
    scene.ask()
    scene.go_on()
    assert scene.step() == {1: NUM_BLOCKS * BLOCK}
    assert len(scene.pinned()) == NUM_BLOCKS
    assert (scene.loads.loaded_blocks, scene.loads.loaded_bytes) == (NUM_BLOCKS, 0)
    assert scene.levels.levels[0].gets[Status.OK] == NUM_BLOCKS
    assert scene.scheduler.stats().groups[0].host_cached == NUM_BLOCKS
    assert not scene.pool.tensor[: (NUM_BLOCKS + 4) * GROUP.block_bytes].any()
    scene.finish()


@with_scene(host=[*range(4), 7], storage=[4, 5, 6, 8, 9])
def test_what_only_storage_has_is_copied(scene: Scene) -> None:
    scene.ask()
    scene.go_on()
    assert scene.step() == {1: NUM_BLOCKS * BLOCK}
    assert len(scene.pinned()) == 5
    assert (scene.loads.loaded_blocks, scene.loads.loaded_bytes) == (NUM_BLOCKS, 5 * GROUP.block_bytes)
    assert set(scene.pool.tensor.tolist()) == {0, *(1 + i for i in (4, 5, 6, 8, 9))}
    scene.finish()


@with_scene(host=range(5, NUM_BLOCKS))
def test_pins_of_blocks_behind_a_gap_are_given_back(scene: Scene) -> None:
    scene.ask()
    scene.go_on()
    assert not scene.pinned()
    assert scene.step() == {1: 0}
    scene.finish()


@with_scene(host=ALL)
def test_two_prompts_that_begin_alike_pin_their_blocks_once(scene: Scene) -> None:
    scene.ask(1)
    scene.ask(2)
    scene.go_on()
    assert scene.step() == {1: NUM_BLOCKS * BLOCK, 2: NUM_BLOCKS * BLOCK}
    assert scene.loads.num_loads == 1
    assert len(scene.pinned()) == NUM_BLOCKS
    scene.finish()


@with_scene(host=range(5), storage=range(5, NUM_BLOCKS))
@pytest.mark.parametrize("ends", ["request", "tier", "deadline"])
def test_a_search_that_is_given_up_keeps_no_pin(scene: Scene, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has pinned blocks by then, and goes on asking storage."""
    clock = Clock(time.monotonic())
    monkeypatch.setattr("swiftkv.tier.loads.time", clock)
    scene.ask()
    assert scene.storage.is_asked.wait(TIMEOUT_S)
    assert len(scene.pinned()) == 5
    if ends == "request":
        scene.scheduler.abort(np.array([1], np.uint64))
        scene.loads.forget(1)
    elif ends == "tier":
        scene.loads.close()
    else:
        clock.now_s += 20 * TIMEOUT_S
        scene.loads.apply()
    assert not scene.pinned()
    scene.storage.let_answer()
    scene.until(lambda: not scene.loads.is_reading)
    scene.finish()


@with_scene(host=ALL)
@pytest.mark.parametrize("ends", ["request", "tier"])
def test_a_search_that_was_given_up_before_it_pinned_keeps_no_pin(
    scene: Scene, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = scene.medium.pin

    def pin_late(keys: Sequence[bytes], num_bytes: int, deadline_s: float) -> list[int]:
        scene.storage.wait()
        return pin(keys, num_bytes, deadline_s)

    monkeypatch.setattr(scene.medium, "pin", pin_late)
    scene.ask()
    assert scene.storage.is_asked.wait(TIMEOUT_S)
    scene.scheduler.abort(np.array([1], np.uint64))
    scene.loads.forget(1)
    if ends == "tier":
        scene.loads.close()
        scene.loader.close()
        scene.pins.close()
    count = scene.owner.count
    scene.storage.let_answer()
    scene.owner.wait_for_more(count)
    assert not scene.pinned()


@with_scene(host=range(2), storage=range(2, NUM_BLOCKS), pool_blocks=NUM_BLOCKS + 1)
@pytest.mark.parametrize("ends", ["request", "tier", "deadline", "room"])
def test_a_prompt_that_waits_for_room_keeps_its_pins_until_then(
    scene: Scene, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has most of the pool."""
    clock = Clock(time.monotonic())
    monkeypatch.setattr("swiftkv.tier.loads.time", clock)
    scene.scheduler.add_request(7, PROMPT[1:130], 4, 0, np.zeros(0, np.int32), b"", False)
    for _ in range(3):
        scene.step()
    scene.ask()
    scene.storage.let_answer()
    scene.until(lambda: not isinstance(scene.loads._waits[1].state, _Searching))
    assert (scene.loads.num_waiting, scene.loads.num_loads, len(scene.pinned())) == (1, 0, 2)
    if ends == "request":
        scene.scheduler.abort(np.array([1], np.uint64))
        scene.loads.forget(1)
    elif ends == "tier":
        scene.loads.close()
    elif ends == "deadline":
        clock.now_s += 20 * TIMEOUT_S
        scene.loads.apply()
    else:
        scene.scheduler.abort(np.array([7], np.uint64))
        scene.go_on()
        assert scene.loads.num_loads == 1
    assert len(scene.pinned()) == (2 if ends == "room" else 0)
    scene.finish()


@with_scene(host=ALL)
def test_a_corrupt_block_is_dropped_and_what_follows_it_not_used(scene: Scene) -> None:
    memory = scene.medium.memory
    for chunk in range(scene.medium.num_chunks):
        begin = scene.medium.chunks_offset_bytes + chunk * GROUP.block_bytes
        if memory[begin] == 1 + 6:
            memory[begin + 5] ^= 1
    scene.ask()
    scene.go_on()
    assert scene.loads.why_less[1] == "corrupt"
    assert scene.step() == {1: 6 * BLOCK}
    scene.pins.before_step(scene.scheduler)
    assert len(scene.pinned()) == 6
    assert scene.loads.failures == {Status.CORRUPT: 1}
    assert scene.medium.exists(NAMES, time.monotonic() + TIMEOUT_S) == [i != 6 for i in ALL]
    scene.finish()


@with_scene(host=ALL)
def test_a_request_that_ends_while_its_blocks_are_verified_leaves_no_pin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others overwrite the blocks while they are verified, which does not count as corrupt."""

    def verify_late(*arguments: Any) -> Status:
        scene.storage.wait()
        return verify(*arguments)

    monkeypatch.setattr("swiftkv.tier.host_pins.verify", verify_late)
    scene.ask()
    assert scene.storage.is_asked.wait(TIMEOUT_S)
    assert len(scene.pinned()) == NUM_BLOCKS
    scene.scheduler.abort(np.array([1], np.uint64))
    scene.loads.forget(1)
    assert not scene.pinned()
    scene.medium.memory[scene.medium.chunks_offset_bytes + NUM_BLOCKS * GROUP.block_bytes - 1] ^= 1
    scene.go_on()
    scene.ask(2)
    scene.go_on()
    assert scene.loads.failures == {Status.CORRUPT: 1}  # of the second search
    scene.step()
    scene.finish()


@with_scene(host=ALL)
def test_blocks_whose_room_others_want_are_let_go_of(scene: Scene) -> None:
    scene.ask()
    scene.go_on()
    scene.step()
    scene.pins.before_step(scene.scheduler)
    assert len(scene.pinned()) == NUM_BLOCKS
    num_more = scene.medium.num_chunks
    backend = SealedBackend(GuardedMedium(scene.writer, Breaker()), KEYS.fingerprint)
    names = [KEYS.of(bytes([*number.to_bytes(4, "little"), *bytes(28)]), 0) for number in range(num_more)]
    backend.put(names, [memoryview(bytes(GROUP.block_bytes))] * num_more, time.monotonic() + TIMEOUT_S)
    assert len(scene.pinned()) == NUM_BLOCKS
    scene.pins.before_step(scene.scheduler)
    assert not scene.pinned()
    backend.put(names, [memoryview(bytes(GROUP.block_bytes))] * num_more, time.monotonic() + TIMEOUT_S)
    assert not any(scene.medium.exists(NAMES, time.monotonic() + TIMEOUT_S))
    scene.finish()


@with_scene(host=ALL, rate=0.01)
def test_blocks_that_need_no_copy_are_used_however_slow_storage_is(scene: Scene) -> None:
    rate_before = scene.planner._read.seconds_for(1)
    scene.ask()
    scene.go_on()
    assert scene.step() == {1: NUM_BLOCKS * BLOCK}
    assert scene.planner._read.seconds_for(1) == rate_before
    assert (scene.loads.num_declined, scene.loads.num_late) == (0, 0)
    scene.finish()


@with_scene(host=range(4), storage=range(4, NUM_BLOCKS), rate=0.01)
def test_of_a_prompt_that_is_not_worth_copying_the_front_is_used_in_host_memory(scene: Scene) -> None:
    scene.ask()
    scene.go_on()
    assert scene.loads.num_declined == 1
    assert scene.step() == {1: 4 * BLOCK}
    assert (scene.loads.loaded_blocks, scene.loads.loaded_bytes) == (4, 0)
    scene.finish()


@with_scene(host=range(4), storage=range(4, NUM_BLOCKS), rate=2.0)
def test_only_copies_count_against_computing(scene: Scene) -> None:
    """The six blocks that are copied take the time to compute three."""
    chooser = LoadChooser(scene.spec, scene.scheduler, scene.planner, groups=[GROUP], num_ranks=1)
    scene.scheduler.add_request(1, PROMPT, 1, 0, np.zeros(0, np.int32), b"", False)
    pinned = np.array([0, 1, 2, 3, *[-1] * 6], np.int32)

    def choice(queued_blocks: int) -> Stretch | None:
        return chooser.choose(
            WaitingPrompt(1, NUM_BLOCKS, 0),
            np.ones(NUM_BLOCKS, np.uint8),
            pinned,
            reading_bytes=queued_blocks * GROUP.block_bytes,
            may_compute=True,
            now_s=time.monotonic(),
        ).stretch

    assert choice(queued_blocks=5) == Stretch(0, NUM_BLOCKS)
    assert choice(queued_blocks=7) == Stretch(0, 4)
    scene.scheduler.abort(np.array([1], np.uint64))
