"""An engine that gives up its weights and loads them again answers as before, and its pool is there meanwhile."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swiftkv.engine.messages import Sleep, Slept, StepOutput, Wake, Woken
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import wait_for

PROMPTS = [[7 * i % 300 + 3 for i in range(begin, begin + length)] for begin, length in ((1, 90), (9, 30), (5, 200))]


@pytest.fixture(params=["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    make_checkpoint(tmp_path / "model", request.param)
    with EngineProcess(tmp_path / "model", incarnation=7) as process:
        yield process


def say(engine: EngineProcess, message: Sleep | Wake) -> Slept | Woken:
    """Send a message, and return what the engine says of it."""
    engine.send(message)
    while isinstance(answer := engine.receive(), StepOutput):
        engine.stats = answer.stats or engine.stats
    assert isinstance(answer, Slept | Woken)
    return answer


def test_answers_are_the_same_before_and_after(engine: EngineProcess) -> None:
    before = [answer.token_ids for answer in engine.generate(PROMPTS, max_tokens=20)]
    assert say(engine, Sleep()) == Slept(7)
    # A model that sleeps keeps its checkpoint open: what it wakes up with is what it was, whatever was put there.
    directory = Path(engine.config.path)
    shutil.rmtree(directory)
    make_checkpoint(directory, "llama", seed=1)
    assert say(engine, Wake(give_way_s=600.0)) == Woken(7)
    again = engine.generate(PROMPTS, max_tokens=20)
    assert [answer.token_ids for answer in again] == before
    assert all(answer.cached_tokens for answer in again)  # the pool was kept
    fresh = engine.generate(PROMPTS, max_tokens=20, cache_salt="computed anew")
    assert [answer.token_ids for answer in fresh] == before


@pytest.mark.parametrize("is_asleep", [False, True])
def test_an_engine_whose_files_were_overwritten_ends_before_it_computes(tmp_path: Path, is_asleep: bool) -> None:
    """Otherwise it would answer with new weights, or with some of them, from the KV of the old ones."""
    make_checkpoint(tmp_path / "model", "llama")
    make_checkpoint(tmp_path / "other", "llama", seed=1)
    with EngineProcess(tmp_path / "model", subprocess.PIPE, incarnation=7) as engine:
        if is_asleep:
            say(engine, Sleep())
        shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "model" / "model.safetensors")
        if is_asleep:
            engine.send(Wake())
        else:
            engine.add(PROMPTS[0])
        assert engine.process.wait(TIMEOUT_S) == 1  # so its supervisor starts it again
        assert engine.process.stderr is not None
        assert "model.safetensors was overwritten while the model used it" in engine.process.stderr.read().decode()


@pytest.mark.slow
def test_cycles_leave_no_thread_and_no_descriptor(engine: EngineProcess) -> None:
    process = psutil.Process(engine.process.pid)

    def cycle() -> None:
        say(engine, Sleep())
        say(engine, Wake())
        engine.generate([PROMPTS[0]], max_tokens=2)

    cycle()
    threads, descriptors = process.num_threads(), process.num_fds()
    for _ in range(10):
        cycle()
    # The thread that loaded may still be ending.
    wait_for("as much as before", lambda: process.num_threads() <= threads and process.num_fds() <= descriptors)


def test_an_engine_that_sleeps_can_be_shut_down(engine: EngineProcess) -> None:
    say(engine, Sleep())  # its fixture ends it, and expects exit code 0
