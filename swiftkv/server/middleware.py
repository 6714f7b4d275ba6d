"""Check every request before its body is read: the host it names, the keys, and the size of the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv.node_config import is_loopback
from swiftkv.server.errors import ApiError
from swiftkv.server.limits import NodeLimits, without_model
from swiftkv.server.node_page import PAGE_PATHS
from swiftkv.server.tenants import Sender

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"}) | PAGE_PATHS
PROTECTABLE_PATHS = frozenset({"/metrics", "/openapi.json", "/docs"})
"""The paths in `OPEN_PATHS` that need a key with `node.protect_metrics`."""
ADMIN_PATH = "/admin"
UPLOAD_PATH = "/v1/files"


def is_open(path: str) -> bool:
    """Return whether `path`, of the node or of one of its models, asks for no key."""
    return without_model(path) in OPEN_PATHS


class _Key:
    """A key with which those in headers are compared."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def is_among(self, digests: Sequence[bytes]) -> bool:
        # Digests are compared, so that neither the key's length nor its first characters show in the time taken.
        return any(hmac.compare_digest(digest, self._digest) for digest in digests)


def has_bearer_key(headers: Headers, key: str) -> bool:
    """Return whether a request has `key` as `Authorization: Bearer <key>`."""
    return _Key(key).is_among(_bearer(headers))


def _bearer(headers: Headers) -> list[bytes]:
    """Return the digest of what is sent as `Authorization: Bearer <key>`, if anything is."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return [_digest(key)] if scheme.lower() == "bearer" else []


def _api_key(headers: Headers) -> list[bytes]:
    """Return the digest of what is sent as `x-api-key: <key>`, as Anthropic's clients do."""
    return [_digest(headers["x-api-key"])] if "x-api-key" in headers else []


def _digest(key: str) -> bytes:
    # Only HTTP's blanks may surround a header's value. `str.strip()` would also take the bytes 0x85 and 0xA0, with
    # which some characters, such as "à", end in UTF-8.
    return hashlib.sha256(key.strip(" \t").encode("latin-1")).digest()


class ApiKeyMiddleware:
    """Refuse requests without one of the models' keys, except on the paths that monitoring reads and on `ADMIN_PATH`.

    Routes find the sender whose key it was in `request.state.sender`.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, Sender]) -> None:
        self.app = app
        self._keys = [(_Key(key), sender) for key, sender in keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]) or _is_admin(scope):
            await self.app(scope, receive, send)
        elif (sender := self._sender(Headers(scope=scope))) is not None:
            scope.setdefault("state", {})["sender"] = sender
            await self.app(scope, receive, send)
        else:
            text = "wrong or missing API key: send 'Authorization: Bearer <key>'"
            await ApiError(401, text, code="invalid_api_key").response(scope["path"])(scope, receive, send)

    def _sender(self, headers: Headers) -> Sender | None:
        sent = _bearer(headers) + _api_key(headers)
        return next((sender for key, sender in self._keys if key.is_among(sent)), None)


class ProtectedPathsMiddleware:
    """Refuse requests for `PROTECTABLE_PATHS` that have none of `keys`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self.app = app
        self._keys = [_Key(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and without_model(scope["path"]) in PROTECTABLE_PATHS:
            headers = Headers(scope=scope)
            sent = _bearer(headers) + _api_key(headers)
            if not any(key.is_among(sent) for key in self._keys):
                text = (
                    "wrong or missing key (node.protect_metrics): send 'Authorization: Bearer <key>' with a key of the "
                    "models, or with the admin key"
                )
                await ApiError(401, text, code="invalid_api_key").response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


class AdminMiddleware:
    """Guard `ADMIN_PATH` with a key of its own."""

    def __init__(self, app: ASGIApp, admin_key: str) -> None:
        self.app = app
        self._key = _Key(admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_admin(scope) or self._key.is_among(_bearer(Headers(scope=scope))):
            await self.app(scope, receive, send)
            return
        text = (
            "wrong or missing admin key (it is not the models' key): send 'Authorization: Bearer <admin key>' with the "
            "key in the variable of node.admin_key_env, or else the one in the file that the node named when it started"
        )
        await ApiError(401, text, code="invalid_admin_key").response()(scope, receive, send)


class CutOffMiddleware:
    """Answers requests that still run when their port closes, and are cancelled for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting_send(event: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(event)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # a mistake of the route, not the end of the port
                raise
            if not has_begun:  # else the connection ends within the answer
                text = "the server stopped before the answer was ready; what was asked for may have happened"
                await ApiError(503, text, code="server_stopped").response(scope["path"])(scope, receive, send)


class HostMiddleware:
    """Refuse requests that were made under another name than this machine's.

    The owner of a web page can let its name point to this machine; the page can then send requests here.
    Browsers always send the name, so a request without a name is not from a browser.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str]) -> None:
        """`allowed_hosts` are those beside the names and addresses of the loopback interface."""
        self.app = app
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        if all(self._is_allowed(_host_name(host)) for host in hosts):
            await self.app(scope, receive, send)
            return
        text = (
            "this node has no API key and answers only to localhost; use that name in the URL, add the name that you "
            "used to node.allowed_hosts, or set node.api_key_env"
        )
        await ApiError(403, text, code="host_not_allowed").response(scope["path"])(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        return is_loopback(name) or name in self._allowed


def _is_admin(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")


def _host_name(host: str) -> str:
    """Return a Host header's value without its port, or "" if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class BodyLimitMiddleware:
    """Limit one body (413) and all bodies of the node together (503).

    A body is refused by its Content-Length, or while it is read. It counts until its answer begins. An upload has a
    limit of its own, and does not count: it goes to disk as it comes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, limits: NodeLimits, max_upload_bytes: int | None) -> None:
        """`max_upload_bytes` of `None`: this port takes no uploads."""
        self.app = app
        self.max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload_bytes = self._max_upload_bytes if (scope["method"], scope["path"]) == ("POST", UPLOAD_PATH) else None
        max_bytes = self.max_bytes if upload_bytes is None else upload_bytes
        message = f"the body is larger than {max_bytes} bytes"
        length = Headers(scope=scope).get("content-length", "0")
        declared_bytes = int(length) if length.isascii() and length.isdigit() else 0
        if declared_bytes > max_bytes:
            await ApiError(413, message, code="body_too_large").response(scope["path"])(scope, receive, send)
            return
        received_bytes = 0

        async def limited_receive() -> Message:
            nonlocal received_bytes
            event = await receive()
            num_bytes = len(event.get("body", b""))
            received_bytes += num_bytes
            if received_bytes > max_bytes:
                raise HTTPException(413, message)
            if upload_bytes is None and not budget.take(num_bytes):
                text = "the bodies of other requests take all the room that this node has (node.max_bodies); try again"
                raise HTTPException(503, text, {"Retry-After": "1"})
            return event

        async def releasing_send(event: Message) -> None:
            budget.release()
            await send(event)

        with self._limits.body(declared_bytes) as budget:
            await self.app(scope, limited_receive, releasing_send)
