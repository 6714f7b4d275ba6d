"""Engines whose steps copy blocks from host memory into the pool, layer by layer, because they attend to none there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftkv.engine.runner import ModelRunner
from swiftkv.storage.host_medium import HostMedium
from tests.engine.test_engine_host import (
    BLOCK,
    CACHED,
    PROMPTS,
    check,
    engine,
    fill,
    host_memory,
    pinned_chunks,
    right_answers,
    spec,
    tokens,
    until,
)
from tests.support.checkpoints import make_checkpoint


class MovingRunner(ModelRunner):
    """A runner whose pool has no place for host memory beside it, like one on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swiftkv.cache.pool.place_beside", lambda *_: None)
            super().__init__(*arguments)
        assert self.pool.host_blocks is None
        assert self.host_source is not None


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moves") / "llama"
    make_checkpoint(directory, "llama")
    return directory


@pytest.fixture
def host_fd(dense: Path) -> Iterator[int]:
    with host_memory(dense) as fd:
        yield fd


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "a step ahead"])
def test_steps_copy_blocks_into_the_pool(dense: Path, host_fd: int, ahead: bool) -> None:
    fill(dense, host_fd)
    turns = [[*p, 7, 8, 9] for p in PROMPTS]
    with engine(dense, MovingRunner, storage=spec(host_fd), async_scheduling=ahead) as client:
        found = client.generate(turns)
        stats = client.wait_for_rest()
        until(lambda: not pinned_chunks(host_fd))
        again = client.generate(turns)
    assert [answer.hit_tokens["host"] for answer in found] == CACHED
    assert all(not answer.hit_tokens.get("host") for answer in again)  # they lie in the pool now
    assert tokens(found) == tokens(again) == right_answers(dense, turns)
    assert stats.tier is not None
    num_blocks = sum(cached // BLOCK for cached in CACHED)
    assert stats.tier.loaded_bytes_total == num_blocks * HostMedium.of(host_fd, 63).chunk_bytes
    assert stats.layer_stream_load is not None
    check(host_fd)
