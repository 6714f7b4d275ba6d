"""Engines whose steps copy blocks from host memory into the pool, layer by layer, because they attend to none there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from msgspec.structs import replace

from swiftkv.engine.messages import AttachStorage, CacheCommand, CacheReport, DetachStorage
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.step import EngineStep
from swiftkv.lease.messages import Accept, LendingSpec, LinkGeometry, Offer
from swiftkv.master.layer_stream import runs_of
from swiftkv.models.registry import read_config
from swiftkv.storage.host_medium import HostMedium
from tests.engine.engine_process import EngineProcess, tokens, wait_until_stored
from tests.engine.test_engine_lending import identity_of
from tests.engine.tiered_engine import (
    BLOCK,
    CACHED,
    OPTIONS,
    PROMPTS,
    Client,
    change,
    check,
    engine,
    fill,
    host_memory,
    pinned_chunks,
    prompt,
    right_answers,
    spec,
    spoil,
)
from tests.support.checkpoints import make_checkpoint
from tests.support.lender import Lender, mapped_inodes
from tests.support.lender import host_memory as memory_of
from tests.support.lender_by_hand import LenderByHand, borrowing_over
from tests.support.node_process import wait_for
from tests.support.storage import TIMEOUT_S, StuckMedium, dynamic_options

TURNS = [[*p, 7, 8, 9] for p in PROMPTS]


class NotingRunner(ModelRunner):
    """A runner that notes the blocks that its steps copy."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.host_source is not None
        self.steps: list[Counter[int]] = []
        """The number of blocks that each step with copies loads, by link."""

    def forward(self, plan: EngineStep) -> torch.Tensor:
        hidden = super().forward(plan)
        loaded: Counter[int] = Counter()
        for _, kind, buffer, runs in runs_of(plan, len(self.group_specs)):
            if kind == "load" and buffer == 0:
                for link, _, _, count, _ in runs.tolist():
                    loaded[link] += count
        if loaded:
            self.steps.append(loaded)
        return hidden

    def num_loaded(self, link: int = 0) -> int:
        """Return how many blocks all steps have loaded over a link. Without lenders, link 0 is host memory."""
        return sum(step[link] for step in self.steps)


class MovingRunner(NotingRunner):
    """A runner whose pool has no place for host memory beside it, like one on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swiftkv.cache.pool.place_beside", lambda *_: None)
            super().__init__(*arguments)
        assert self.pool.host_blocks is None


@dataclass(frozen=True, slots=True)
class Mover:
    """A model, and the runner that has steps copy the blocks of some of its KV groups, or of all."""

    checkpoint: Path
    runner: type[NotingRunner]

    def moved_blocks(self) -> int:
        """Return how many blocks steps copy for the histories of `PROMPTS`."""
        num_blocks = 0
        for group in read_config(self.checkpoint).kv_groups(BLOCK, "float32"):
            if group.kind == "window":
                num_blocks += len(CACHED) * group.tail_blocks
            elif self.runner is MovingRunner:
                num_blocks += sum(CACHED) // BLOCK
        return num_blocks

    def pool_bytes(self, num_blocks: int) -> int:
        """Return the size of a pool with so many blocks of each KV group."""
        return num_blocks * sum(g.block_bytes for g in read_config(self.checkpoint).kv_groups(BLOCK, "float32"))

    @contextmanager
    def engine(self, host_fd: int, **options: Any) -> Iterator[Client]:
        """Run an engine with tiers; in the end nothing is pinned in host memory."""
        options = {"storage": spec(host_fd), **options}
        with engine(self.checkpoint, self.runner, **options) as client:
            yield client
            client.wait_for_rest()
            client.forget_all()
            wait_for("pins to be given back", lambda: not pinned_chunks(host_fd))
        check(host_fd)


def runner_of(client: Client) -> NotingRunner:
    assert isinstance(client.runner, NotingRunner)
    return client.runner


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dense model, and hybrids with as many layers of one kind as of the other, by architecture."""
    directory = tmp_path_factory.mktemp("moves")
    for arch in ("llama", "gemma2", "gpt_oss"):
        make_checkpoint(directory / arch, arch, num_hidden_layers=4)
    return {arch: directory / arch for arch in ("llama", "gemma2", "gpt_oss")}


MOVERS = {
    "dense": ("llama", MovingRunner),
    "windows": ("gemma2", NotingRunner),
    "windows with sinks": ("gpt_oss", NotingRunner),
    "both groups": ("gemma2", MovingRunner),
}


@pytest.fixture(params=MOVERS)
def mover(models: dict[str, Path], request: pytest.FixtureRequest) -> Mover:
    arch, runner = MOVERS[request.param]
    return Mover(models[arch], runner)


@pytest.fixture(scope="module")
def right(models: dict[str, Path]) -> dict[Path, list[list[int]]]:
    """The answers to `TURNS` of engines without tiers."""
    return {path: right_answers(path, TURNS) for path in models.values()}


@pytest.fixture
def host_fd(mover: Mover) -> Iterator[int]:
    with host_memory(mover.checkpoint) as fd:
        yield fd


IN_STEP_AND_AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in step", "a step ahead"])


@IN_STEP_AND_AHEAD
def test_steps_copy_blocks_into_the_pool(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], ahead: bool
) -> None:
    """All that steps can attend to in host memory stays there, and is pinned."""
    fill(mover.checkpoint, host_fd)
    with mover.engine(host_fd, async_scheduling=ahead) as client:
        found = client.generate(TURNS)
        stats = client.wait_for_rest()
        num_steps = len(runner_of(client).steps)
        num_attended = 0 if mover.runner is MovingRunner else sum(CACHED) // BLOCK
        wait_for("pins to be given back", lambda: len(pinned_chunks(host_fd)) == num_attended)
        again = client.generate(TURNS)
        assert len(runner_of(client).steps) == num_steps
        assert runner_of(client).num_loaded() == mover.moved_blocks()
    assert [answer.hit_tokens["host"] for answer in found] == CACHED
    in_host = CACHED if num_attended else [0] * len(CACHED)  # the others lie in the pool now
    assert [answer.hit_tokens.get("host", 0) for answer in again] == in_host
    assert [answer.cached_tokens for answer in again] == CACHED
    assert tokens(found) == tokens(again) == right[mover.checkpoint]
    assert stats.tier is not None
    assert stats.tier.loaded_bytes_total == mover.moved_blocks() * HostMedium.of(host_fd, 63).chunk_bytes
    assert not stats.tier.failures_total
    assert stats.layer_stream_load is not None
    assert sum(stats.layer_stream_load.counts) == num_steps > 0


@IN_STEP_AND_AHEAD
def test_blocks_are_copied_anew_after_the_cache_is_emptied(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], ahead: bool
) -> None:
    fill(mover.checkpoint, host_fd)
    with mover.engine(host_fd, async_scheduling=ahead) as client:
        for _ in range(3):
            found = client.generate(TURNS)
            assert [answer.hit_tokens["host"] for answer in found] == CACHED
            assert tokens(found) == right[mover.checkpoint]
            client.forget_all()
        assert runner_of(client).num_loaded() == 3 * mover.moved_blocks()


@IN_STEP_AND_AHEAD
def test_a_copy_that_fails_only_costs_its_step(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], ahead: bool
) -> None:
    fill(mover.checkpoint, host_fd)
    with mover.engine(host_fd, async_scheduling=ahead) as client:
        transport = runner_of(client).transport
        assert transport is not None
        transport.detach(0)  # that of host memory
        assert tokens(client.generate(TURNS)) == right[mover.checkpoint]
        assert not runner_of(client).steps


@IN_STEP_AND_AHEAD
def test_emptying_the_cache_while_blocks_are_on_their_way_changes_no_answer(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], ahead: bool
) -> None:
    fill(mover.checkpoint, host_fd)
    with mover.engine(host_fd, async_scheduling=ahead) as client:
        for round_ in range(4):
            request_ids = [client.add(turn) for turn in TURNS]
            for call in range(5):
                client.send(CacheCommand(10 * round_ + call + 2, clear=True))
                while not isinstance(message := client.receive(), CacheReport):
                    client.take(message)
            assert tokens(client.wait(request_ids)) == right[mover.checkpoint]


@IN_STEP_AND_AHEAD
@pytest.mark.parametrize("shares_extents", [False, True], ids=["apart", "shared"])
def test_blocks_come_up_one_after_the_other_where_room_is_short(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], shares_extents: bool, ahead: bool
) -> None:
    """The pool has not room for both histories, and other requests take a part of it."""
    fill(mover.checkpoint, host_fd)
    short = [prompt(20, seed) for seed in range(10, 14)]
    expected = [*right[mover.checkpoint], *right_answers(mover.checkpoint, short)]
    options = {"shares_extents": shares_extents and mover.checkpoint.name != "llama", "async_scheduling": ahead}
    with mover.engine(host_fd, kv_bytes=mover.pool_bytes(33), **options) as client:
        for _ in range(3):
            assert tokens(client.generate([*TURNS, *short])) == expected
        stats = client.wait_for_rest()
        assert stats.num_used_blocks == 0
        assert runner_of(client).num_loaded() >= mover.moved_blocks()


def test_a_corrupt_block_is_never_served(mover: Mover, host_fd: int, right: dict[Path, list[list[int]]]) -> None:
    fill(mover.checkpoint, host_fd)
    spoil(host_fd)
    with mover.engine(host_fd) as client:
        found = client.generate(TURNS)
        stats = client.wait_for_rest()
        assert tokens(found) == right[mover.checkpoint]
        assert stats.tier is not None
        assert stats.tier.failures_total["get corrupt"] > 0
        assert sum(answer.hit_tokens["host"] for answer in found) < sum(CACHED)
        wait_until_stored(client)
    with mover.engine(host_fd) as client:  # the corrupt ones were dropped, and written again
        found = client.generate(TURNS)
        assert tokens(found) == right[mover.checkpoint]
        assert [answer.hit_tokens["host"] for answer in found] == CACHED


def test_pins_of_an_engine_that_is_killed_end_with_its_restart(models: dict[str, Path], tmp_path: Path) -> None:
    """It is killed while a prompt waits for storage, with pins on blocks that a step would have copied."""
    checkpoint = models["gemma2"]
    hangs = {"backend": "fault", "inner": file_backend(tmp_path), "hang": 1.0, "hang_time": "120s"}
    longer = [*PROMPTS[0], *prompt(64, 3)]
    with host_memory(checkpoint) as host_fd:
        fill(checkpoint, host_fd)
        with EngineProcess(checkpoint, storage=replace(spec(host_fd, 1), backend=hangs), **OPTIONS) as process:
            process.add(longer)
            wait_for("windows to be pinned", lambda: len(pinned_chunks(host_fd)) > CACHED[0] // BLOCK)
            process.process.kill()
            process.process.wait()
        assert set(pinned_chunks(host_fd).values()) == {1 << 1}
        with EngineProcess(checkpoint, storage=spec(host_fd, 1), has_served=True, **OPTIONS) as process:
            assert not pinned_chunks(host_fd)
            found = process.generate([longer])
            assert found[0].hit_tokens["host"] == CACHED[0]
            process.wait_for_rest()
        assert tokens(found) == right_answers(checkpoint, [longer])
        assert not pinned_chunks(host_fd)
        check(host_fd)


def file_backend(directory: Path) -> dict[str, Any]:
    return {"backend": "file", "path": str(directory / "kv"), "size": 1 << 30, "min_free": 0}


class SlowToFind(StuckMedium):
    """A medium that does not answer what it has, either, while a test holds it."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        self.is_asked.set()
        assert self.may_read.wait(2 * TIMEOUT_S)
        return super().exists(keys, deadline_s)


def test_storage_comes_and_goes_while_a_search_has_pinned_blocks(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]]
) -> None:
    fill(mover.checkpoint, host_fd, prompts=[PROMPTS[0][:161]])
    found_late = dynamic_options(SlowToFind, name=mover.checkpoint.name)
    with mover.engine(host_fd, storage=replace(spec(host_fd), backend=found_late)) as client:
        with SlowToFind.stuck():
            held = [client.add(turn) for turn in TURNS]
            assert SlowToFind.is_asked.wait(TIMEOUT_S)
            wait_for("blocks to be pinned", lambda: pinned_chunks(host_fd))
            change(client, DetachStorage(1))
            assert tokens(client.wait(held)) == right[mover.checkpoint]
        change(client, AttachStorage(2, spec(host_fd)))
        wait_until_stored(client)
        client.forget_all()
        found = client.generate(TURNS)
        assert tokens(found) == right[mover.checkpoint]
        assert found[0].hit_tokens["host"] >= 160


@IN_STEP_AND_AHEAD
def test_what_is_written_back_is_copied_back(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], ahead: bool
) -> None:
    """Nothing is written before it leaves the pool, which has not room for the others as well."""
    storage = spec(host_fd, write_policy="write_back")
    options: dict[str, Any] = {"storage": storage, "async_scheduling": ahead}
    with mover.engine(host_fd, kv_bytes=mover.pool_bytes(48), **options) as client:
        client.generate(PROMPTS[:1])
        wait_until_stored(client)
        assert client.stats is not None
        assert client.stats.tier is not None
        assert client.stats.tier.stored_blocks_total == 0
        for seed in range(10, 20):
            client.generate([prompt(100, seed)])
        wait_until_stored(client)
        found = client.generate(TURNS[:1])
        assert found[0].cached_tokens == CACHED[0]
        assert found[0].hit_tokens["host"] > 0
        assert tokens(found) == right[mover.checkpoint][:1]
        assert runner_of(client).num_loaded() > 0


def test_selective_writing_brings_back_what_is_to_last(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]]
) -> None:
    storage = spec(host_fd, write_policy="write_through_selective")
    with mover.engine(host_fd, storage=storage) as client:
        for p, is_to_last in zip(PROMPTS, (True, False), strict=True):
            client.wait([client.add(p, is_to_last=is_to_last)])
        wait_until_stored(client)
    with mover.engine(host_fd, storage=storage) as client:
        found = client.generate(TURNS)
        assert [answer.hit_tokens["host"] for answer in found] == [CACHED[0], 0]
        assert tokens(found) == right[mover.checkpoint]
        assert runner_of(client).num_loaded() > 0


NUM_EXTENTS = 64


def lending_to(checkpoint: Path, directory: Path) -> LendingSpec:
    """Return the spec of an engine that borrows blocks of full attention, one an extent."""
    groups = read_config(checkpoint).kv_groups(BLOCK, "float32")
    full = next(i for i, group in enumerate(groups) if group.kind != "window")
    link = LinkGeometry(0, full, 1, 1, groups[full].block_bytes, NUM_EXTENTS, 0, 1)
    return borrowing_over(link, directory)


@IN_STEP_AND_AHEAD
@pytest.mark.parametrize("mover", ["dense", "windows", "windows with sinks"], indirect=True)
def test_an_engine_that_borrows_copies_from_host_memory(
    mover: Mover, host_fd: int, right: dict[Path, list[list[int]]], tmp_path: Path, ahead: bool
) -> None:
    """A long answer has blocks in lent memory when a history comes up. The last link is host memory."""
    fill(mover.checkpoint, host_fd)
    long, others = prompt(180, 20), [prompt(180, seed) for seed in (21, 22)]
    expected = [*right[mover.checkpoint][1:], *right_answers(mover.checkpoint, [long], max_tokens=200)]
    lending = lending_to(mover.checkpoint, tmp_path)
    options: dict[str, Any] = {"kv_bytes": mover.pool_bytes(34), "lending": lending, "async_scheduling": ahead}
    with mover.engine(host_fd, **options) as client, lent(lending, tmp_path) as process:
        runner = runner_of(client)
        with client.at_once():
            streamed = client.add(long, max_tokens=200)
            crowd = [client.add(p) for p in others]
        client.wait(crowd)
        request_ids = [client.add(TURNS[1]), streamed]
        found = client.wait(request_ids)
        assert tokens(found) == expected
        assert found[0].hit_tokens["host"] > 0
        assert runner.num_loaded(0) > 0
        assert runner.num_loaded(1) > 0
        if mover.runner is not MovingRunner:  # others have no room before it ends
            assert any(step[0] and step[1] for step in runner.steps)
        inode = memory_of(process.handles[0]).inode
        process.pools.clear()
        process.kill()
        wait_for("its pool to be let go of", lambda: inode not in mapped_inodes(os.getpid()))
        client.forget_all()
        runner.steps.clear()
        again = [client.generate([turn])[0] for turn in TURNS]
        assert [answer.hit_tokens["host"] for answer in again] == CACHED
        assert tokens(again) == right[mover.checkpoint]
        assert runner.num_loaded(0) == 0
        assert runner.num_loaded(1) == mover.moved_blocks()


@contextmanager
def lent(lending: LendingSpec, directory: Path) -> Iterator[Lender]:
    """Lend all extents to an engine, from a process that serves no model."""
    (peer,) = lending.lenders
    num_bytes = NUM_EXTENTS * peer.links[0].extent_bytes
    with (
        zmq.Context() as context,
        Lender([directory / "store"], num_bytes, serve=False) as process,
        closing(LenderByHand(peer.leases_address, context)) as lender,
    ):
        lender.be_attached(identity_of(process), directory / "store")
        lender.say(Offer, [*range(NUM_EXTENTS)], [1] * NUM_EXTENTS)
        lender.receive(Accept)
        yield process
