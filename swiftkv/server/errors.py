"""Errors as clients see them.

They have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and below `/v1/messages` Anthropic's,
`{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from swiftkv.server.limits import without_model

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
    507: "insufficient_storage_error",
}
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ANTHROPIC_PATH = re.compile(r"/v1/messages(?:/|$)")


def speaks_anthropic(path: str) -> bool:
    """Return whether clients of `path` expect Anthropic's errors and headers."""
    return _ANTHROPIC_PATH.match(without_model(path)) is not None


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    error: AnthropicErrorDetail
    type: Literal["error"] = "error"


class ApiError(Exception):
    """The answer to a request that fails: HTTP status, message, the field at fault, seconds to wait."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with other names for the fields that it quotes."""
        message = self.message
        for name, other in names.items():
            message = message.replace(f"'{name}'", f"'{other}'")
        param = self.param and names.get(self.param, self.param)
        return ApiError(self.status, message, param=param, code=self.code, retry_after_s=self.retry_after_s)

    def answer(self) -> ErrorResponse:
        """Return the error as a client sees it."""
        # A message may quote the client, whose JSON may hold halves of surrogate pairs, for which UTF-8 has no bytes.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        param = self.param and self.param.encode("utf-8", "backslashreplace").decode()
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorResponse(ErrorDetail(message, kind, param, self.code or kind))

    def body(self) -> bytes:
        """Return the error as JSON."""
        return msgspec.json.encode(self.answer())

    def anthropic_answer(self) -> AnthropicError:
        """Return the error as a client of Anthropic's sees it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = self.answer().error.message
        if self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # at these words Claude Code shortens the conversation
        return AnthropicError(AnthropicErrorDetail(kind, message))

    def response(self, path: str = "") -> Response:
        """Return the answer to a request for `path`."""
        headers = {}
        if self.retry_after_s:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        if self.status == 429:
            headers["x-llm-d-request-dropped-reason"] = "rejected-saturated"  # routers of llm-d look at it
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = msgspec.json.encode(self.anthropic_answer()) if speaks_anthropic(path) else self.body()
        return Response(body, self.status, headers, media_type="application/json")


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that are raised inside to the names that the client knows."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error.__cause__


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of a route, ours or the framework's, in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"no such path: {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        else:
            message = str(error.detail)
        response = ApiError(error.status_code, message).response(request.url.path)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods_at(request))
        return response

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error: see the server's log").response(request.url.path)


def _methods_at(request: Request) -> list[str]:
    """Return the methods that a path takes; the framework names only those of the first route."""
    routes = request.app.routes
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
