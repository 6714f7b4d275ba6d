"""What every request passes before its body is read: the keys, and the size of the body."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv.config import is_loopback
from swiftkv.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})
ADMIN_PATH = "/admin"


class _BearerKey:
    """What ``Authorization: Bearer <key>`` is compared with."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def is_sent(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests are compared, so that neither the key's length nor its first characters show in the time taken.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


class ApiKeyMiddleware:
    """Refuse whoever does not send the models' key, except on the paths that monitoring reads and on `ADMIN_PATH`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = _BearerKey(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or _is_admin(scope) or self._is_sent(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "wrong or missing API key: send 'Authorization: Bearer <key>'", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _is_sent(self, scope: Scope) -> bool:
        return self._key.is_sent(Headers(scope=scope))


class AdminMiddleware:
    """Guard `ADMIN_PATH`: with its own key; without one it is for this machine alone, and off where others can call."""

    def __init__(self, app: ASGIApp, admin_key: str | None, loopback: bool) -> None:
        """``loopback``: the port can be reached from this machine only."""
        self.app = app
        self._key = None if admin_key is None else _BearerKey(admin_key)
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(Headers(scope=scope)) if scope["type"] == "http" and _is_admin(scope) else None
        await (self.app if refused is None else refused.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._key is not None:
            if self._key.is_sent(headers):
                return None
            text = "wrong or missing admin key (not the models' key): send 'Authorization: Bearer <admin key>'"
            return ApiError(401, text, code="invalid_admin_key")
        if not self._loopback:
            text = "/admin is off: others can reach this node and it has no admin key; set node.admin_key_env"
            return ApiError(403, text, code="admin_is_off")
        if not is_loopback(_host(headers)):  # a page in a browser whose name was made to point here
            text = "/admin has no key, so it is for this machine alone: call it as localhost, or set node.admin_key_env"
            return ApiError(403, text, code="admin_is_local")
        return None


def _is_admin(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")


def _host(headers: Headers) -> str:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


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
