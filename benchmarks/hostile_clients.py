"""The ordinary clients of hostile.py, each kind in a process of its own, so that only the node can slow them down:

    python benchmarks/hostile_clients.py health HOST PORT
    python benchmarks/hostile_clients.py streams HOST PORT --model NAME --streams 8

Each line on standard input ends a window; the answer is one line of JSON with the measurements since the line before.
`health` sends `GET /health` every 100 ms over a new connection, even if earlier ones have not been answered. `streams`
keeps --streams completions streaming and notes the times between their events. Waits that have not ended when a window
ends count with their length until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hostile_target import KEY_VARIABLE

from swiftkv.latency import prefer_latency

_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 60.0
_OPEN_GAP_S = 0.5
"""A stream that has waited longer than this when a window ends counts as held up."""
_RETRY_S = 0.5
_MAX_TOKENS = 1500
_PROMPT_TOKENS = 64
_TOKEN_IDS = (300, 4000)


class Health:
    """The probes that have not been answered, and the latencies of the others."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._open: dict[asyncio.Task[str], float] = {}
        self._latencies_s: list[float] = []
        self._failures: Counter[str] = Counter()

    async def run(self) -> None:
        next_s = time.monotonic()
        while True:
            probe = asyncio.create_task(self._probe())
            self._open[probe] = time.monotonic()
            probe.add_done_callback(self._end)
            next_s += _PROBE_INTERVAL_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    def take(self) -> dict[str, Any]:
        now_s = time.monotonic()
        waiting_s = [now_s - begin_s for begin_s in self._open.values() if now_s - begin_s > _PROBE_INTERVAL_S]
        taken = {"latencies_s": self._latencies_s + waiting_s, "failures": self._failures}
        self._latencies_s, self._failures = [], Counter()
        self._open = {probe: begin_s for probe, begin_s in self._open.items() if now_s - begin_s <= _PROBE_INTERVAL_S}
        return taken

    async def _probe(self) -> str:
        """Send a probe, and return why it failed; an empty string if it was answered with 200."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    status = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return type(error).__name__
        return "" if b" 200 " in status else status.decode(errors="replace").strip() or "closed"

    def _end(self, probe: asyncio.Task[str]) -> None:
        begin_s = self._open.pop(probe, None)
        if begin_s is None:  # it was counted when a window ended
            return
        self._latencies_s.append(time.monotonic() - begin_s)
        if failure := probe.result():
            self._failures[failure] += 1


class Streams:
    """Completions that stream one after another on each of a number of connections."""

    def __init__(self, host: str, port: int, model: str, number: int) -> None:
        self._address = (host, port)
        self._model = model
        self._number = number
        self._rng = random.Random(0)
        self._last_s: dict[int, float] = {}
        self._gaps_s: list[float] = []
        self._failures: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._keep_streaming(number) for number in range(self._number)))

    def take(self) -> dict[str, Any]:
        now_s = time.monotonic()
        for number, last_s in self._last_s.items():
            if now_s - last_s > _OPEN_GAP_S:
                self._gaps_s.append(now_s - last_s)
                self._last_s[number] = now_s
        taken = {"gaps_s": [round(gap_s, 6) for gap_s in self._gaps_s], "failures": self._failures}
        self._gaps_s, self._failures = [], Counter()
        return taken

    async def _keep_streaming(self, number: int) -> None:
        while True:
            try:
                failure = await self._stream(number)
            except OSError as error:
                failure = type(error).__name__
            self._last_s.pop(number, None)
            if failure:
                self._failures[failure] += 1
                await asyncio.sleep(_RETRY_S)

    async def _stream(self, number: int) -> str:
        """Read a stream, and return why it ended too early; an empty string if it did not."""
        reader, writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        try:
            writer.write(self._request())
            status = await reader.readline()
            if b" 200 " not in status:
                return status.decode(errors="replace").strip() or "closed before an answer"
            ended, rest = False, b""
            while data := await reader.read(1 << 18):
                events = (rest + data).split(b"data: ")
                ended = ended or any(event.startswith(b"[DONE]") for event in events)
                if any(event.startswith(b'{"error"') for event in events):
                    return "an error in the stream"
                self._note(number, len(events) - 1)
                rest = events[-1][-16:]  # the beginning of an event that was cut in two
            return "" if ended else "closed in the middle"
        finally:
            writer.close()

    def _note(self, number: int, events: int) -> None:
        if not events:
            return
        now_s = time.monotonic()
        if number in self._last_s:
            self._gaps_s.append(now_s - self._last_s[number])
        self._gaps_s += [0.0] * (events - 1)  # these events came together
        self._last_s[number] = now_s

    def _request(self) -> bytes:
        prompt = [self._rng.randrange(*_TOKEN_IDS) for _ in range(_PROMPT_TOKENS)]
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0}
        content = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {os.environ[KEY_VARIABLE]}\r\nConnection: close\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def serve(run: Callable[[], Coroutine[Any, Any, None]], take: Callable[[], dict[str, Any]]) -> None:
    """Run clients until standard input ends, and answer each of its lines."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running = asyncio.create_task(run())
    while await lines.readline():
        print(json.dumps(take()), flush=True)
        if running.done():
            running.result()
    running.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["health", "streams"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    _run_before_others()
    client: Health | Streams
    if args.kind == "health":
        client = Health(args.host, args.port)
    else:
        client = Streams(args.host, args.port, args.model, args.streams)
    asyncio.run(serve(client.run, client.take))


def _run_before_others() -> None:
    """Have this process run as soon as it wakes, as on a machine of its own, not after the gateway's slice."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:  # only root may do this
        prefer_latency()


if __name__ == "__main__":
    main()
