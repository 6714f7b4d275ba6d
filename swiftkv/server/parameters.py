"""Parameters in the paths and queries of `/admin`."""

from __future__ import annotations

from fastapi import Request

from swiftkv.server.errors import ApiError

SHOWN_CHARS = 128
"""The most characters shown of a name that a client chose."""


async def no_unknown_parameters(request: Request) -> None:
    """Refuse a query with a parameter unknown to its route: `dryrun=true`, misspelt, would change the node in earnest.

    Raises:
        ApiError: 400.
    """
    known = sorted(field.alias for field in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            shown = name[:SHOWN_CHARS]
            takes = f"this path takes {', '.join(known)}" if known else "this path takes none"
            raise ApiError(400, f"parameter '{shown}' is not supported; {takes}", param=shown)
