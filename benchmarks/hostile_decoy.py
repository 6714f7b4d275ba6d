"""A server beside the node, for hostile.py to attack in its place:

    python benchmarks/hostile_decoy.py PORT

It is a plain application of uvicorn on uvloop, and refuses every request with a few bytes. While it is attacked, the
streams lose time only because they share cores with it.
"""

from __future__ import annotations

import argparse

import uvicorn
from starlette.types import Receive, Scope, Send

_BODY = b'{"error": {"message": "wrong or missing API key"}}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _BODY})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    uvicorn.run(refuse, port=parser.parse_args().port, lifespan="off", log_level="warning", access_log=False)
