"""Engines whose steps attend to blocks in the host memory that they share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swiftkv.engine.engine import Engine
from swiftkv.engine.messages import AttachStorage, CacheCommand, CacheReport, DetachStorage
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.tier import StorageTier
from swiftkv.models.registry import read_config
from swiftkv.shared_memory import map_memory
from swiftkv.storage.host_medium import HostMedium, make_host_memory
from swiftkv.tier.host_pins import HostPins
from swiftkv.tier.messages import TierSpec
from tests.engine.engine_process import Answer, EngineProcess
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

BLOCK = 16
HOST_BYTES = 16 << 20
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
TIMEOUT_S = 60.0


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


PROMPTS = [prompt(300, 1), prompt(260, 2)]
CACHED = [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("host")
    for arch in ("llama", "gemma3"):
        make_checkpoint(directory / arch, arch)
    return {arch: directory / arch for arch in ("llama", "gemma3")}


@pytest.fixture(params=["llama", "gemma3"], ids=["dense", "hybrid"])
def checkpoint(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return checkpoints[request.param]


@pytest.fixture
def dense(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@contextmanager
def host_memory(checkpoint: Path, num_chunks: int | None = None) -> Iterator[int]:
    """Make host memory whose chunks are blocks of this model."""
    groups = read_config(checkpoint).kv_groups(BLOCK, "float32")
    chunk_bytes = min(group.block_bytes for group in groups if group.kind != "window")
    fd = make_host_memory(HOST_BYTES if num_chunks is None else bytes_for(num_chunks, chunk_bytes), chunk_bytes)
    yield fd
    os.close(fd)


def bytes_for(num_chunks: int, chunk_bytes: int) -> int:
    """Return the size of a memory with so many chunks."""
    num_bytes = num_chunks * chunk_bytes
    while True:
        fd = make_host_memory(num_bytes, chunk_bytes)
        found = HostMedium.of(fd).num_chunks
        os.close(fd)
        if found >= num_chunks:
            return num_bytes
        num_bytes += 4096


@pytest.fixture
def host_fd(checkpoint: Path) -> Iterator[int]:
    with host_memory(checkpoint) as fd:
        yield fd


def spec(host_fd: int, member: int = 0, **options: Any) -> TierSpec:
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": BLOCK, **options}
    return TierSpec(None, "/", host_fd=host_fd, host_member=member, **options)


class CopyingRunner(ModelRunner):
    """A runner that attends to nothing in host memory."""

    def __init__(self, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swiftkv.engine.runner._host_memory", lambda config: None)
            super().__init__(*arguments)
        assert self.pool.host_blocks is None


class Client(EngineThread[ModelRunner]):
    """An engine whose inner state a test sees."""

    engine: Engine

    def prepare(self, engine: Engine) -> None:
        self.engine = engine

    def host_blocks(self) -> tuple[int, int]:
        """Return how many blocks in host memory are in use and cached."""
        attended = self.engine._runner.pool.host_blocks
        assert attended is not None
        group = self.engine._scheduler.stats().groups[attended.group]
        assert not group.host_loading
        return group.host_used, group.host_cached

    def clear_cache(self) -> None:
        """Empty the prefix cache, and wait until no block is in use in host memory, and none cached."""
        self.send(CacheCommand(1, clear=True))
        while not isinstance(message := self.receive(), CacheReport):
            self.take(message)
        until(lambda: self.host_blocks() == (0, 0))


@contextmanager
def engine(checkpoint: Path, runner: type[ModelRunner] = ModelRunner, **options: Any) -> Iterator[Client]:
    client = Client(checkpoint, runner, **{**OPTIONS, **options})
    with client.running():
        yield client


def tokens(found: Sequence[Answer]) -> list[list[int]]:
    assert all(answer.error is None for answer in found)
    return [answer.token_ids for answer in found]


def wait_until_stored(client: Client | EngineProcess) -> None:
    client.wait_for_rest()
    while client.stats is not None and client.stats.tier is not None and client.stats.tier.num_to_store:
        client.take_one()


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def right_answers(checkpoint: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    with engine(checkpoint) as client:
        return tokens(client.generate(prompts))


def fill(checkpoint: Path, host_fd: int, member: int = 0) -> None:
    """Have an engine write the prompts to host memory, and end."""
    with engine(checkpoint, storage=spec(host_fd, member)) as client:
        client.generate(PROMPTS)
        wait_until_stored(client)


def pinned_chunks(host_fd: int) -> dict[int, int]:
    """Return the members that pin each pinned chunk, one bit each."""
    medium = HostMedium.of(host_fd, 63)
    by_chunk = enumerate(medium._memory.pinned_by(range(medium.num_chunks)))
    return {chunk: members for chunk, members in by_chunk if members}


def check(host_fd: int) -> None:
    HostMedium.of(host_fd, 63)._memory.check_invariants(time.monotonic() + TIMEOUT_S)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "a step ahead"])
def test_blocks_are_attended_where_they_lie(checkpoint: Path, host_fd: int, ahead: bool) -> None:
    fill(checkpoint, host_fd)
    turns = [[*p, 7, 8, 9] for p in PROMPTS]
    with engine(checkpoint, storage=spec(host_fd), async_scheduling=ahead) as client:
        found = client.generate(turns)
        stats = client.wait_for_rest()
        num_blocks = sum(cached // BLOCK for cached in CACHED)
        assert client.host_blocks() == (0, num_blocks)
        assert len(pinned_chunks(host_fd)) == num_blocks
        again = client.generate(turns)
        assert [answer.hit_tokens["host"] for answer in again] == CACHED
    assert [answer.hit_tokens["host"] for answer in found] == CACHED
    assert tokens(found) == tokens(again) == right_answers(checkpoint, turns)
    assert stats.tier is not None
    copied_bytes = sum(
        min(len(CACHED) * group.tail_blocks, num_blocks) * group.block_bytes
        for group in read_config(checkpoint).kv_groups(BLOCK, "float32")
        if group.kind == "window"
    )
    assert stats.tier.loaded_bytes_total == copied_bytes
    check(host_fd)


@pytest.mark.parametrize("beside_host", [True, False], ids=["with host memory", "without"])
def test_storage_that_is_attached_gets_what_is_attended_in_host_memory(
    checkpoint: Path, host_fd: int, tmp_path: Path, beside_host: bool
) -> None:
    files = {"backend": "file", "path": str(tmp_path), "size": 1 << 30, "min_free": 0}
    fill(checkpoint, host_fd)
    turns = [[*p, 7, 8, 9] for p in PROMPTS]
    with engine(checkpoint, storage=spec(host_fd, 1)) as client:
        found = client.generate(turns)
        assert [answer.hit_tokens["host"] for answer in found] == CACHED
        attached = replace(spec(host_fd, 1), host_fd=host_fd if beside_host else None, backend=files)
        for change in (DetachStorage(1), AttachStorage(2, attached)):
            client.send(change)
            while not client.changes:
                client.take_one()
            assert client.changes.pop().why_not is None
        wait_until_stored(client)
        assert client.host_blocks()[1] > 0
        assert client.stats is not None
        assert client.stats.tier is not None
        assert client.stats.tier.dropped_stores_total == 0
    with engine(checkpoint, storage=replace(spec(host_fd), host_fd=None, backend=files)) as client:
        again = client.generate(turns)
        assert [answer.hit_tokens["storage"] for answer in again] == CACHED
    assert tokens(found) == tokens(again)


def test_engines_share_blocks_with_one_that_copies_them(checkpoint: Path, host_fd: int) -> None:
    turns = [[*p, 7, 8, 9] for p in PROMPTS]
    with (
        engine(checkpoint, storage=spec(host_fd, 1)) as one,
        engine(checkpoint, storage=spec(host_fd, 2)) as two,
        engine(checkpoint, CopyingRunner, storage=spec(host_fd, 3)) as three,
    ):
        one.generate(PROMPTS)
        wait_until_stored(one)
        found = [client.generate(turns) for client in (two, three)]
        assert [answer.hit_tokens["host"] for answers in found for answer in answers] == 2 * CACHED
        assert set(pinned_chunks(host_fd).values()) == {1 << 2}
        one.clear_cache()
        found.append(one.generate(turns))
        assert set(pinned_chunks(host_fd).values()) == {1 << 1 | 1 << 2}
        two.clear_cache()
        until(lambda: set(pinned_chunks(host_fd).values()) == {1 << 1})
        found.append(two.generate(turns))
    right = right_answers(checkpoint, turns)
    assert [tokens(answers) for answers in found] == [right] * 4
    check(host_fd)


def test_a_corrupt_block_is_computed_again(dense: Path) -> None:
    with host_memory(dense) as host_fd:
        fill(dense, host_fd)
        medium = HostMedium.of(host_fd, 63)
        memory = map_memory(host_fd, HOST_BYTES)
        written = [
            chunk
            for chunk in range(medium.num_chunks)
            if any(memory[medium.chunks_offset_bytes + chunk * medium.chunk_bytes :][: medium.chunk_bytes])
        ]
        for chunk in written[5::7]:
            memory[medium.chunks_offset_bytes + chunk * medium.chunk_bytes + 100] ^= 1
        with engine(dense, storage=spec(host_fd)) as client:
            found = client.generate(PROMPTS)
            stats = client.wait_for_rest()
            assert tokens(found) == right_answers(dense, PROMPTS)
            assert stats.tier is not None
            assert stats.tier.failures_total["get corrupt"] > 0
            assert 0 < sum(answer.hit_tokens["host"] for answer in found) < sum(CACHED)
            wait_until_stored(client)
        with engine(dense, storage=spec(host_fd)) as client:  # the corrupt ones were dropped, and written again
            assert [answer.hit_tokens["host"] for answer in client.generate(PROMPTS)] == CACHED
        check(host_fd)


def test_an_engine_lets_go_of_blocks_whose_room_another_wants(dense: Path) -> None:
    """One prompt's blocks are pinned, and take most of the memory. Then the other's are to be written."""
    with host_memory(dense, num_chunks=30) as host_fd:
        with engine(dense, storage=spec(host_fd)) as client:
            client.generate(PROMPTS[:1])
            wait_until_stored(client)
        with (
            engine(dense, storage=spec(host_fd, 1)) as one,
            engine(dense, storage=spec(host_fd, 2)) as two,
        ):
            [answer] = one.generate(PROMPTS[:1])
            assert answer.hit_tokens["host"] == CACHED[0]
            one.wait_for_rest()
            assert len(pinned_chunks(host_fd)) == CACHED[0] // BLOCK
            two.generate(PROMPTS[1:])
            wait_until_stored(two)
            until(lambda: not pinned_chunks(host_fd))
            assert one.host_blocks() == (0, 0)
            two.generate([prompt(300, 3)])
            wait_until_stored(two)
            found = one.generate(PROMPTS[:1])
        assert tokens(found) == right_answers(dense, PROMPTS[:1])
        check(host_fd)


def test_an_engine_lets_go_of_blocks_before_it_finds_more(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise blocks that were just found for a prompt would go before the step that uses them."""
    order = []
    for part in (HostPins, StorageTier):

        def noted(self: Any, *arguments: Any, before_step: Callable[..., None] = part.before_step) -> None:
            order.append(type(self))
            before_step(self, *arguments)

        monkeypatch.setattr(part, "before_step", noted)
    with host_memory(dense) as host_fd, engine(dense, storage=spec(host_fd)) as client:
        client.generate(PROMPTS[:1])
    assert order[:4] == [HostPins, StorageTier] * 2


def test_pins_of_a_killed_engine_end_with_its_restart(dense: Path) -> None:
    with host_memory(dense) as host_fd:
        fill(dense, host_fd)
        with EngineProcess(dense, storage=spec(host_fd, 1), **OPTIONS) as process:
            [answer] = process.generate(PROMPTS[:1])
            assert answer.hit_tokens["host"] == CACHED[0]
            process.process.kill()
            process.process.wait()
        assert len(pinned_chunks(host_fd)) == CACHED[0] // BLOCK
        with EngineProcess(dense, storage=spec(host_fd, 1), has_served=True, **OPTIONS) as process:
            assert not pinned_chunks(host_fd)
            found = process.generate(PROMPTS)
            assert [answer.hit_tokens["host"] for answer in found] == CACHED
            process.wait_for_rest()
        assert tokens(found) == right_answers(dense, PROMPTS)
        assert not pinned_chunks(host_fd)  # nor of one that has ended
        check(host_fd)


def test_nothing_stays_pinned_when_the_cache_is_emptied(dense: Path) -> None:
    with host_memory(dense) as host_fd:
        fill(dense, host_fd)
        with engine(dense, storage=spec(host_fd)) as client:
            client.generate(PROMPTS)
            client.clear_cache()
            until(lambda: not pinned_chunks(host_fd))
        check(host_fd)
