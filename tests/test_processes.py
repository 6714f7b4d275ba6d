"""The kernel's answers about processes are read right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from swiftkv.processes import how_it_ended, read_vitals

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
