"""Limit how often clients' mistakes are logged: otherwise a client could make the node write as fast as it sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOGGERS = ("uvicorn.error", "asyncio", "swiftkv.server.request_log")
MAX_KINDS = 256
"""The most kinds of messages that are remembered; a new one takes the place of the oldest."""


@dataclass(slots=True)
class _Message:
    next_s: float
    num_left_out: int = 0


class LogLimit(logging.Filter):
    """Let each kind of message through once in an interval, with the number of those that were left out."""

    def __init__(self, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._messages: dict[tuple[object, ...], _Message] = {}

    @property
    def num_kinds(self) -> int:
        """The number of kinds that are remembered."""
        return len(self._messages)

    def install(self) -> None:
        """Limit what a gateway logs because of its clients. May be called more than once."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        kind = _kind(record)
        if kind not in self._messages and len(self._messages) >= MAX_KINDS:
            del self._messages[next(iter(self._messages))]
        message = self._messages.setdefault(kind, _Message(now_s))
        if now_s < message.next_s:
            message.num_left_out += 1
            return False
        if message.num_left_out:
            record.msg = f"{str(record.msg).rstrip()} ({message.num_left_out} more like it were left out)"
        message.next_s, message.num_left_out = now_s + self._interval_s, 0
        return True


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    """Return the first line of the message before its arguments are filled in, and the line of its exception.

    The second line of asyncio's message about a failed task has the task's number, which is never the same.
    """
    _, error, traceback = record.exc_info or (None, None, None)
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = None if traceback is None else (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
    return record.name, str(record.msg).partition("\n")[0], type(error), where
