"""A wakeup ends a poll once, and touches no file that has its number after it."""

from __future__ import annotations

import os
import select
import threading

from swiftkv.wakeup import Wakeup

DEADLINE_S = 60.0


def test_another_thread_ends_a_poll() -> None:
    wakeup = Wakeup()
    thread = threading.Thread(target=wakeup.wake)
    thread.start()
    assert select.select([wakeup.fd], [], [], DEADLINE_S)[0] == [wakeup.fd]
    thread.join()
    wakeup.close()


def test_wakes_are_taken_once() -> None:
    wakeup = Wakeup()
    assert not wakeup.take()
    wakeup.wake()
    wakeup.wake()
    assert wakeup.take()
    assert not wakeup.take()
    wakeup.close()


def test_a_late_wake_leaves_the_next_file_of_its_number_alone() -> None:
    wakeup = Wakeup()
    wakeup.close()
    other = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    if other != wakeup.fd:  # another thread may have opened a file in between
        os.dup2(other, wakeup.fd)
        other, unused = wakeup.fd, other
        os.close(unused)
    wakeup.wake()
    assert select.select([other], [], [], 0)[0] == []
    os.close(other)
