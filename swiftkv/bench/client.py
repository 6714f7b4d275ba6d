"""One streamed request to an OpenAI-compatible server, with the time at which each part of the answer came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from swiftkv.bench.datasets import Prompt

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Target:
    """The server that requests go to, and the fields that every one of them carries."""

    url: str
    """The whole URL, such as http://127.0.0.1:8000/v1/completions."""
    model: str
    is_chat: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TimedAnswer:
    """The answer to one request. Times are `time.perf_counter()`'s, in seconds; `error` is empty if all went well."""

    start_s: float = 0.0
    ttft_s: float = 0.0
    """The time from sending to the first piece of text."""
    itls_s: list[float] = field(default_factory=list)
    """The times between one piece and the next."""
    latency_s: float = 0.0
    """The time from sending to the last piece."""
    queue_s: float = 0.0
    """The time that the request waited here, before sending, for --max-concurrency."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The token ids; empty unless the server was asked for them and gives them."""
    error: str = ""


def request_body(target: Target, prompt: Prompt | Messages, output_len: int | None) -> dict[str, Any]:
    """Return the JSON of one request."""
    body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.is_chat:
        body["messages"] = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        length_key = "max_completion_tokens"
    else:
        body["prompt"] = prompt
        length_key = "max_tokens"
    if output_len is not None:
        body[length_key] = output_len
    return body | dict(target.extra_body)


async def send(
    client: httpx.AsyncClient, target: Target, prompt: Prompt | Messages, output_len: int | None
) -> TimedAnswer:
    """Send one request and read its answer to the end. A failure is described in the answer's `error`."""
    answer = TimedAnswer(start_s=time.perf_counter())
    try:
        async with client.stream(
            "POST", target.url, json=request_body(target, prompt, output_len), headers=dict(target.headers)
        ) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {text[:500]}"
                return answer
            await _read_stream(response, answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and not answer.ttft_s:
        answer.error = "the stream ended without any text"
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream of events; `aiter_lines` would also end one at a U+2028 within a text."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


async def _read_stream(response: httpx.Response, answer: TimedAnswer) -> None:
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        take_event(answer, event, time.perf_counter())
        if answer.error:
            return


def take_event(answer: TimedAnswer, event: Mapping[str, Any], came_s: float) -> None:
    """Add an event of a stream to the answer; it came at `came_s` by `time.perf_counter()`."""
    if "error" in event:
        answer.error = str(event["error"])
        return
    if usage := event.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_output_tokens = usage["completion_tokens"]
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    since_start_s = came_s - answer.start_s
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if delta.get("role") and not (text or choice.get("finish_reason")):
            continue  # a chat's first event has only the role, and no generated text
        if answer.ttft_s:
            answer.itls_s.append(since_start_s - answer.latency_s)
        else:
            answer.ttft_s = since_start_s
        answer.latency_s = since_start_s
        answer.text += text
        answer.token_ids += choice.get("token_ids") or ()
