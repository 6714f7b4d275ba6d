"""Parses and checks the bodies of requests, without holding up the event loop for a large one."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Depends
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request

from swiftkv.server.errors import ApiError
from swiftkv.server.fields import Body
from swiftkv.server.limits import Rounds
from swiftkv.server.messages_api.body import CountTokensBody, MessagesBody
from swiftkv.server.pooling.bodies import EmbeddingBody, RerankBody, ScoreBody
from swiftkv.server.price import check_json
from swiftkv.server.protocol import (
    BatchBody,
    BudgetBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ModelSection,
    PinBody,
    StorageSection,
    TokenizeBody,
    explain_invalid,
)
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.streaming import ClientGone, unless_gone
from swiftkv.server.tenants import sender_of
from swiftkv.server.threads import BoundedThreads

B = TypeVar("B", bound=Body)

_SMALL_BYTES = 8 << 10
"""A body up to this size is parsed on the event loop: it takes less than a millisecond, whatever it holds."""

_MAX_ERRORS = 16
_BODIES: tuple[type[Body], ...] = (
    CompletionBody, ChatBody, ResponsesBody, MessagesBody, CountTokensBody, TokenizeBody, DetokenizeBody, BudgetBody,
    BatchBody, ModelSection, StorageSection, PinBody, EmbeddingBody, ScoreBody, RerankBody,
)  # fmt: skip


def body_threads() -> BoundedThreads:
    """Return the threads that parse an app's large bodies: keep them as `app.state.body_threads`."""
    return BoundedThreads("the parsing of large bodies")


def parse_body(content: bytes, body_type: type[B], *, leaves_out_unknown: bool = False) -> B:
    """Check the size of everything in `content`, then parse and validate it.

    Unknown fields are ignored with `leaves_out_unknown`, and refused without.

    Raises:
        ApiError: 413 if it holds too much, 400 if it is not a valid `body_type`.
    """
    if len(content) > _SMALL_BYTES:
        check_json(content)
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deeply", code="invalid_json") from None
    try:
        return body_type.model_validate(value, extra="ignore" if leaves_out_unknown else None)
    except ValidationError as error:
        errors = error.errors(include_url=False)[:_MAX_ERRORS]
        raise explain_invalid([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None


def parsed(body_type: type[B]) -> Any:
    """Return the annotation of a route's parameter that is to be the request's body.

    Reading it sets `request.state.num_body_bytes`, its size, and `request.state.reading_s`, the time from its last byte
    until it was parsed.
    """
    return Depends(_reader(body_type))


def body_document(body_type: type[Body]) -> dict[str, Any]:
    """Return the part of a route's OpenAPI document that describes its body."""
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas() -> dict[str, Any]:
    """Return the schemas of all bodies, for the OpenAPI document."""
    _, document = models_json_schema(
        [(body_type, "validation") for body_type in _BODIES], ref_template="#/components/schemas/{model}"
    )
    return dict(document["$defs"])


def _reader(body_type: type[B]) -> Callable[[Request], Coroutine[Any, Any, B]]:
    async def read(request: Request) -> B:
        pieces = await _pieces(request)
        # Many bodies may end, or lose their clients, in the same instant.
        rounds: Rounds = request.app.state.rounds
        await rounds.take()
        if pieces is None:
            raise ClientGone
        num_bytes = request.state.num_body_bytes = sum(map(len, pieces))
        if not num_bytes or not _is_json(request.headers.get("content-type", "")):
            raise ApiError(400, "the body must be a JSON object, with 'Content-Type: application/json'")
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise ApiError(400, "the body has a Content-Encoding, which this server cannot decode: send plain JSON")

        is_lenient = body_type.lenient_with is not None and body_type.lenient_with in request.headers

        def parse() -> B:
            content = b"".join(pieces)
            pieces.clear()
            return parse_body(content, body_type, leaves_out_unknown=is_lenient)

        if num_bytes <= _SMALL_BYTES:
            body = parse()
        else:  # joining 16 MiB takes milliseconds, too
            threads: BoundedThreads = request.app.state.body_threads
            body = await unless_gone(request.receive, threads.run(parse, num_bytes, sender_of(request)))
        request.state.reading_s = time.perf_counter() - request.state.came_s
        return body

    return read


async def _pieces(request: Request) -> list[bytes] | None:
    """Return the body as it came, or `None` if the client hung up first. Nothing else may read the body after this."""
    pieces: list[bytes] = []
    has_more = True
    while has_more:
        event = await request.receive()
        if event["type"] == "http.disconnect":
            return None
        pieces.append(event.get("body", b""))
        has_more = event.get("more_body", False)
    return pieces


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
