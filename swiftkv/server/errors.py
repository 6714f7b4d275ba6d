"""Errors in OpenAI's shape: every error a client sees is `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

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


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


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

    def body(self) -> bytes:
        """The error as JSON."""
        # A message may quote the client, and JSON allows it halves of surrogate pairs that UTF-8 has no bytes for.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        param = self.param and self.param.encode("utf-8", "backslashreplace").decode()
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorResponse(ErrorDetail(message, kind, param, self.code or self.status)))

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        if self.status == 429:
            headers["x-llm-d-request-dropped-reason"] = "rejected-saturated"  # routers of llm-d look at it
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of a route, ours or the framework's, in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"no such path: {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        else:
            message = str(error.detail)
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error: the server's log says more").response()
