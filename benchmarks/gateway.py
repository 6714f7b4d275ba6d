"""Measure the CPU time of the gateway's process while an echo engine streams to many connections:

    python benchmarks/gateway.py [--streams 64] [--tokens-per-second 1000] [--seconds 20] [--chat]

The gateway (HTTP server, tokenizer, detokenizer, metrics: everything but the engine) runs in a process of its own on
uvloop, as in a node; the echo engine runs in another, and the clients run here. Prints the share of one core that the
gateway used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "server"))

from echo_gateway import Gateway, start_gateway, train_tokenizer

from swiftkv.server.tokenizer import Tokenizer


def serve(pipe: Connection, step_ms: float) -> None:
    """Run the gateway's process: answer ``cpu`` with its CPU seconds so far, end on anything else."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        train_tokenizer(directory)
        gateway, stop = start_gateway(directory, Tokenizer.from_pretrained(directory), step_ms=step_ms)
        pipe.send((gateway.url, tokens_generated(gateway)))
        while pipe.recv() == "cpu":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, tokens_generated(gateway)))
        stop()


def tokens_generated(gateway: Gateway) -> float:
    labels = {"model_name": "chat", "engine": "0"}
    value = gateway.metrics.registry.get_sample_value("vllm:generation_tokens_total", labels)
    assert value is not None
    return float(value)


async def stream(url: str, number: int, chat: bool, stop: asyncio.Event) -> int:
    """Read one stream after another, as cheaply as possible, and return the number of events."""
    host, port = url.removeprefix("http://").split(":")
    prompt = f"Stream {number}: def f(x): return x + {number}\n"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": "chat", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    events = 0
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + content)
    while not stop.is_set():
        events += (await reader.read(65536)).count(b"data: ")
    writer.close()
    return events


async def load(url: str, pipe: Connection, arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    streams = [asyncio.create_task(stream(url, number, arguments.chat, stop)) for number in range(arguments.streams)]
    await asyncio.sleep(2)
    pipe.send("cpu")
    (cpu_before_s, tokens_before), started_s = pipe.recv(), time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    pipe.send("cpu")
    (cpu_after_s, tokens_after), ended_s = pipe.recv(), time.perf_counter()
    stop.set()
    events = sum(await asyncio.gather(*streams))
    elapsed_s, tokens = ended_s - started_s, tokens_after - tokens_before
    cpu_s = cpu_after_s - cpu_before_s
    print(f"{arguments.streams} streams, {tokens / elapsed_s:.0f} tokens/s, {events} events received")
    print(f"gateway: {100 * cpu_s / elapsed_s:.1f} % of one core, {1e6 * cpu_s / tokens:.0f} us per token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--tokens-per-second", type=float, default=1000, help="tokens per second of all streams together"
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--chat", action="store_true", help="use chat completions in place of completions")
    arguments = parser.parse_args()
    here, there = get_context("spawn").Pipe()
    step_ms = 1000 * arguments.streams / arguments.tokens_per_second
    gateway = get_context("spawn").Process(target=serve, args=(there, step_ms))
    gateway.start()
    try:
        url, _ = here.recv()
        asyncio.run(load(url, here, arguments))
    finally:
        here.send("stop")
        gateway.join(10)


if __name__ == "__main__":
    main()
