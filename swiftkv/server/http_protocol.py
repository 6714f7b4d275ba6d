"""uvicorn's HTTP protocol with an end to request heads: its own reads headers until memory is full."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from swiftkv.server.errors import ApiError

MAX_HEAD_BYTES = 64 << 10


class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 431 to a request whose line and headers go beyond `MAX_HEAD_BYTES`, and hangs up."""

    _reading_head = False
    _head_bytes = 0
    _completed_one = False

    def on_message_begin(self) -> None:
        self._reading_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reading_head = False
        if not self._refused():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._completed_one = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._completed_one = False
        super().data_received(data)
        if self._reading_head and not self.transport.is_closing():
            if not self._completed_one:  # else who knows how much of it was an earlier request's
                self._head_bytes += len(data)
            self._refused()

    def _refused(self) -> bool:
        """Whether the head is too long, which is then answered. What came with it in one read counts too."""
        num_bytes = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if max(num_bytes, self._head_bytes if self._reading_head else 0) <= MAX_HEAD_BYTES:
            return False
        body = ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes").body()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()
        return True
