"""Measure the cost of three idle engines to a busy one, by its decode rate while they wait and while they are stopped.

A stopped process costs nothing, so the ratio of the two rates is the cost of waiting. Also prints the processor time
that the idle engines took. Target: no cost.

    swiftkv checkpoint make --arch qwen3 --size small CKPT
    python benchmarks/idle_engines.py CKPT --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import yaml

from swiftkv.bench.client import Target, send

NUM_IDLE = 3


async def decode_rate(base_url: str, num_tokens: int) -> float:
    """Return the tokens a second, without the first."""
    extra = {"temperature": 0, "ignore_eos": True}
    target = Target(f"{base_url}/v1/completions", "busy", extra_body=extra)
    async with httpx.AsyncClient(timeout=600) as client:
        answer = await send(client, target, [300 + time.perf_counter_ns() % 1000] * 64, num_tokens)
    if answer.error:
        raise SystemExit(answer.error)
    return (num_tokens - 1) / (answer.latency_s - answer.ttft_s)


def start_node(checkpoint: str, port: int, directory: str) -> subprocess.Popen[bytes]:
    names = ["busy", *(f"idle{i}" for i in range(NUM_IDLE))]
    models = [
        {"name": name, "path": str(Path(checkpoint).resolve()), "kv_cache": {"memory": "256MiB"}} for name in names
    ]
    file = Path(directory) / "node.yaml"
    file.write_text(yaml.safe_dump({"node": {"port": port}, "models": models}))
    node = subprocess.Popen([sys.executable, "-m", "swiftkv", "serve", str(file)])
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == httpx.codes.OK:
                return node
        except httpx.TransportError:
            if node.poll() is not None:
                raise SystemExit("the node did not start") from None
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--port", type=int, default=8400)
    args = parser.parse_args()
    base_url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as directory:
        node = start_node(args.checkpoint, args.port, directory)
        try:
            children = psutil.Process(node.pid).children()
            idle = [child for child in children if child.cmdline()[-1].startswith("idle")]
            assert len(idle) == NUM_IDLE
            waiting, stopped, idle_s, wall_s = [], [], 0.0, 0.0
            asyncio.run(decode_rate(base_url, 16))
            for _ in range(args.rounds):
                cpu_before_s, started_s = sum(sum(child.cpu_times()[:2]) for child in idle), time.perf_counter()
                waiting.append(asyncio.run(decode_rate(base_url, args.num_tokens)))
                wall_s += time.perf_counter() - started_s
                idle_s += sum(sum(child.cpu_times()[:2]) for child in idle) - cpu_before_s
                for child in idle:
                    child.suspend()
                stopped.append(asyncio.run(decode_rate(base_url, args.num_tokens)))
                for child in idle:
                    child.resume()
            ratio = statistics.median(a / b for a, b in zip(waiting, stopped, strict=True))
            print(
                f"decode {statistics.median(waiting):.1f} tok/s beside {NUM_IDLE} idle engines, "
                f"{statistics.median(stopped):.1f} with them stopped, median ratio {ratio:.3f}; "
                f"they took {idle_s:.2f} s of processor time in {wall_s:.0f} s"
            )
        finally:
            node.terminate()
            node.wait()


if __name__ == "__main__":
    main()
