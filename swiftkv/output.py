"""Standard output and standard error that never block and never fail, and a standard output that fails in words."""

from __future__ import annotations

import atexit
import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MAX_QUEUED = 4096  # writes
_LONGEST_WRITE = 64 << 10  # bytes
_EXIT_PATIENCE_S = 1.0


class DetachedStream(io.TextIOBase):
    """A text stream that a thread of its own writes out.

    Text that cannot be written is dropped, as when the reader of a pipe is gone or stalls, or the disk is full. The
    next line that gets through says how much was lost.
    """

    def __init__(
        self,
        fd: int,
        patience_s: float,
        *,
        mark: bytes = b"[%d writes were lost here]\n",
        on_lost: Callable[[OSError], None] | None = None,
    ) -> None:
        """Write to `fd`. `flush` waits at most `patience_s` for the text to get out; with 0 it does not wait.

        `mark` is the line that says how much was lost. `on_lost` is called, in the writing thread, for the first write
        that fails after one that did not.
        """
        self._fd = fd
        self._patience_s = patience_s
        self._mark = mark
        self._on_lost = on_lost
        self._is_failing = False
        self._is_torn = False  # the last line that was begun has no end
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._has_stalled = False
        self._num_lost = 0
        threading.Thread(target=self._write_out, name=f"output {fd}", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(text.encode("utf-8", "backslashreplace")[:_LONGEST_WRITE])
        else:
            self._num_lost += 1
        return len(text)

    def flush(self) -> None:
        """Wait up to `patience_s` for the text to get out; after a wait in vain, return at once until some does."""
        if self._patience_s and not self._has_stalled:
            self.drain(self._patience_s)

    def drain(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all text written so far is out."""
        written = threading.Event()
        self._queue.put(written)
        self._has_stalled = not written.wait(timeout_s)

    def end(self) -> None:
        """Wait up to a second for the text to get out, and from now on do not wait.

        The interpreter flushes once more when its other threads no longer run.
        """
        self.drain(_EXIT_PATIENCE_S)
        self._patience_s = 0.0

    def _write_out(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write_bytes(item)
            self._has_stalled = False

    def _write_bytes(self, data: bytes) -> None:
        num_lost = self._num_lost
        if num_lost:
            data = b"\n" * self._is_torn + self._mark % num_lost + data
        rest = data
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:  # the reader is gone, or there is no room
            self._num_lost += 1
            self._is_torn |= len(rest) < len(data)
            if self._on_lost is not None and not self._is_failing:
                self._on_lost(error)
            self._is_failing = True
        else:
            self._num_lost -= num_lost
            self._is_torn = self._is_failing = False


def detach_output(patience_s: float = 0.0) -> None:
    """Make `sys.stdout` and `sys.stderr` of this process streams that never block and never raise.

    Call it before logging is set up. `patience_s` is as for `DetachedStream`; text that is left at exit gets a second.
    """
    streams = [DetachedStream(fd, patience_s) for fd in (1, 2)]
    sys.stdout, sys.stderr = streams
    for stream in streams:
        atexit.register(stream.end)


def drain_output() -> None:
    """Wait up to a second for what was written to detached streams: for a process that ends without `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, DetachedStream):
            stream.end()


def open_standard_descriptors() -> None:
    """Open /dev/null for descriptors 0 to 2 if they are closed. Call it before a socket gets such a number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class _StandardOutput(io.FileIO):
    """Standard output that ends the process when it cannot be written, with a line on stderr that says why."""

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for the text that is still buffered
            os.close(null)
            if not isinstance(error, BrokenPipeError):  # whose reader wants no more
                print(f"swiftkv: standard output cannot be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


@contextmanager
def failures_of_output_as_lines() -> Iterator[None]:
    """Turn a failure to write standard output, on a full disk for instance, into a line on stderr and exit code 1.

    Characters that its encoding does not have are written as escapes.
    """
    open_standard_descriptors()
    given = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # Python has none if it was closed
    if isinstance(given, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(given.fileno(), "w", closefd=False)),
            encoding=given.encoding,
            errors="backslashreplace",
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )
    try:
        yield
    finally:
        sys.stdout.flush()
