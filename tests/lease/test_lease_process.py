"""A process is who it says it is, and is known to be gone when it is."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from swiftkv.lease.process import Identity, PeerProcess, start_ticks
from tests.support.open_files import no_file_descriptor_left


def is_gone(process: PeerProcess) -> bool:
    return bool(select.select([process.fd], [], [], 0)[0])


def test_this_process_finds_itself() -> None:
    me = Identity.of_this_process("me")
    found = PeerProcess.find(me.pid, me.start_ticks)
    assert found is not None
    assert not is_gone(found)
    found.close()
    assert Identity.of_this_process("me").incarnation != me.incarnation


def test_a_process_that_ends_is_gone_before_anybody_waits_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    found = PeerProcess.find(child.pid, ticks)
    assert found is not None
    assert PeerProcess.find(child.pid, ticks + 1) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(found)
    found.close()
    child.wait()
    assert PeerProcess.find(child.pid, ticks) is None
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        start_ticks(child.pid)
    child.communicate()


def test_a_search_that_fails_keeps_no_file_descriptor() -> None:
    """One is for the process, and another, which is not there, for the file that says when it started."""
    me = Identity.of_this_process("me")
    with no_file_descriptor_left(os.getpid(), num_left=1):
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                PeerProcess.find(me.pid, me.start_ticks)
        os.close(os.open("/dev/null", os.O_RDONLY))


def test_a_name_may_have_brackets_and_spaces() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "open('/proc/self/comm', 'w').write(') S 1 ('); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    before = start_ticks(child.pid)
    assert child.stdout is not None
    child.stdout.readline()
    assert start_ticks(child.pid) == before
    child.kill()
    child.communicate()
