"""The answers of routes, as the OpenAPI document lists them."""

from __future__ import annotations

from typing import Any

from swiftkv.server.errors import speaks_anthropic

GENERATION_ERRORS = (400, 404, 413, 429, 503)
BODY_ERRORS = (400, 404, 413, 429)
"""The error statuses of routes that generate, and of other routes that take a body."""

_SERVER_SENT_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def documented_error(path: str = "") -> dict[str, Any]:
    """Return an error of the route at `path` for the OpenAPI document."""
    schema = "AnthropicError" if speaks_anthropic(path) else "ErrorResponse"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": "Error", "content": content}


def documented(
    schema: str,
    *error_statuses: int,
    stream: bool = False,
    several: bool = False,
    ok: int = 200,
    path: str = "",
    anthropic: str | None = None,
) -> dict[int | str, dict[str, Any]]:
    """Return a route's answers for the OpenAPI document: one `schema`, or with `several` a list of them.

    Args:
        ok: The status of success.
        path: The route's path, where errors depend on it.
        anthropic: The schema of the same answer in Anthropic's shape, where a header asks for that.
    """
    reference: dict[str, Any] = {"$ref": f"#/components/schemas/{schema}"}
    if anthropic is not None:
        reference = {"anyOf": [reference, {"$ref": f"#/components/schemas/{anthropic}"}]}
    shape = {"type": "array", "items": reference} if several else reference
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if stream:
        content = {**content, "text/event-stream": {"schema": _SERVER_SENT_EVENT}}
    return {
        ok: {"description": "OK", "content": content},
        **{status: documented_error(path) for status in error_statuses},
    }
