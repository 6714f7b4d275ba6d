"""Raw connections to the node that hostile.py attacks: an HTTP library would refuse to send what attacks send."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from threading import Lock

KEY_VARIABLE = "SWIFTKV_HOSTILE_KEY"
PIECE = 1 << 16
_ANSWER_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Target:
    """The node, and the model of it that is attacked."""

    host: str
    port: int
    model: str
    key: str
    held: list[socket.socket] = field(default_factory=list)
    """Connections that stay open until the end."""
    _answers: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def count(self, answer: str, number: int = 1) -> None:
        """Count answers of one kind. Any thread may call this."""
        with self._lock:
            self._answers[answer] += number

    def answers(self) -> dict[str, int]:
        """Return the number of each answer so far."""
        with self._lock:
            return {answer: count for answer, count in self._answers.items() if count}

    def connect(self, receive_buffer: int | None = None) -> socket.socket | None:
        """Return a connection, or `None` if none could be made, which counts as the answer `refused`."""
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect((self.host, self.port))
        except OSError:
            connection.close()
            self.count("refused")
            return None
        return connection

    def head(self, path: str, *fields: str, key: str | None = None) -> bytes:
        """Return the head of a POST of JSON, without the empty line that ends it."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
        lines.append(f"Authorization: Bearer {self.key if key is None else key}")
        return "\r\n".join(lines).encode() + b"\r\n"

    def post(self, path: str, body: bytes) -> bytes:
        """Return a whole request."""
        return self.head(path, f"Content-Length: {len(body)}") + b"\r\n" + body

    def ask(self, path: str, body: bytes) -> None:
        """Send one request and read its answer to the end."""
        self.ask_raw(self.post(path, body))

    def ask_raw(self, request: bytes, *more: bytes) -> None:
        if connection := self.connect():
            with connection:
                self.send(connection, request, *more)
                self.read(connection)

    def ask_together(self, requests: Sequence[bytes]) -> None:
        """Send every request over a connection of its own before any answer is read."""
        connections = [connection for _ in requests if (connection := self.connect())]
        for connection, request in zip(connections, requests, strict=False):
            self.send(connection, request)
        for connection in connections:
            with connection:
                self.read(connection)

    def send(self, connection: socket.socket, *parts: bytes) -> bool:
        """Send as much as the node takes, and return whether that was all."""
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:  # the node answered early and hung up, or does not read
            return False
        return True

    def read(self, connection: socket.socket) -> None:
        """Count the status of an answer, and read it to its end or to the time limit."""
        self.count("waiting")
        try:
            with connection.makefile("rb") as answer:
                status = answer.readline(256).decode(errors="replace").partition(" ")[2][:3]
                self.count(status or "closed")
                _read_rest(answer)
        except TimeoutError:
            self.count("no answer")
        except OSError:
            self.count("closed")
        self.count("waiting", -1)


def _read_rest(answer: BufferedReader) -> None:
    length = -1  # unknown: the answer is chunked, or lasts until the end of the connection
    while (line := answer.readline(PIECE)).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while length > 0 and (data := answer.read1(min(length, PIECE))):
        length -= len(data)
    while length < 0 and (data := answer.read1(PIECE)):
        if data.endswith(b"0\r\n\r\n"):
            break


def still_open(connection: socket.socket) -> bool:
    """Return whether the node has not hung up. Bytes that it has sent are thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(PIECE):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
