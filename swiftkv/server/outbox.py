"""Send messages to one engine, bounded by what the engine has read; no abort is ever lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from swiftkv.engine.messages import Abort, ToEngine

_RESEND_S = 0.05
_MAX_UNREAD_MESSAGES = 4096
_MAX_UNREAD_BYTES = 64 << 20
"""The most that an engine may leave unread. It reads between two steps; until then this lies in memory."""


class Outbox:
    """The messages to one engine. The engine reports how many it has taken; those sent since are unread."""

    def __init__(self, socket: zmq.Socket[bytes], aborts_sent: Callable[[], None]) -> None:
        """`aborts_sent` is called when aborts that had to wait have been sent, or their engine is gone."""
        self._socket = socket
        self._aborts_sent = aborts_sent
        self._encoder = msgspec.msgpack.Encoder()
        self._unread_sizes: deque[int] = deque()
        self._unread_bytes = 0
        self._num_taken = 0
        self._unsent_aborts: list[int] = []
        self._resend: asyncio.TimerHandle | None = None

    @property
    def num_unread(self) -> int:
        return len(self._unread_sizes)

    @property
    def num_unsent_aborts(self) -> int:
        """The number of sequences whose abort has not been sent to the engine yet."""
        return len(self._unsent_aborts)

    def has_room(self, num_messages: int, num_bytes: int) -> bool:
        """Return whether this many more messages and bytes may wait for the engine."""
        is_full = self.num_unread + num_messages > _MAX_UNREAD_MESSAGES
        return not is_full and self._unread_bytes + num_bytes <= _MAX_UNREAD_BYTES

    def send(self, message: ToEngine) -> bool:
        """Send without waiting; return `False` if the socket takes nothing, as when no engine is connected."""
        frame = self._encoder.encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._unread_sizes.append(len(frame))
        self._unread_bytes += len(frame)
        return True

    def abort(self, request_ids: Sequence[int]) -> None:
        """Have the engine end sequences: now, or as soon as a message can be sent."""
        self._unsent_aborts += request_ids
        self._send_aborts()

    def taken(self, total: int) -> None:
        """Note that the engine has taken `total` messages since it started."""
        while self._num_taken < total and self._unread_sizes:
            self._unread_bytes -= self._unread_sizes.popleft()
            self._num_taken += 1

    def reset(self) -> None:
        """Forget everything: the engine is gone, or has just started."""
        self._stop_resending()
        self._unread_sizes.clear()
        self._unread_bytes = self._num_taken = 0
        self._unsent_aborts = []
        self._aborts_sent()

    def _send_aborts(self) -> None:
        self._stop_resending()
        # Aborts have a higher limit than requests: they make room, and cannot be more than there are sequences.
        has_room = self.num_unread < 2 * _MAX_UNREAD_MESSAGES
        if has_room and self.send(Abort(self._unsent_aborts)):
            self._unsent_aborts = []
            self._aborts_sent()
            return
        self._resend = asyncio.get_running_loop().call_later(_RESEND_S, self._send_aborts)

    def _stop_resending(self) -> None:
        if self._resend is not None:
            self._resend.cancel()
            self._resend = None
