"""The lines of a batch's files: requests that are checked before any of them runs, and the results of each."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from swiftkv.server.batches.objects import LineError, LineFailure, LineResponse, LineResult, new_id
from swiftkv.server.body import parse_body
from swiftkv.server.errors import ApiError
from swiftkv.server.json_lines import json_line
from swiftkv.server.price import LIMITS
from swiftkv.server.protocol import ChatBody, CompletionBody

ENDPOINTS: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}
MAX_ERRORS = 100
"""The most mistakes reported of one input file; it is not read further then."""

UNFINISHED = {
    "expired": LineFailure("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": LineFailure("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
"""The failure of lines without a result, by the status that ends their batch."""


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A line that may run. `start` and `length` say where it lies in the input file, in bytes."""

    number: int
    start: int
    length: int
    custom_id: str
    model: str


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None


def check_line(
    text: bytes, number: int, start: int, endpoint: str, own_names: Mapping[str, str]
) -> CheckedLine | LineError:
    """Check all of a line except the fields of its body, which are checked when it runs.

    `own_names` maps each name that a line may write to the model's own name, and '' to the model of lines that name
    none.
    """
    try:
        content = text.removeprefix(codecs.BOM_UTF8).decode()
        line = msgspec.json.decode(content, type=_Line)  # of bytes, what is not looked at would not be checked
        body = msgspec.json.decode(line.body, type=_Body)
        custom_id, asked = line.custom_id.encode().decode(), (body.model or "").encode().decode()
    except msgspec.ValidationError as error:
        return _error("invalid_request", number, f"{error}; a line has the fields custom_id, method, url and body")
    except (msgspec.DecodeError, UnicodeError) as error:
        return _error("invalid_json_line", number, f"This line is not parseable as valid JSON: {error}")
    except RecursionError:
        return _error("invalid_json_line", number, "This line is nested too deeply")
    if not 0 < len(custom_id) <= LIMITS.label_chars:
        return _error(
            "invalid_custom_id", number, f"custom_id must have 1 to {LIMITS.label_chars} characters", "custom_id"
        )
    if line.method != "POST":
        return _error("invalid_method", number, f"method is {line.method[:16]!r}; it must be POST", "method")
    if line.url != endpoint:
        return _error("url_mismatch", number, f"url is {line.url[:64]!r}; the batch is for {endpoint}", "url")
    return CheckedLine(number, start, len(text), custom_id, own_names.get(asked, asked))


def duplicate(line: CheckedLine) -> LineError:
    """Return the error of a line whose custom_id another line has."""
    message = f"The custom_id {line.custom_id[:64]!r} is used by another line; it must be unique in a batch"
    return _error("duplicate_custom_id", line.number, message, "custom_id")


def too_long(number: int, max_bytes: int) -> LineError:
    """Return the error of a line that is longer than any request may be."""
    return _error("line_too_long", number, f"This line is longer than {max_bytes} bytes (node.max_body)")


def _error(code: str, number: int, message: str, param: str | None = None) -> LineError:
    return LineError(code, f"line {number}: {message}", param, number)


def parse_line(text: bytes) -> ChatBody | CompletionBody:
    """Return the body of a checked line as a request of the lowest service tier.

    Raises:
        ApiError: 400 or 413, as for a client that sends the same body.
    """
    try:
        line = msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8), type=_Line)
        body_type = ENDPOINTS[line.url]
    except (msgspec.DecodeError, KeyError):
        raise ApiError(400, "the line has changed since the batch was checked", code="invalid_json_line") from None
    body = parse_body(bytes(line.body), body_type)
    if body.stream:
        raise ApiError(400, "field 'stream' is not supported in a batch", param="stream", code="unsupported_field")
    body.service_tier = "batch"
    return body


def answered(custom_id: str, answer: msgspec.Struct) -> bytes:
    """Return the line of an output file."""
    return _result(custom_id, LineResponse(200, new_id("req_"), msgspec.Raw(json_line(answer))), None)


def refused(custom_id: str, error: ApiError) -> bytes:
    """Return the line of an error file for a request that was answered with an error."""
    return _result(custom_id, LineResponse(error.status, new_id("req_"), msgspec.Raw(error.body())), None)


def unfinished(custom_id: str, status: str) -> bytes:
    """Return the line of an error file for a request that did not run, or not to its end."""
    return _result(custom_id, None, UNFINISHED[status])


def _result(custom_id: str, response: LineResponse | None, failure: LineFailure | None) -> bytes:
    return json_line(LineResult(new_id("batch_req_"), custom_id, response, failure))
