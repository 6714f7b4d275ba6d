"""Short time slices for threads that wait."""

from __future__ import annotations

import os
import platform
import threading

import pytest

from swiftkv.latency import prefer_latency


@pytest.mark.skipif(platform.system() != "Linux", reason="of Linux")
def test_a_thread_takes_it_and_keeps_its_priority() -> None:
    """A nicer thread takes it too, because nothing here needs a privilege."""
    seen: list[tuple[bool, int]] = []

    def run() -> None:
        os.nice(3)  # of this thread
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        seen.append((prefer_latency(), os.getpriority(os.PRIO_PROCESS, 0) - nice))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(True, 0)]
