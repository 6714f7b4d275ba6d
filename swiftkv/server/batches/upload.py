"""Uploads of files: multipart/form-data, written to disk piece by piece in threads, never held in memory."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from swiftkv.server.batches.objects import UPLOAD_PURPOSE, StoredFile, new_id, now_s
from swiftkv.server.batches.storage import Storage, failure
from swiftkv.server.errors import ApiError
from swiftkv.server.streaming import ClientGone

FORM_OVERHEAD_BYTES = 64 << 10
"""The most bytes of an upload besides its file: boundaries, headers of parts, other fields."""

_MAX_PARTS = 16
_MAX_FIELD_BYTES = 1024
_MAX_FILENAME_CHARS = 255
_NOT_MULTIPART = (
    "the body must be a form with the fields file and purpose, with 'Content-Type: multipart/form-data; boundary=…'"
)
_FIELDS = ("file", "purpose")

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients are told what is wrong with their forms


async def receive_upload(request: Request, storage: Storage) -> StoredFile:
    """Write the file of a form to where the store looks for it, and add it to the store.

    Raises:
        ApiError: 400, 413 or 507 for a form or a file that is refused, 403 if a web page of another site sends it.
        ClientGone: the client hung up.
    """
    _refuse_other_origins(request)
    threads = storage.upload_threads
    file_id = new_id("file-")
    path = await storage.call(lambda store: store.content_path(file_id))
    form = _Form(_boundary(request.headers.get("content-type", "")), path, storage.limits.max_file_bytes)
    reserved_bytes = 0
    try:
        async for piece in request.stream():
            storage.reserve(len(piece))
            reserved_bytes += len(piece)
            await threads.run(partial(form.write, piece), len(piece))
        filename, num_bytes = await threads.run(form.finish)
        file = StoredFile(file_id, num_bytes, now_s(), filename, UPLOAD_PURPOSE)
        form.is_kept = True  # from now on the store may have it, even if this task is cancelled
        await storage.call(lambda store: store.add_file(file))
        reserved_bytes -= num_bytes
    except ApiError:
        form.is_kept = False
        raise
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        storage.release(reserved_bytes)
        await asyncio.to_thread(form.close)
    return file


def _refuse_other_origins(request: Request) -> None:
    """Raise `ApiError` 403 for a form from another site's page: a browser sends it without asking the node first."""
    origin = request.headers.get("origin")
    if origin is not None and _place_of(origin) != request.headers.get("host"):
        raise ApiError(403, "uploads from web pages of other sites are not accepted", code="origin_not_allowed")


def _place_of(origin: str) -> str | None:
    """Return the host and port of an origin; `None` if it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, _NOT_MULTIPART)
    return boundary


class _Form:
    """Parses a form with one file. `write`, `finish` and `close` touch the disk: call them in a thread.

    A thread may still write after the request was given up, and must never write to a descriptor that is closed.
    """

    def __init__(self, boundary: bytes, path: Path, max_file_bytes: int) -> None:
        self.is_kept = False
        self._lock = threading.Lock()
        self._is_closed = False
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._descriptor: int | None = None
        self._num_bytes = 0
        self._num_parts = 0
        self._filename = ""
        self._fields: dict[str, bytes] = {}
        self._part = ""
        self._header_name, self._header_value, self._disposition = b"", b"", b""
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise ApiError(400, f"{_NOT_MULTIPART} ({error})") from None

    def write(self, piece: bytes) -> None:
        """Take the next bytes of the body. Bytes after the form are ignored."""
        try:
            with self._lock:
                if piece and not self._is_closed and not self._has_ended:
                    self._parser.write(piece)
        except FormParserError as error:
            raise ApiError(400, f"the body is not valid multipart/form-data: {error}") from None
        except OSError as error:
            raise failure(error) from error

    def finish(self) -> tuple[str, int]:
        """Make sure that the file is whole and on disk; return its name and its size in bytes."""
        if not self._has_ended:
            raise ApiError(400, f"the body ends before the form does; {_NOT_MULTIPART}")
        if self._descriptor is None:
            raise ApiError(400, "field 'file' is required", param="file", code="missing_field")
        purpose = self._fields.get("purpose", b"").decode(errors="replace")
        if not purpose:
            raise ApiError(400, "field 'purpose' is required", param="purpose", code="missing_field")
        if purpose != UPLOAD_PURPOSE:
            raise ApiError(400, f"field 'purpose': only '{UPLOAD_PURPOSE}' is supported", param="purpose")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise failure(error) from error
        return self._filename, self._num_bytes

    def close(self) -> None:
        """Close the file, and remove it unless it is kept."""
        with self._lock:
            self._is_closed = True
            if self._descriptor is None:
                return
            os.close(self._descriptor)
        if not self.is_kept:
            self._path.unlink(missing_ok=True)

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"the form has more than {_MAX_PARTS} parts", code="limit_exceeded")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode(errors="replace")
        if self._part not in _FIELDS:
            raise ApiError(
                400, f"field '{self._part[:64]}' is not supported", param=self._part[:64], code="unsupported_field"
            )
        if self._part in self._fields or (self._part == "file" and self._descriptor is not None):
            raise ApiError(400, f"field '{self._part}' comes twice", param=self._part)
        if self._part == "file":
            self._filename = options.get(b"filename", b"").decode(errors="replace")[:_MAX_FILENAME_CHARS] or "file"
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            self._fields[self._part] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._write_file(memoryview(data)[start:end])
            return
        field = self._fields[self._part] = self._fields[self._part] + data[start:end]
        if len(field) > _MAX_FIELD_BYTES:
            raise ApiError(400, f"field '{self._part}' is longer than {_MAX_FIELD_BYTES} bytes", param=self._part)

    def _write_file(self, data: memoryview) -> None:
        assert self._descriptor is not None
        self._num_bytes += len(data)
        if self._num_bytes > self._max_file_bytes:
            message = f"the file is larger than {self._max_file_bytes} bytes (node.batches.max_file)"
            raise ApiError(413, message, param="file", code="file_too_large")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _on_end(self) -> None:
        self._has_ended = True
