"""Engines with storage below their pool: what one wrote the next reads, and no fault of storage changes an answer."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftkv import _cpu
from swiftkv.engine.messages import HIT_TIERS
from swiftkv.engine.runner import ModelRunner
from swiftkv.storage.host_medium import make_host_memory
from swiftkv.tier.messages import TierStats
from tests.engine.engine_process import Answer, EngineClient, EngineProcess, tokens, wait_until_stored
from tests.engine.tiered_engine import BLOCK, OPTIONS, PROMPTS, engine, prompt
from tests.support.checkpoints import make_checkpoint
from tests.support.lanes import LateRunner
from tests.support.storage import StuckMedium, dynamic_options

DENSE_IS_SLOW = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param("llama", id="dense", marks=pytest.mark.slow), pytest.param("gemma3", id="hybrid")],
    indirect=True,
)


def file_backend(directory: Path) -> dict[str, Any]:
    return {"backend": "file", "path": str(directory), "size": 1 << 30, "min_free": 0}


def storage(backend: dict[str, Any], **policy: Any) -> dict[str, Any]:
    policy = {"prefetch_policy": "wait_complete", **policy}  # the clock decides nothing, the planner neither
    return {"backend": backend, "directory": "/", "prefetch_threshold": BLOCK, **policy}


def answers(checkpoint: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    """Return the greedy answers of an engine that is started for them, and shut down afterwards."""
    with engine(checkpoint, **options) as client:
        found = client.generate(prompts)
        wait_until_stored(client)
        return found


def tier_of(client: EngineClient) -> TierStats:
    assert client.stats is not None
    assert client.stats.tier is not None
    return client.stats.tier


def next_turns(first: Sequence[Answer]) -> list[list[int]]:
    """Return the prompts that go on where the answers ended."""
    return [[*p, *answer.token_ids, 7, 8, 9] for p, answer in zip(PROMPTS, first, strict=True)]


ON_HOST_AND_DEVICE = pytest.mark.parametrize("runner", [ModelRunner, LateRunner], ids=["host", "device"])
"""The pool is read and written in place, or reached as one on a device."""


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "a step ahead"])
def test_what_one_engine_wrote_the_next_one_reads(
    checkpoint: Path, tmp_path: Path, ahead: bool, runner: type[ModelRunner]
) -> None:
    spec = storage(file_backend(tmp_path / "kv"))
    first = answers(checkpoint, PROMPTS, storage=spec, async_scheduling=ahead, runner=runner)
    turns = next_turns(first)
    with engine(checkpoint, storage=spec, async_scheduling=ahead, runner=runner) as client:
        second = client.generate(turns)
        stats = client.wait_for_rest()
    assert tokens(second) == tokens(answers(checkpoint, turns))
    # The last token of an answer has no KV, and a block is stored once it is full.
    in_blocks = [(len(p) + len(a.token_ids) - 1) // BLOCK * BLOCK for p, a in zip(PROMPTS, first, strict=True)]
    assert stats.tier is not None
    assert [answer.cached_tokens for answer in second] == in_blocks, stats.tier
    assert stats.tier.hit_tokens_total == sum(answer.cached_tokens or 0 for answer in second)
    assert stats.tier.num_loading == 0
    assert not stats.tier.failures_total
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.fixture
def host_fd() -> Iterator[int]:
    """The descriptor of host memory with room for everything here."""
    fd = make_host_memory(16 << 20, 4096)
    yield fd
    os.close(fd)


@pytest.mark.skipif(_cpu.supported_isa() == "avx2", reason="the processor has one instruction set")
@DENSE_IS_SLOW
def test_blocks_that_were_rounded_in_another_way_are_not_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several machines may share a storage; each answers as it would alone."""
    spec = storage(file_backend(tmp_path / "kv"))
    answers(checkpoint, PROMPTS, storage=spec)
    monkeypatch.setenv("SWIFTKV_CPU_ISA", "avx2")
    for is_stored in (False, True):
        with EngineProcess(checkpoint, max_model_len=OPTIONS["max_model_len"], storage=spec) as client:
            assert [bool(answer.cached_tokens) for answer in client.generate(PROMPTS)] == [is_stored] * len(PROMPTS)
            wait_until_stored(client)


def test_hits_are_told_by_the_tier_that_they_came_from(checkpoint: Path, tmp_path: Path, host_fd: int) -> None:
    """Host memory has 160 tokens, storage has those and 80 more, and the first 96 are computed before any is read."""
    whole = prompt(300, 1)
    file = file_backend(tmp_path / "kv")
    answers(checkpoint, [whole[:160]], storage={**storage(file), "backend": None, "host_fd": host_fd})
    answers(checkpoint, [whole[:240]], storage=storage(file))
    both = {**storage(file, prefetch_threshold=128), "host_fd": host_fd}
    with engine(checkpoint, storage=both) as client:
        first, second, third = (client.generate([p])[0] for p in (whole[:96], whole, [*whole, 5]))
        stats = client.wait_for_rest()
    assert first.hit_tokens == {"local": 0, "peer": 0, "host": 0, "storage": 0}
    assert second.hit_tokens == {"local": 96, "peer": 0, "host": 64, "storage": 80}
    assert third.hit_tokens == {"local": 288, "peer": 0, "host": 0, "storage": 0}
    assert [answer.cached_tokens for answer in (first, second, third)] == [0, 240, 288]
    assert stats.hit_tokens_by_tier() == {"local": 384, "peer": 0, "host": 64, "storage": 80}


def test_totals_by_tier_never_fall(
    checkpoint: Path, tmp_path: Path, host_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics come with every step here. The gateway adds up differences, and would count tokens twice."""
    monkeypatch.setattr("swiftkv.engine.engine._STATS_INTERVAL_S", 0.0)
    spec = {**storage(file_backend(tmp_path / "kv")), "host_fd": host_fd}
    answers(checkpoint, PROMPTS, storage=spec)
    before = dict.fromkeys(HIT_TIERS, 0)
    with engine(checkpoint, storage=spec) as client:
        requests = [client.add(p) for p in PROMPTS]
        while not all(client.answers[request_id].has_ended for request_id in requests):
            client.take_one()
            if client.stats is not None:
                now = client.stats.hit_tokens_by_tier()
                assert all(now[tier] >= before[tier] for tier in HIT_TIERS), (before, now)
                before = now
    assert before == {"local": 0, "peer": 0, "host": 288 + 256, "storage": 0}


def test_a_killed_engine_leaves_what_it_wrote(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    spec = storage(file_backend(tmp_path / "kv"))
    with EngineProcess(checkpoints["llama"], storage=spec) as process:
        first = process.generate([PROMPTS[0]])
        wait_until_stored(process)
        process.process.kill()
        process.process.wait()
    second = answers(checkpoints["llama"], [PROMPTS[0]], storage=spec)
    assert second[0].cached_tokens == 288
    assert tokens(second) == tokens(first)


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize(
    ("arch", "shares_extents", "num_kib"), [("llama", False, 768), ("gemma3", False, 704), ("gemma3", True, 384)]
)
def test_what_leaves_the_pool_comes_back(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    arch: str,
    shares_extents: bool,
    num_kib: int,
    runner: type[ModelRunner],
) -> None:
    """The pool has not room for three of these prompts: 48 blocks of full attention, or of both kinds together."""
    options: dict[str, Any] = {"kv_bytes": num_kib << 10, "shares_extents": shares_extents, "runner": runner}
    with engine(checkpoints[arch], storage=storage(file_backend(tmp_path / "kv")), **options) as client:
        found = [client.generate([p])[0] for p in (*PROMPTS, prompt(400, 3))]
        wait_until_stored(client)
        found += [client.generate([p])[0] for p in PROMPTS]
        stats = client.wait_for_rest()
    assert tokens(found[:2]) == tokens(found[3:])
    assert [answer.cached_tokens for answer in found[3:]] == [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]
    assert stats.tier is not None
    assert stats.tier.hit_tokens_total > 0


def test_others_cannot_find_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Nobody with another salt, other weights, another data type or other blocks."""
    spec = storage(file_backend(tmp_path / "kv"))
    with engine(checkpoints["llama"], storage=spec) as client:
        client.wait([client.add(PROMPTS[0], cache_salt="a")])
        wait_until_stored(client)
    with engine(checkpoints["llama"], storage=spec) as client:
        assert client.wait([client.add(PROMPTS[0], cache_salt="b")])[0].cached_tokens == 0
        assert client.wait([client.add(PROMPTS[0], cache_salt="a")])[0].cached_tokens == 288
    other = tmp_path / "other"
    make_checkpoint(other, "llama", seed=5)
    for options in ({"dtype": "bfloat16"}, {"block_size": 32}):
        with engine(checkpoints["llama"], storage=spec, **options) as client:
            assert client.wait([client.add(PROMPTS[0], cache_salt="a")])[0].cached_tokens == 0
    with engine(other, storage=spec) as client:
        assert client.wait([client.add(PROMPTS[0], cache_salt="a")])[0].cached_tokens == 0


@pytest.mark.parametrize("place", ["host", "storage"])
def test_a_prefix_that_is_stored_up_to_any_block_changes_no_answer(
    checkpoint: Path, tmp_path: Path, host_fd: int, place: str
) -> None:
    """Every number of its blocks is stored once, each under a salt of its own."""
    whole = prompt(300, 1)
    num_blocks = range(1, len(whole) // BLOCK + 1)
    file = storage(file_backend(tmp_path / "kv"), prefetch_threshold=BLOCK, prefetch_policy="wait_complete")
    spec = file if place == "storage" else {**file, "backend": None, "host_fd": host_fd}
    with engine(checkpoint, storage=spec) as client:
        client.wait([client.add([*whole[: n * BLOCK], 5], max_tokens=1, cache_salt=str(n)) for n in num_blocks])
        wait_until_stored(client)
    with engine(checkpoint, storage=spec) as client:
        found = [client.wait([client.add(whole, cache_salt=str(n))])[0] for n in num_blocks]
    right = answers(checkpoint, [whole])
    assert tokens(found) == tokens(right) * len(num_blocks)
    assert [answer.hit_tokens[place] for answer in found] == [n * BLOCK for n in num_blocks]


FAULTS: dict[str, dict[str, Any]] = {
    "fails": {"fail": 1.0},
    "flips": {"flip": 1.0},
    "truncates": {"truncate": 1.0},
    "hangs": {"hang": 1.0, "hang_time": "30s"},
    "is late": {"delay": 1.0, "delay_time": "3s"},
    "does all of it now and then": {"fail": 0.1, "flip": 0.1, "truncate": 0.1, "delay": 0.2, "delay_time": "20ms"},
}


@pytest.mark.parametrize(
    ("fault", "runner"), [*((fault, ModelRunner) for fault in FAULTS), ("hangs", LateRunner), ("fails", LateRunner)]
)
def test_a_storage_that_cannot_be_read_changes_no_answer(
    checkpoint: Path, tmp_path: Path, fault: str, runner: type[ModelRunner]
) -> None:
    """And every block comes back, once storage has let go of it."""
    file = file_backend(tmp_path / "kv")
    first = answers(checkpoint, PROMPTS, storage=storage(file))
    turns = next_turns(first)
    spec = storage(
        {"backend": "fault", "inner": file, **FAULTS[fault]}, prefetch_policy="timeout", prefetch_timeout_base_s=0.2
    )
    with engine(checkpoint, storage=spec, runner=runner) as client:
        second = client.generate(turns)
        stats = client.wait_for_rest()
        assert stats.num_used_blocks == 0
    assert tokens(second) == tokens(answers(checkpoint, turns))
    assert stats.tier is not None
    if max(FAULTS[fault].get(kind, 0.0) for kind in ("fail", "flip", "truncate", "hang", "delay")) == 1.0:
        assert stats.tier.hit_tokens_total == 0


def test_prompts_behind_a_read_that_does_not_come_back_are_computed(checkpoints: dict[str, Path]) -> None:
    """Their loads have no room in the pool together; the read comes back once all are answered."""
    prompts = [prompt(300, seed) for seed in range(8)]
    medium = dynamic_options(StuckMedium, name="behind")
    spec = storage(medium, prefetch_policy="timeout", prefetch_timeout_base_s=1.0)
    first = answers(checkpoints["llama"], prompts, storage=spec)
    with engine(checkpoints["llama"], kv_bytes=1 << 20, storage=spec) as client:
        with StuckMedium.stuck():
            second = client.generate(prompts)
            assert StuckMedium.is_asked.is_set()
            while not tier_of(client).is_degraded:
                client.take_one()
            second += client.generate(prompts[:1])
        stats = client.wait_for_rest()
        while stats.num_free_blocks + stats.num_cached_blocks < stats.num_blocks:
            client.take_one()
            stats = client.wait_for_rest()
        assert not tier_of(client).is_degraded
    assert tokens(second) == tokens([*first, first[0]])


def test_a_storage_that_spoils_what_is_written_changes_no_answer(checkpoint: Path, tmp_path: Path) -> None:
    file = file_backend(tmp_path / "kv")
    spoils = {"backend": "fault", "inner": file, "flip": 0.5, "truncate": 0.5}
    first = answers(checkpoint, PROMPTS, storage=storage(spoils))
    turns = next_turns(first)
    with engine(checkpoint, storage=storage(file)) as client:
        second = client.generate(turns)
        stats = client.wait_for_rest()
    assert tokens(second) == tokens(answers(checkpoint, turns))
    assert stats.tier is not None
    assert stats.tier.hit_tokens_total == 0
    assert stats.tier.failures_total.keys() == {"get corrupt"}


def test_a_prompt_that_is_given_up_while_it_loads_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Its client has gone, or the engine is shut down."""
    file = file_backend(tmp_path / "kv")
    answers(checkpoint, PROMPTS, storage=storage(file))
    slow = {"backend": "fault", "inner": file, "delay": 1.0, "delay_time": "300ms"}
    with engine(checkpoint, storage=storage(slow, prefetch_policy="wait_complete")) as client:
        gone = client.add(PROMPTS[0])
        other = client.add([5, 6, 7], max_tokens=3)
        assert len(client.wait([other])[0].token_ids) == 3  # it has not been held up
        client.abort(gone)
        client.generate([[8, 9]], max_tokens=2)
        stats = client.wait_for_rest()
        assert stats.num_used_blocks == 0
        assert stats.tier is not None
        assert stats.tier.num_loading == 0
        client.add(PROMPTS[1])
        client.generate([[8, 9]], max_tokens=2)


@pytest.mark.parametrize(("policy", "is_read"), [("timeout", False), ("wait_complete", True)])
def test_what_is_computed_sooner_is_read_only_by_who_waits_for_all(
    checkpoints: dict[str, Path], tmp_path: Path, policy: str, is_read: bool
) -> None:
    """Once both are measured: half a second for each call of storage here, and far less for computing."""
    file = file_backend(tmp_path / "kv")
    answers(checkpoints["llama"], PROMPTS, storage=storage(file))
    slow = {"backend": "fault", "inner": file, "delay": 1.0, "delay_time": "500ms"}
    spec = storage(slow, prefetch_policy=policy, prefetch_timeout_base_s=60.0)
    with engine(checkpoints["llama"], storage=spec) as client:
        client.generate([prompt(300, seed) for seed in range(3, 9)])
        found = [client.generate([p])[0] for p in PROMPTS]
        stats = client.wait_for_rest()
    assert [answer.cached_tokens for answer in found] == [288, 256 if is_read else 0]
    assert stats.tier is not None
    assert stats.tier.loads_declined_total == (0 if is_read else 1)


def test_short_prompts_are_not_asked_for(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    spec = storage(file_backend(tmp_path / "kv"), prefetch_threshold=290)
    answers(checkpoints["llama"], PROMPTS, storage=spec)
    second = answers(checkpoints["llama"], PROMPTS, storage=spec)
    assert [answer.cached_tokens for answer in second] == [0, 0]


def test_best_effort_waits_for_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = file_backend(tmp_path / "kv")
    answers(checkpoints["llama"], PROMPTS, storage=storage(file))
    hangs = {"backend": "fault", "inner": file, "hang": 1.0, "hang_time": "60s"}
    with engine(checkpoints["llama"], storage=storage(hangs, prefetch_policy="best_effort")) as client:
        second = client.generate(PROMPTS)
    assert [answer.cached_tokens for answer in second] == [0, 0]


def test_selective_writing_stores_what_was_found_again(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    spec = storage(file_backend(tmp_path / "kv"), write_policy="write_through_selective")
    with engine(checkpoints["llama"], storage=spec) as client:
        client.generate(PROMPTS)
        client.generate([[*PROMPTS[0][:200], 5, 6]])
        wait_until_stored(client)
    second = answers(checkpoints["llama"], PROMPTS, storage=spec)
    assert [answer.cached_tokens for answer in second] == [192, 0]


def test_selective_writing_stores_the_prompt_of_a_request_that_wants_it_to_last(
    checkpoint: Path, tmp_path: Path
) -> None:
    spec = storage(file_backend(tmp_path / "kv"), write_policy="write_through_selective")
    with engine(checkpoint, storage=spec) as client:
        for p, is_to_last in zip(PROMPTS, (True, False), strict=True):
            client.wait([client.add(p, is_to_last=is_to_last)])
        wait_until_stored(client)
    second = answers(checkpoint, PROMPTS, storage=spec)
    assert [answer.cached_tokens for answer in second] == [288, 0]


@pytest.mark.parametrize(
    ("arch", "shares_extents", "num_kib"), [("llama", False, 768), ("gemma3", False, 704), ("gemma3", True, 384)]
)
def test_what_is_written_back_comes_back(
    checkpoints: dict[str, Path], tmp_path: Path, arch: str, shares_extents: bool, num_kib: int
) -> None:
    """Nothing is written while there is room; a turn whose history has left the pool finds it in storage.

    The pool has 48 blocks of full attention, or of both kinds together: a fourth is taken by a prompt of twelve blocks.
    """
    spec = storage(file_backend(tmp_path / "kv"), write_policy="write_back")
    with engine(checkpoints[arch], kv_bytes=num_kib << 10, storage=spec, shares_extents=shares_extents) as client:
        first = client.generate([PROMPTS[0]])
        wait_until_stored(client)
        assert tier_of(client).stored_blocks_total == 0
        others = [client.generate([prompt(100, seed)]) for seed in range(10, 20)]
        wait_until_stored(client)
        stored = tier_of(client)
        second = client.generate([[*PROMPTS[0], *first[0].token_ids, 7, 8, 9]])
        hits = tier_of(client).hit_tokens_total
    assert stored.dropped_stores_total == 0
    assert stored.stored_blocks_total > 0
    assert stored.hit_tokens_total == 0
    assert second[0].cached_tokens == (len(PROMPTS[0]) + len(first[0].token_ids) - 1) // BLOCK * BLOCK
    assert hits == second[0].cached_tokens
    right = answers(checkpoints[arch], [[*PROMPTS[0], *first[0].token_ids, 7, 8, 9]])
    assert tokens(second) == tokens(right)
    assert all(tokens(other) for other in others)


@ON_HOST_AND_DEVICE
def test_an_engine_that_ends_writes_back_what_it_has(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: type[ModelRunner]
) -> None:
    """The queue has room for two blocks, and the pool for all there is."""
    monkeypatch.setattr("swiftkv.tier.messages.TierSpec.close_patience_s", 60.0)
    spec = storage(file_backend(tmp_path / "kv"), write_policy="write_back", queue_bytes=1)
    first = answers(checkpoint, PROMPTS, storage=spec, runner=runner)
    second = answers(checkpoint, next_turns(first), storage=spec, runner=runner)
    in_blocks = [(len(p) + len(a.token_ids) - 1) // BLOCK * BLOCK for p, a in zip(PROMPTS, first, strict=True)]
    assert [answer.cached_tokens for answer in second] == in_blocks
    assert tokens(second) == tokens(answers(checkpoint, next_turns(first)))


SLOW_STEPS = [1.0, 0.0, 0.0, 0.0, 0.0, 0.001]
"""Seconds of each of STEP_TIME_TERMS, by which loading is far sooner than computing, even of one block."""


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "a step ahead"])
@pytest.mark.parametrize(
    "fault",
    [{}, {"delay": 1.0, "delay_time": "20ms"}, {"fail": 0.05, "flip": 0.05, "truncate": 0.05}],
    ids=["loads", "is late", "fails now and then"],
)
@pytest.mark.parametrize(("arch", "shares_extents"), [("llama", False), ("gemma3", True)], ids=["dense", "hybrid"])
def test_a_front_that_is_computed_while_its_back_is_loaded_changes_no_answer(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    ahead: bool,
    arch: str,
    shares_extents: bool,
) -> None:
    """Wherever they meet, and whether they do; the front is a block here, for as much is computed in any case."""
    monkeypatch.setattr("swiftkv.tier.rates._WORTH", math.inf)
    prompts = [prompt(300 - 7 * seed, seed) for seed in range(1, 8)]
    file = file_backend(tmp_path / "kv")
    first = answers(checkpoints[arch], prompts, storage=storage(file), shares_extents=shares_extents)
    spec = storage(
        {"backend": "fault", "inner": file, **fault}, prefetch_policy="timeout", prefetch_timeout_base_s=60.0
    )
    options: dict[str, Any] = {"step_time_s": SLOW_STEPS, "async_scheduling": ahead, "shares_extents": shares_extents}
    with engine(checkpoints[arch], storage=spec, **options) as client:
        second = [client.generate([p])[0] for p in prompts]
        stats = client.wait_for_rest()
        in_pool = client.generate(prompts)
    assert tokens(second) == tokens(in_pool) == tokens(first)
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks <= stats.num_blocks
    assert stats.tier is not None
    cached = [answer.cached_tokens or 0 for answer in second]
    assert stats.prefix_hit_tokens_total == sum(cached)
    if not fault:
        # A machine that reads slowly for a moment loads nothing of some: both times are measured.
        assert 0 < stats.tier.loads_total <= len(prompts)
        assert stats.tier.hit_tokens_total == sum(cached)
        assert cached[0] == (len(prompts[0]) - 1) // BLOCK * BLOCK  # nothing was measured yet
        assert all(0 <= n < (len(p) - 1) // BLOCK * BLOCK for n, p in zip(cached[1:], prompts[1:], strict=True))


@contextmanager
def ranks(checkpoint: Path, **options: Any) -> Iterator[EngineProcess]:
    """An engine of two ranks: each has half of the KV heads, in a process of its own."""
    with EngineProcess(checkpoint, tensor_parallel_size=2, **{**OPTIONS, **options}) as client:
        yield client


@DENSE_IS_SLOW
def test_ranks_read_what_ranks_wrote(checkpoint: Path, tmp_path: Path) -> None:
    spec = storage(file_backend(tmp_path / "kv"))
    with ranks(checkpoint, storage=spec) as client:
        first = client.generate(PROMPTS)
        wait_until_stored(client)
    turns = next_turns(first)
    with ranks(checkpoint, storage=spec, async_scheduling=True) as client:
        second = client.generate(turns)
        stats = client.wait_for_rest()
        # The same again, whose blocks are in the pools now, and without any that were stored.
        assert tokens(second) == tokens(client.generate(turns))
        assert tokens(second) == tokens(client.generate(turns, cache_salt="another"))
    in_blocks = [(len(p) + len(a.token_ids) - 1) // BLOCK * BLOCK for p, a in zip(PROMPTS, first, strict=True)]
    assert [answer.cached_tokens for answer in second] == in_blocks
    assert stats.tier is not None
    assert not stats.tier.failures_total
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_block_without_the_part_of_a_rank_is_computed(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Half of the files are removed, so that few blocks have both of their parts."""
    directory = tmp_path / "kv"
    spec = storage(file_backend(directory))
    checkpoint = checkpoints["llama"]
    with ranks(checkpoint, storage=spec) as client:
        expected = client.generate(PROMPTS[:1])
        wait_until_stored(client)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1024)
    assert files
    random.Random(3).shuffle(files)
    for path in files[::2]:
        path.unlink()
    with ranks(checkpoint, storage=spec) as client:
        found = client.generate(PROMPTS[:1])
        stats = client.wait_for_rest()
    assert tokens(found) == tokens(expected)
    assert stats.tier is not None
    assert stats.tier.num_loading == 0
