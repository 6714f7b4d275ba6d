"""What every request passes before its body is read: the API key, and the size of the body."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})


class ApiKeyMiddleware:
    """Refuse whoever does not send ``Authorization: Bearer <key>``, except on the paths that monitoring reads."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._authorized(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "wrong or missing API key: send 'Authorization: Bearer <key>'", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests are compared, so that neither the key's length nor its first characters show in the time taken.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


class BodyLimitMiddleware:
    """Answer 413 to a body over ``max_bytes``: from its Content-Length, or while a chunked one is being read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"the body is larger than {self.max_bytes} bytes"
        length = Headers(scope=scope).get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self.max_bytes:
            await ApiError(413, message, code="body_too_large").response()(scope, receive, send)
            return
        received_bytes = 0

        async def limited_receive() -> Message:
            nonlocal received_bytes
            event = await receive()
            received_bytes += len(event.get("body", b""))
            if received_bytes > self.max_bytes:
                raise HTTPException(413, message)
            return event

        await self.app(scope, limited_receive, send)
