"""The id under which one request can be found again, and one line of JSON for each request that has ended."""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv.errors import ConfigError
from swiftkv.lease.messages import LeasedBytes
from swiftkv.output import DetachedStream
from swiftkv.server.errors import speaks_anthropic
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.limits import MONITORING_PATHS, without_model

logger = logging.getLogger(__name__)
ID_HEADER = "X-Request-Id"
_ANTHROPIC_ID_HEADER = "request-id"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GONE = 499
"""The status of a request whose client hung up before its answer began."""
_LONGEST_PATH = 256  # characters in a line
SKIPPED_PATHS = MONITORING_PATHS | {"/version"}


def _warn(error: OSError) -> None:
    """Log that lines are lost from now on."""
    logger.warning("node.request_log: lines are lost until there is room for them: %s", error.strerror)


@dataclass(slots=True)
class RequestRecord:
    """The figures of one HTTP request: routes and engine clients fill in what they know of it."""

    request_id: str
    model: str | None = None
    tenant: str | None = None
    finished: Sequence[FinishedRequest] = ()
    """Its sequences, as far as they have ended."""
    status: int = _GONE
    is_traced: bool = False
    began_s: float = field(default_factory=time.perf_counter)


class RequestLog:
    """A file that gets one line of JSON for each request. Writing to it never waits, and never fails."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written to."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"node.request_log: cannot write to {path}: {reason}; name another file, or null"
            ) from None
        self._stream = DetachedStream(fd, patience_s=0.0, mark=b'{"lost_lines":%d}\n', on_lost=_warn)

    def write(self, record: RequestRecord, method: str, path: str) -> None:
        """Add the line of a request that has ended now."""
        self._stream.write(json.dumps(_line(record, method, path), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Give written lines a second to reach the file."""
        self._stream.drain(1.0)


@contextmanager
def open_request_log(path: str | None) -> Iterator[RequestLog | None]:
    """Yield the log at `path`, relative to the working directory, or `None` without a path.

    Raises `ConfigError` if the file cannot be written to.
    """
    if path is None:
        yield None
        return
    with closing(RequestLog(Path(path))) as log:
        yield log


class RequestIdMiddleware:
    """Gives every request an id, sends it with the answer, and writes the request's line once its answer has ended.

    The id is the client's own, if it sent a sound one. Requests of monitoring get a line only if they fail.
    """

    def __init__(self, app: ASGIApp, log: RequestLog | None) -> None:
        self.app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)), is_traced=self._log is not None)
        scope.setdefault("state", {})["record"] = record
        id_headers = (ID_HEADER, _ANTHROPIC_ID_HEADER) if speaks_anthropic(scope["path"]) else (ID_HEADER,)

        async def send_with_id(event: Message) -> None:
            if event["type"] == "http.response.start":
                record.status = event["status"]
                for name in id_headers:
                    MutableHeaders(scope=event)[name] = record.request_id
            await send(event)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            _log_failure(record, scope["method"], scope["path"])
            if self._log is not None and not (without_model(scope["path"]) in SKIPPED_PATHS and record.status < 400):
                self._log.write(record, scope["method"], scope["path"])


def _log_failure(record: RequestRecord, method: str, path: str) -> None:
    """Log a request that was refused or failed, unless its client hung up.

    `LogLimit` tells kinds of messages apart by their text without arguments. The status is in this text; the path is an
    argument, because clients choose it.
    """
    if record.status < 400 or record.status == _GONE:
        return
    level = logging.WARNING if record.status >= 500 else logging.INFO
    shown = path[:_LONGEST_PATH].encode("unicode_escape").decode()
    logger.log(level, f"%s %s was answered {record.status} (request %s)", method, shown, record.request_id)


def _request_id(headers: Headers) -> str:
    """Return the id that the client sent, or a new one: a line of the log shows at most 128 plain characters."""
    sent = headers.get(ID_HEADER, "")
    return sent if _ID.fullmatch(sent) else uuid.uuid4().hex


def _line(record: RequestRecord, method: str, path: str) -> dict[str, Any]:
    """Return a request's line; seconds are rounded to tenths of a millisecond."""
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "method": method,
        "path": path[:_LONGEST_PATH],
        "model": record.model,
        "status": record.status,
        "total_s": round(time.perf_counter() - record.began_s, 4),
    }
    if record.tenant is not None:
        line["tenant"] = record.tenant
    return line | _generated(record.finished) if record.finished else line


def _generated(finished: Sequence[FinishedRequest]) -> dict[str, Any]:
    """Return the figures of a request's sequences together: the longest wait, the first token, and the last."""
    first_s = _present(sequence.first_token_s for sequence in finished)
    queue_s = _present(sequence.queue_s for sequence in finished)
    return {
        "sequences": len(finished),
        "finish_reasons": sorted({sequence.reason for sequence in finished}),
        "queue_s": round(max(queue_s), 4) if queue_s else None,
        "first_token_s": round(min(first_s), 4) if first_s else None,
        "last_token_s": round(max(sequence.e2e_s for sequence in finished), 4),
        "exposed_s": round(max(sequence.exposed_s for sequence in finished), 4),
        "prompt_tokens": sum(sequence.prompt_tokens for sequence in finished),
        "cached_tokens": sum(sequence.cached_tokens for sequence in finished),
        "cached_tokens_details": _by_tier(finished),
        "generated_tokens": sum(sequence.generation_tokens for sequence in finished),
        "leased_bytes": _leased(finished),
    }


def _by_tier(finished: Sequence[FinishedRequest]) -> dict[str, int]:
    """Return the cached tokens of all sequences by where their KV lay."""
    counts: Counter[str] = Counter()
    for sequence in finished:
        counts.update(sequence.cached_by_tier)
    return dict(counts)


def _leased(finished: Sequence[FinishedRequest]) -> dict[str, int]:
    """Return the bytes that the model lent, borrowed or gave back meanwhile: the most that a sequence has seen."""
    seen = [msgspec.structs.asdict(sequence.leased) for sequence in finished]
    return {way: max(leased[way] for leased in seen) for way in LeasedBytes.__struct_fields__}


def _present(seconds: Iterable[float | None]) -> list[float]:
    return [value for value in seconds if value is not None]
