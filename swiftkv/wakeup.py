"""Wake a loop that waits for file descriptors, from any thread."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A file descriptor that becomes readable when a thread wakes the loop that polls it.

    Wakes that come after it is closed are lost: the descriptor's number may be that of another file by then.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._lock = threading.Lock()

    def wake(self) -> None:
        """End the poll in progress, or otherwise the next one."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def take(self) -> bool:
        """Return whether the loop was woken since the last call."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
