"""Storage comes to an engine that runs, and leaves it again: answers stay what they are without it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swiftkv.engine import attachable_tier
from swiftkv.engine.messages import AttachStorage, DetachStorage, StorageChanged
from swiftkv.engine.runner import ModelRunner
from swiftkv.storage.backend import Capabilities
from swiftkv.storage.host_medium import make_host_memory
from swiftkv.tier.messages import TierSpec, TierStats
from tests.engine.engine_process import TIMEOUT_S, tokens
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint
from tests.support.lanes import LateRunner
from tests.support.node_process import wait_for
from tests.support.storage import MemoryMedium, StuckMedium, dynamic_options

BLOCK = 16
PROMPT_TOKENS = 300
CHANGE_IDS = itertools.count(1)
BUSY = "storage is being attached or detached; try again later"


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("attachable") / "gemma3"
    make_checkpoint(directory, "gemma3")
    return directory


@pytest.fixture(scope="module")
def right(checkpoint: Path) -> dict[int, list[int]]:
    """Answers of an engine that never has storage, by seed of the prompt."""
    with engine(checkpoint) as client:
        return {seed: answer.token_ids for seed, answer in enumerate(client.generate([prompt(s) for s in range(4)]))}


@contextmanager
def engine(
    checkpoint: Path, runner: type[ModelRunner] = ModelRunner, **options: object
) -> Iterator[EngineThread[ModelRunner]]:
    client = EngineThread(checkpoint, runner, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, **options)
    with client.running():
        yield client


def file_storage(directory: Path) -> dict[str, Any]:
    return {"backend": "file", "path": str(directory), "size": 1 << 30, "min_free": 0}


class LateMedium(MemoryMedium):
    """A medium that is opened once a file is there."""

    def __init__(self, may_open: str) -> None:
        super().__init__(may_open)
        wait_for("the file that lets it open", Path(may_open).exists)


class UnregisteredMedium(MemoryMedium):
    """A medium that cannot register memory, such as one whose memory may not be locked."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, register=self._register)

    def _register(self, memory: memoryview) -> None:
        raise OSError("tiers.storage: memory cannot be locked")


def storage_that_opens_late(may_open: Path) -> dict[str, Any]:
    return dynamic_options(LateMedium, may_open=str(may_open))


def attach(client: EngineThread[ModelRunner], backend: dict[str, Any]) -> None:
    spec = TierSpec(backend, "/", prefetch_policy="wait_complete", prefetch_threshold=BLOCK)
    client.send(AttachStorage(next(CHANGE_IDS), spec))


def detach(client: EngineThread[ModelRunner]) -> None:
    client.send(DetachStorage(next(CHANGE_IDS)))


def outcome(client: EngineThread[ModelRunner]) -> str | None:
    """Wait for the answer to a change."""
    while not client.changes:
        client.take_one()
    changed: StorageChanged = client.changes.pop(0)
    return changed.why_not


def tier(client: EngineThread[ModelRunner]) -> TierStats:
    assert client.stats is not None
    assert client.stats.tier is not None
    return client.stats.tier


def wait_until_in(client: EngineThread[ModelRunner], name: str) -> None:
    """Wait until a tier has some blocks, and none is left to write."""
    while tier(client).num_to_store or not any(
        level.stored_blocks_total for level in tier(client).levels if level.tier == name
    ):
        client.take_one()


def test_storage_that_cannot_register_memory_is_not_attached(checkpoint: Path, right: dict[int, list[int]]) -> None:
    with engine(checkpoint) as client:
        attach(client, dynamic_options(UnregisteredMedium))
        assert outcome(client) == "tiers.storage: memory cannot be locked"
        assert not [
            thread.name for thread in threading.enumerate() if thread.name in ("storage loader", "storage writer")
        ]
        assert tokens(client.generate([prompt(0)])) == [right[0]]


ON_HOST_AND_DEVICE = pytest.mark.parametrize("runner", [ModelRunner, LateRunner], ids=["host", "device"])
"""The pool is read and written in place, or reached as one on a device."""


@ON_HOST_AND_DEVICE
def test_answers_are_the_same_before_during_and_after(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]], runner: type[ModelRunner]
) -> None:
    with engine(checkpoint, runner) as client:
        before = client.generate([prompt(0)])
        running = client.add(prompt(1))
        attach(client, file_storage(tmp_path / "kv"))
        during = client.wait([running])
        assert outcome(client) is None
        assert tier(client).backend == "file"
        running = client.add(prompt(2))
        while tier(client).stored_blocks_total == 0:
            client.take_one()
        detach(client)
        during += client.wait([running])
        assert outcome(client) is None
        after = client.generate([prompt(3)])
        stats = client.wait_for_rest()
        assert stats.num_used_blocks == 0
    assert tokens(before + during + after) == list(right.values())
    assert tier(client).backend is None
    assert tier(client).stored_blocks_total > 0


def test_what_was_in_the_pool_is_stored_and_the_next_engine_reads_it(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]]
) -> None:
    with engine(checkpoint) as client:
        client.generate([prompt(0), prompt(1)])
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) is None
        while tier(client).num_to_store:
            client.take_one()
    with engine(checkpoint) as client:
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) is None
        first = client.generate([prompt(0)])
        client.wait_for_rest()
        hits = tier(client).hit_tokens_total
        detach(client)
        assert outcome(client) is None
        assert tier(client).hit_tokens_total == hits  # totals outlive the storage
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) is None
        first += client.generate([prompt(1)])
        client.wait_for_rest()
    assert tokens(first) == [right[0], right[1]]
    assert [answer.cached_tokens for answer in first] == [288, 288]
    assert tier(client).hit_tokens_total == 2 * hits == 2 * 288


def test_a_prompt_that_waits_for_storage_which_is_detached_is_computed(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]]
) -> None:
    """The storage hangs, and lets go of blocks only when it is closed."""
    with engine(checkpoint) as client:
        attach(client, file_storage(tmp_path / "kv"))
        client.generate([prompt(0)])
        assert outcome(client) is None
        while tier(client).num_to_store:
            client.take_one()
    hangs = {"backend": "fault", "inner": file_storage(tmp_path / "kv"), "hang": 1.0, "hang_time": "300s"}
    with engine(checkpoint) as client:
        attach(client, hangs)
        assert outcome(client) is None
        waiting = client.add(prompt(0))
        while tier(client).num_loading == 0:
            client.take_one()
        detach(client)
        assert tokens(client.wait([waiting])) == [right[0]]
        assert outcome(client) is None
        stats = client.wait_for_rest()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@ON_HOST_AND_DEVICE
def test_storage_whose_read_does_not_come_back_is_detached_and_another_attached(
    checkpoint: Path,
    tmp_path: Path,
    right: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    runner: type[ModelRunner],
) -> None:
    """The pool has all of its blocks again when the read comes back."""
    monkeypatch.setattr("swiftkv.engine.attachable_tier._READ_PATIENCE_S", 0.0)
    monkeypatch.setattr("swiftkv.engine.tier._CLOSE_PATIENCE_S", 0.01)
    medium = dynamic_options(StuckMedium, name=f"detached {runner}")
    with engine(checkpoint) as client:
        attach(client, medium)
        client.generate([prompt(0)])
        assert outcome(client) is None
        while tier(client).num_to_store:
            client.take_one()
    with engine(checkpoint, runner) as client:
        with StuckMedium.stuck():
            attach(client, medium)
            assert outcome(client) is None
            waiting = client.add(prompt(0))
            assert StuckMedium.is_asked.wait(TIMEOUT_S)
            detach(client)
            assert tokens(client.wait([waiting])) == [right[0]]
            assert outcome(client) is None
            assert tier(client).backend is None
            attach(client, file_storage(tmp_path / "kv"))
            assert outcome(client) is None
            assert tokens(client.generate([prompt(1)])) == [right[1]]
            stats = client.wait_for_rest()
            assert stats.num_free_blocks + stats.num_cached_blocks < stats.num_blocks
        while stats.num_free_blocks + stats.num_cached_blocks < stats.num_blocks:
            assert tokens(client.generate([prompt(1)])) == [right[1]]
            stats = client.wait_for_rest()
        while tier(client).num_to_store:
            client.take_one()
        assert tier(client).backend == "file"
        assert tier(client).stored_blocks_total > 0


def test_changes_that_cannot_be_made_are_refused_and_change_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with engine(checkpoint) as client:
        detach(client)
        assert outcome(client) == "no storage is attached"
        attach(client, file_storage(tmp_path / "open"))
        why_not = outcome(client)
        assert why_not is not None
        assert why_not.startswith("tiers.storage.path: ")
        attach(client, storage_that_opens_late(tmp_path / "may open"))
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) == BUSY
        (tmp_path / "may open").touch()
        assert outcome(client) is None
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) == "storage is attached; detach it first"
        assert tier(client).backend == "dynamic"


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, TierSpec]:
    """Return a directory that cannot be used, and storage in it; engines try every 50 ms whether it can."""
    monkeypatch.setattr(attachable_tier, "_OPEN_AGAIN_S", 0.05)
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o755)
    return directory, TierSpec(file_storage(directory), "/", prefetch_policy="wait_complete", prefetch_threshold=BLOCK)


def test_storage_that_cannot_be_used_at_a_restart_is_used_once_it_can(
    checkpoint: Path, right: dict[int, list[int]], closed: tuple[Path, TierSpec]
) -> None:
    """A full disk must not keep an engine down that has served."""
    directory, spec = closed
    with engine(checkpoint, storage=spec, has_served=True) as client:
        assert client.generate([prompt(0)])[0].token_ids == right[0]
        told = tier(client)
        assert (told.is_degraded, told.backend) == (True, "file")
        assert [(level.tier, level.is_degraded) for level in told.levels] == [("storage", True)]
        directory.chmod(0o700)
        while tier(client).is_degraded:
            client.take_one()
        assert client.generate([prompt(1)])[0].token_ids == right[1]


def test_host_memory_is_used_while_storage_cannot_be(
    checkpoint: Path, right: dict[int, list[int]], closed: tuple[Path, TierSpec]
) -> None:
    directory, spec = closed
    host_fd = make_host_memory(8 << 20, 4096)
    spec = msgspec.structs.replace(spec, host_fd=host_fd)
    directory.chmod(0o700)
    with engine(checkpoint, storage=spec) as client:
        client.generate([prompt(0)])
        client.wait_for_rest()
    directory.chmod(0o755)
    with engine(checkpoint, storage=spec, has_served=True) as client:
        [answer] = client.generate([prompt(0)])
        assert answer.token_ids == right[0]
        assert answer.cached_tokens > 0
        levels = tier(client).levels
        assert [(level.tier, level.is_degraded) for level in levels] == [("host", False), ("storage", True)]
        directory.chmod(0o700)
        while tier(client).is_degraded:
            client.take_one()
        assert client.generate([prompt(1)])[0].token_ids == right[1]
        while not all(level.stored_blocks_total for level in tier(client).levels):
            client.take_one()
        detach(client)
        assert outcome(client) is None
    directory.chmod(0o755)
    with engine(checkpoint, storage=spec, has_served=True) as client:
        assert outcome_at_last(client, detach) is None
        assert tier(client).backend == "host", "host memory stays"
    os.close(host_fd)


def test_storage_is_attached_below_host_memory_and_leaves_it_alone(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]]
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    host_fd = make_host_memory(8 << 20, 4096)
    host = TierSpec(None, "/", prefetch_policy="wait_complete", prefetch_threshold=BLOCK, host_fd=host_fd)

    def attach_files(directory: Path) -> None:
        client.send(AttachStorage(next(CHANGE_IDS), msgspec.structs.replace(host, backend=file_storage(directory))))

    def check_host() -> None:
        """Have the pool forget everything; host memory has it."""
        client.forget_all()
        [answer] = client.generate([prompt(0)])
        assert answer.token_ids == right[0]
        assert answer.hit_tokens["host"] == PROMPT_TOKENS // BLOCK * BLOCK

    with engine(checkpoint, storage=host) as client:
        client.generate([prompt(0)])
        wait_until_in(client, "host")
        check_host()
        detach(client)
        assert outcome(client) == "no storage is attached"
        attach_files(tmp_path / "open")
        assert (outcome(client) or "").startswith("tiers.storage.path: ")
        assert tier(client).backend == "host"
        check_host()
        attach_files(tmp_path / "kv")
        assert outcome(client) is None
        assert [level.tier for level in tier(client).levels] == ["host", "storage"]
        wait_until_in(client, "storage")
        check_host()
        attach_files(tmp_path / "kv")
        assert outcome(client) == "storage is attached; detach it first"
        detach(client)
        assert outcome(client) is None
        assert tier(client).backend == "host"
        check_host()
    with engine(checkpoint, storage=msgspec.structs.replace(host, backend=file_storage(tmp_path / "kv"))) as client:
        check_host()
    with engine(
        checkpoint, storage=msgspec.structs.replace(host, host_fd=None, backend=file_storage(tmp_path / "kv"))
    ) as client:
        [answer] = client.generate([prompt(0)])
        assert (answer.token_ids, answer.hit_tokens["storage"] > 0) == (right[0], True)
    os.close(host_fd)


def test_the_policies_of_storage_hold_that_is_added_below_host_memory(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]], closed: tuple[Path, TierSpec]
) -> None:
    """A prompt that is shorter than the default threshold is loaded, also after other storage could not be attached."""
    directory, spec = closed
    (tmp_path / "open").mkdir(mode=0o755)
    short = prompt(0)[: 6 * BLOCK]
    host_fd = make_host_memory(8 << 20, 4096)
    spec = msgspec.structs.replace(spec, host_fd=host_fd)
    other = msgspec.structs.replace(spec, backend=file_storage(tmp_path / "open"))

    def attach_other(client: EngineThread[ModelRunner]) -> None:
        client.send(AttachStorage(next(CHANGE_IDS), other))

    for is_replaced in (False, True):
        directory.chmod(0o755)
        with engine(checkpoint, storage=spec, has_served=True) as client:
            assert client.generate([prompt(1)])[0].token_ids == right[1]
            if is_replaced:
                assert outcome_at_last(client, attach_other) is not None
            directory.chmod(0o700)
            while tier(client).is_degraded:
                client.take_one()
            [first] = client.generate([short])
            wait_until_in(client, "storage")
            client.forget_all()
            [again] = client.generate([short])
            assert (again.token_ids, again.cached_tokens > 0) == (first.token_ids, True)
    os.close(host_fd)


def num_host_mappings() -> int:
    return sum("swiftkv-host" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_host_memory_is_mapped_once_whatever_comes_and_goes_below_it(checkpoint: Path, tmp_path: Path) -> None:
    host_fd = make_host_memory(8 << 20, 4096)
    host = TierSpec(None, "/", host_fd=host_fd)
    gc.disable()  # a tier that was left is freed by the next collection, which may be much later
    try:
        with engine(checkpoint, storage=host) as client:
            client.generate([prompt(0)])
            num_before = num_host_mappings()
            for _ in range(2):
                spec = msgspec.structs.replace(host, backend=file_storage(tmp_path / "kv"))
                client.send(AttachStorage(next(CHANGE_IDS), spec))
                assert outcome(client) is None
                detach(client)
                assert outcome(client) is None
            assert num_host_mappings() == num_before
    finally:
        gc.enable()
    os.close(host_fd)


class MoodyMedium(MemoryMedium):
    """A medium that cannot be made until a file is there, and says so in its own way."""

    def __init__(self, may_open: str) -> None:
        super().__init__(may_open)
        if not Path(may_open).exists():
            raise RuntimeError("others' code")


def test_storage_that_is_slow_to_open_at_a_restart_is_used_once_it_is(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may have been stopped while it opened the directory, which locks that."""
    monkeypatch.setattr(attachable_tier, "_OPENING_PATIENCE_S", 0.05)
    spec = TierSpec(storage_that_opens_late(tmp_path / "may open"), "/")
    with engine(checkpoint, storage=spec, has_served=True) as client:
        assert client.generate([prompt(0)])[0].token_ids == right[0]
        assert tier(client).is_degraded
        (tmp_path / "may open").touch()
        while tier(client).is_degraded:
            client.take_one()
        assert tier(client).backend == "dynamic"


def test_storage_that_opens_in_time_at_a_restart_is_there_for_the_first_prompt(
    checkpoint: Path, tmp_path: Path, right: dict[int, list[int]]
) -> None:
    spec = TierSpec(file_storage(tmp_path / "kv"), "/", prefetch_policy="wait_complete", prefetch_threshold=BLOCK)
    for has_served in (False, True):
        with engine(checkpoint, storage=spec, has_served=has_served) as client:
            [answer] = client.generate([prompt(0)])
            assert answer.token_ids == right[0]
            assert bool(answer.cached_tokens) == has_served
            client.wait_for_rest()


def test_what_is_attached_after_the_files_were_replaced_keeps_blocks_of_the_model_that_serves(
    checkpoint: Path, tmp_path: Path
) -> None:
    """New files are put into place while the old weights serve; only the next process loads them."""
    served, new = tmp_path / "served", tmp_path / "new"
    shutil.copytree(checkpoint, served)
    make_checkpoint(new, "gemma3", seed=7)
    spec = TierSpec(file_storage(tmp_path / "kv"), "/", prefetch_policy="wait_complete", prefetch_threshold=BLOCK)
    with engine(new) as client:
        right_ids = tokens(client.generate([prompt(0)]))
    with engine(served) as client:
        for file in new.iterdir():
            os.replace(file, served / file.name)
        attach(client, file_storage(tmp_path / "kv"))
        assert outcome(client) is None
        assert tokens(client.generate([prompt(0)])) != right_ids
        while tier(client).stored_blocks_total == 0:
            client.take_one()
    with engine(served, storage=spec) as client:
        answers = client.generate([prompt(0)])
    assert tokens(answers) == right_ids
    assert answers[0].cached_tokens == 0


def test_a_users_class_that_cannot_be_made_at_a_restart_is_used_once_it_can(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachable_tier, "_OPEN_AGAIN_S", 0.05)
    spec = TierSpec(dynamic_options(MoodyMedium, may_open=str(tmp_path / "may open")), "/")
    with engine(checkpoint, storage=spec, has_served=True) as client:
        client.generate([prompt(0)])
        assert tier(client).is_degraded
        (tmp_path / "may open").touch()
        while tier(client).is_degraded:
            client.take_one()


def test_storage_that_is_waited_for_can_be_detached_or_replaced(
    checkpoint: Path, tmp_path: Path, closed: tuple[Path, TierSpec]
) -> None:
    directory, spec = closed
    with engine(checkpoint, storage=spec, has_served=True) as client:
        outcome_at_last(client, detach)
        attach(client, file_storage(tmp_path / "other"))
        assert outcome(client) is None
        directory.chmod(0o700)
        assert tier(client).backend == "file"
        detach(client)
        assert outcome(client) is None


def test_storage_that_is_waited_for_is_tried_again_after_other_storage_failed(
    checkpoint: Path, tmp_path: Path, closed: tuple[Path, TierSpec]
) -> None:
    directory, spec = closed
    (tmp_path / "open").mkdir(mode=0o755)
    with engine(checkpoint, storage=spec, has_served=True) as client:

        def attach_other(client: EngineThread[ModelRunner]) -> None:
            attach(client, file_storage(tmp_path / "open"))

        why_not = outcome_at_last(client, attach_other)
        assert why_not is not None
        assert why_not.startswith("tiers.storage.path: ")
        assert tier(client).is_degraded
        directory.chmod(0o700)
        while tier(client).is_degraded:
            client.take_one()


def test_storage_that_is_waited_for_is_not_detached_while_other_storage_is_opened(
    checkpoint: Path, tmp_path: Path, closed: tuple[Path, TierSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachable_tier, "_OPEN_AGAIN_S", 3600.0)
    with engine(checkpoint, storage=closed[1], has_served=True) as client:
        attach(client, storage_that_opens_late(tmp_path / "may open"))
        assert outcome_of(client, detach) == BUSY
        (tmp_path / "may open").touch()
        assert outcome(client) is None
        assert tier(client).backend == "dynamic"
        assert not tier(client).is_degraded


def outcome_of(client: EngineThread[ModelRunner], change: Callable[[EngineThread[ModelRunner]], None]) -> str | None:
    change(client)
    return outcome(client)


def outcome_at_last(
    client: EngineThread[ModelRunner], change: Callable[[EngineThread[ModelRunner]], None]
) -> str | None:
    """Ask for a change until the engine is no longer trying to open other storage, and return the outcome."""
    while (why_not := outcome_of(client, change)) == BUSY:
        pass
    return why_not
