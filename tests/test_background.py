"""Work that gives way to others."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from swiftkv.background import FOREGROUND, Background

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="of Linux")

DEADLINE_S = 60.0
LOWEST_PRIORITY = 19  # as niceness
AUTOGROUP = Path("/proc/self/autogroup")

# Prints the niceness of its session before it gives way, while it does, and afterwards.
SESSION = """
from pathlib import Path
from swiftkv.background import Background
def niceness():
    words = Path("/proc/self/autogroup").read_text().split()
    print(words[-1] if words else 0, flush=True)  # none where no session was ever begun
niceness()
background = Background(60.0)
background.run(niceness)
background.end()
niceness()
"""


def niceness() -> int:
    """Return that of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def can_raise() -> bool:
    """Whether a thread here may raise its priority again."""
    raised: list[bool] = []

    def lower_and_raise() -> None:
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before)
        except PermissionError:
            raised.append(False)
        else:
            raised.append(True)

    thread = threading.Thread(target=lower_and_raise)
    thread.start()
    thread.join()
    return raised[0]


def test_the_work_has_a_low_priority_and_its_caller_keeps_its_own() -> None:
    before = niceness()
    background = Background(DEADLINE_S)
    lower = background.run(niceness)
    assert lower > before or before == LOWEST_PRIORITY
    assert niceness() == before
    background.end()
    assert background.run(niceness) == before


def test_without_patience_the_caller_works_itself() -> None:
    assert FOREGROUND.run(threading.get_ident) == threading.get_ident()


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(TimeoutError, match="of the work"):
        Background(DEADLINE_S).run(lambda: (_ for _ in ()).throw(TimeoutError("of the work")))


def test_work_that_outlasts_the_patience_goes_on_with_the_priority_of_its_caller(can_raise: bool) -> None:
    if not can_raise:
        pytest.skip("threads may not raise their priority here")
    before = niceness()

    def until_raised() -> int:
        while niceness() != before:  # Linux tells nobody of a change
            time.sleep(0.01)
        return niceness()

    assert Background(0.05).run(until_raised) == before


@pytest.mark.skipif(not os.access(AUTOGROUP, os.W_OK), reason="sessions are not weighed here, or not by us")
@pytest.mark.parametrize("leads_session", [True, False])
def test_a_session_of_its_own_gives_way_meanwhile(leads_session: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        start_new_session=leads_session,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    before, meanwhile, after = map(int, done.stdout.split())
    assert (meanwhile > before) == leads_session
    assert after == before
