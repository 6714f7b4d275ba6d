"""The page at `/` of the node: it shows the overview of `/admin`, and asks for the admin key itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_DIRECTORY = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
PAGE_PATHS = frozenset(_FILES)
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (file, media_type) in _FILES.items():
        router.add_api_route(path, _sender((_DIRECTORY / file).read_bytes(), media_type), methods=["GET", "HEAD"])
    return router


def _sender(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
