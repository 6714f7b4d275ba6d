"""Completions of a node, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.node_process import DEADLINE_S, NodeProcess


class Stream:
    """A completion that streams: its events, one by one."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.events = (json.loads(data) for data in self._data() if data != "[DONE]")

    def _data(self) -> Iterator[str]:
        for line in self.response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


@contextmanager
def streaming(node: NodeProcess, model: str, max_tokens: int) -> Iterator[Stream]:
    """Yield a stream once its first token has come."""
    body = {"prompt": "def", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    url = f"{node.url}/models/{model}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
        assert response.status_code == 200
        stream = Stream(response)
        assert next(stream.events)["choices"]
        yield stream


def complete(node: NodeProcess, model: str) -> httpx.Response:
    body = {"prompt": "def", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{node.url}/models/{model}/v1/completions", json=body, timeout=DEADLINE_S)
