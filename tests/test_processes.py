"""The kernel's answers about processes are read right."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from swiftkv.processes import fix_search_paths, how_it_ended, kill_child, read_vitals
from tests.support.open_files import no_more_files

_COUNT_HEAPS = """
import ctypes, sys, threading
from swiftkv.processes import share_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_one_heap()
all_there = threading.Barrier(4)
def allocate():
    libc.malloc(50_000)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("returncode", "how"),
    [
        (0, "ended with code 0"),
        (3, "ended with code 3"),
        (-9, "was killed by SIGKILL"),
        (-34, "was killed by SIGRTMIN"),
        (-40, "was killed by real-time signal 40"),
    ],
)
def test_every_end_has_a_name(returncode: int, how: str) -> None:
    assert how_it_ended(returncode) == how


def test_a_stopped_process_is_told_from_one_that_computes() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while (vitals := read_vitals(process.pid)) is None or vitals.cpu_s < 0.1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not vitals.is_stopped
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = read_vitals(process.pid)
        assert stopped is not None
        assert stopped.is_stopped
    finally:
        process.kill()
        process.wait()
    assert read_vitals(process.pid) is None


def test_a_process_whose_child_is_stopped_is_stopped() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            vitals = read_vitals(os.getpid())
            assert vitals is not None
            assert vitals.is_stopped
        finally:
            child.kill()
    vitals = read_vitals(os.getpid())
    assert vitals is not None
    assert not vitals.is_stopped


def test_search_paths_lead_to_the_same_directories_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "backends:/usr/lib")
    monkeypatch.setenv("TRITON_CACHE_DIR", ".triton")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    fix_search_paths()
    assert os.environ["PYTHONPATH"] == f"{tmp_path}/backends:/usr/lib"
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/.triton"
    assert "LD_LIBRARY_PATH" not in os.environ


def test_without_a_descriptor_nothing_is_known_of_a_process() -> None:
    with no_more_files():
        assert read_vitals(os.getpid()) is None
    assert read_vitals(os.getpid()) is not None


def test_a_thread_that_hangs_does_not_keep_a_process() -> None:
    program = (
        "import time; from concurrent.futures import ThreadPoolExecutor; from swiftkv.processes import exit_in; "
        "ThreadPoolExecutor(1).submit(time.sleep, 600); exit_in(0.1, 3)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S).returncode == 3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads heaps of their own")
@pytest.mark.parametrize(("how", "is_one"), [("shared", True), ("as it is", False)])
def test_threads_share_one_heap(how: str, is_one: bool) -> None:
    asked_otherwise = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")  # each may say how many heaps there are
    environment = {name: value for name, value in os.environ.items() if name not in asked_otherwise}
    command = [sys.executable, "-c", _COUNT_HEAPS, how]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (ran.stdout.count("<heap nr=") == 1) is is_one


def test_killing_a_process_that_just_ended_leaves_how_it_ended_to_the_loop() -> None:
    async def how_one_ends() -> int:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        os.kill(process.pid, signal.SIGTERM)
        with suppress(ChildProcessError):  # the loop was quicker
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                pass
        kill_child(process)
        return await process.wait()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert [runner.run(how_one_ends()) for _ in range(100)] == [-signal.SIGTERM] * 100


def test_a_process_that_runs_is_killed() -> None:
    async def how_it_ends() -> int:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        kill_child(process)
        end = await process.wait()
        kill_child(process)
        return end

    assert asyncio.run(how_it_ends()) == -signal.SIGKILL
