"""A thread that calls storage, so that the engine's thread never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StorageThread:
    """One thread, the condition that guards the state it shares with the engine's thread, and the way it ends."""

    def __init__(self, name: str, serve: Callable[[], None], wake_engine: Callable[[], None]) -> None:
        """`serve` runs in the thread, and returns soon after `is_closing` is set."""
        self.changed = threading.Condition()
        self.is_closing = False  # under `changed`
        self._serve = serve
        self._wake_engine = wake_engine
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise `RuntimeError` if a defect ended the thread."""
        if self._has_failed:
            raise RuntimeError(f"the thread '{self._thread.name}' has ended; its traceback is on standard error")

    def close(self) -> None:
        """Have the thread end once its call in progress returns."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def join(self, patience_s: float) -> None:
        """Wait for the end of the thread; one that hangs in the backend ends with the process."""
        self._thread.join(patience_s)

    def _run(self) -> None:
        is_done = False
        try:
            self._serve()
            is_done = True
        finally:
            if not is_done:
                self._has_failed = True
                self._wake_engine()
