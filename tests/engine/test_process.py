"""The ways in which an engine process ends."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from swiftkv.background import PATIENCE_VARIABLE
from swiftkv.engine.messages import EXIT_LOAD_FAILED, EngineConfig
from swiftkv.units import PoolBytes
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.support.checkpoints import make_checkpoint

PREFAULT_NICENESS = 19  # of the thread that backs the pool with memory, for as long as that takes

# Starts an engine as a node does, says its process id once it has read its configuration, and waits.
PARENT = """
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-m", "swiftkv.engine.main"], stdin=subprocess.PIPE)
engine.stdin.write(sys.stdin.buffer.readline())
engine.stdin.flush()
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "qwen2")
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[EngineProcess]:
    with EngineProcess(checkpoint) as process:
        yield process


def test_sigterm_ends_it_in_the_middle_of_its_work(engine: EngineProcess) -> None:
    request_id = engine.add([3], max_tokens=500)
    while not engine.answers[request_id].token_ids:
        engine.take_one()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(TIMEOUT_S) == 0


def priorities(pid: int) -> Iterator[int]:
    """Yield the niceness of each thread of a process that still runs."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            yield os.getpriority(os.PRIO_PROCESS, int(thread.name))


@pytest.mark.skipif(platform.system() != "Linux", reason="of Linux")
def test_no_thread_of_an_engine_that_gave_way_goes_on_doing_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "600")
    with EngineProcess(checkpoint) as engine:
        [answer] = engine.generate([[3, 4]], max_tokens=2)
        assert len(answer.token_ids) == 2
        usual = {os.getpriority(os.PRIO_PROCESS, 0), PREFAULT_NICENESS}
        deadline = time.monotonic() + TIMEOUT_S
        while not set(priorities(engine.process.pid)) <= usual:  # a thread ends a little after its work
            assert time.monotonic() < deadline, f"not only {usual}: {set(priorities(engine.process.pid))}"
            time.sleep(0.01)


def test_the_end_of_its_standard_input_ends_it(engine: EngineProcess) -> None:
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(TIMEOUT_S) == 0


def test_what_it_does_not_expect_ends_it(checkpoint: Path) -> None:
    """The parent is told by the exit code, the reader of the log by a traceback; nothing is swallowed."""
    with EngineProcess(checkpoint, stderr=subprocess.PIPE) as engine:
        engine.send(b"\xc1")  # never valid MessagePack
        assert engine.process.wait(TIMEOUT_S) == 1
        assert engine.process.stderr is not None
        assert b"DecodeError" in engine.process.stderr.read()


def test_it_does_not_outlive_its_parent(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        name="orphan",
        path=str(checkpoint),
        requests_address=f"ipc://{tmp_path}/requests",
        outputs_address=f"ipc://{tmp_path}/outputs",
        memory=PoolBytes(8 << 20),
        max_model_len=128,
    )
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(msgspec.json.encode(config) + b"\n")
    parent.stdin.flush()
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    engine.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "/does/not/exist"}, "config.json"),
        ({"kv_bytes": 4096}, "kv_cache.memory"),
        ({"max_model_len": 10**6, "kv_bytes": 4 << 30}, "max_model_len"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(checkpoint: Path, options: dict[str, object], says: str) -> None:
    engine = EngineProcess(checkpoint, stderr=subprocess.PIPE, **options)
    assert engine.process.wait(TIMEOUT_S) == EXIT_LOAD_FAILED
    assert engine.process.stderr is not None
    [line] = engine.process.stderr.read().decode().splitlines()
    assert line.startswith("swiftkv: model tiny: ")
    assert says in line
    engine.close()
