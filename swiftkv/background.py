"""Load a model so that it gives way to other work: in threads and a session of low priority.

Without privileges Linux lets a thread lower its priority but not raise it again. So the work runs in a thread that ends
with it, and the thread that waits for it keeps its own priority. If the session has a group of its own in the kernel's
scheduler (autogroups of sched(7)), its weight as a whole counts, whatever the priorities of its threads; that weight
can be restored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE_VARIABLE = "SWIFTKV_GIVE_WAY_S"
"""The environment variable with the seconds for which an engine's load gives way to others."""

_NICENESS = 12  # about a fifteenth of a core, beside one other thread
_AUTOGROUP = Path("/proc/self/autogroup")
_RETRY_S = 0.02
_RETRIES = 100  # Linux takes one change in a tenth of a second, of all processes together


class Background:
    """Gives way to others for `patience_s` from now on, and no longer, so that a load ends even on a busy machine.

    A thread that may not raise its priority again stays low, and so do the threads that it has started.
    """

    def __init__(self, patience_s: float) -> None:
        self._ends_s = time.monotonic() + patience_s
        leads_session = os.getsid(0) == os.getpid()  # otherwise other processes would give way, too
        self._is_session_low = patience_s > 0 and leads_session and _set_session_niceness(_NICENESS)

    def run(self, work: Callable[[], T]) -> T:
        """Do `work`, in a thread of low priority while patience lasts; return its result or raise its error."""
        if self.left_s == 0:
            return work()
        ids: Future[int] = Future()
        threads = ThreadPoolExecutor(1, "background", initializer=_lower, initargs=(ids,))
        result = threads.submit(work)
        threads.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            return result.result(self.left_s)
        self.end()
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, ids.result(), os.getpriority(os.PRIO_PROCESS, 0))
        return result.result()

    def end(self) -> None:
        """Give way no longer."""
        self._ends_s = 0.0
        if self._is_session_low:
            self._is_session_low = not _set_session_niceness(0)

    @property
    def left_s(self) -> float:
        """The seconds for which it still gives way."""
        return max(0.0, self._ends_s - time.monotonic())


FOREGROUND = Background(0.0)
"""A background that never gives way."""


def patience_s() -> float:
    """Return the seconds for which this process's load gives way to others."""
    return float(os.environ.get(PATIENCE_VARIABLE, "0"))


def _lower(ids: Future[int]) -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)  # of this thread alone
    ids.set_result(thread)


def _set_session_niceness(niceness: int) -> bool:
    """Set the niceness of this session's group; return whether the system took it."""
    for _ in range(_RETRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:
            time.sleep(_RETRY_S)
        except OSError:  # this system has no such groups
            return False
        else:
            return True
    logger.warning(
        "cannot change the niceness of this session: the kernel allows few changes, and other sessions make them"
    )
    return False
