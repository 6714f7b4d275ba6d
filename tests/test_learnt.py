"""The knowledge of engines about the time of their steps outlives the node, and files that are none do no harm."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import msgspec
import pytest

from swiftkv.engine.messages import STEP_TIME_TERMS, EngineConfig
from swiftkv.learnt import FILE_NAME, LearntStepTimes, fingerprint
from swiftkv.units import PoolBytes

COSTS = [0.001, 1e-7, 1e-7, 0.0005, 0.0, 0.02]


def save(learnt: LearntStepTimes) -> None:
    asyncio.run(learnt.save())


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    learnt = LearntStepTimes(tmp_path)
    learnt.note("a", COSTS)
    learnt.note("b", [])  # an engine that knows nothing yet
    save(learnt)
    again = LearntStepTimes(tmp_path)
    assert again.of("a") == COSTS
    assert again.of("b") == []
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_without_a_directory_it_lasts_as_long_as_the_node() -> None:
    learnt = LearntStepTimes(None)
    learnt.note("a", COSTS)
    save(learnt)
    assert learnt.of("a") == COSTS


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[1]", b'{"a": 3}', b'{"a": {"token": "x"}}', b"\xff" * 100])
def test_a_file_that_is_none_is_ignored_with_a_line(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        learnt = LearntStepTimes(tmp_path)
    assert learnt.of("a") == []
    assert len(caplog.records) == 1
    assert f"{FILE_NAME} cannot be read" in caplog.text
    learnt.note("a", COSTS)
    save(learnt)
    assert LearntStepTimes(tmp_path).of("a") == COSTS


@pytest.mark.parametrize("costs", [[0.0] * 6, [-1e-3, 0, 0, 0, 0, 0.02], [1e-3, 0, 0, 0, 0], [1e-3] * 7])
def test_times_that_cannot_be_are_ignored(tmp_path: Path, costs: list[float], caplog: pytest.LogCaptureFixture) -> None:
    terms = (*STEP_TIME_TERMS, "more")
    sound = dict(zip(STEP_TIME_TERMS, COSTS, strict=True))
    (tmp_path / FILE_NAME).write_text(json.dumps({"a": dict(zip(terms, costs, strict=False)), "b": sound}))
    with caplog.at_level(logging.WARNING):
        learnt = LearntStepTimes(tmp_path)
    assert (learnt.of("a"), learnt.of("b")) == ([], COSTS)
    assert "1 of 2 entries are ignored" in caplog.text
    learnt.note("b", costs)
    assert learnt.of("b") == COSTS


def test_a_directory_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learnt = LearntStepTimes(tmp_path / "gone")
    learnt.note("a", COSTS)
    with caplog.at_level(logging.WARNING):
        save(learnt)
    assert "cannot be written" in caplog.text


def test_another_shape_or_machine_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    config = EngineConfig("chat", str(tmp_path), "ipc://r", "ipc://o", PoolBytes(1 << 20), 512)
    same = msgspec.structs.replace(config, name="other", max_num_seqs=7)
    assert fingerprint(same) == fingerprint(config)
    for change in ({"threads": 2}, {"dtype": "float32"}, {"tensor_parallel_size": 2}, {"block_size": 32}):
        assert fingerprint(msgspec.structs.replace(config, **change)) != fingerprint(config)
    before = fingerprint(config)
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    assert fingerprint(config) != before
