"""swiftkv beside other servers on the same machine, in the same minutes.

Machines drift and are shared, so absolute figures of two runs cannot be compared. Here every round measures every
server once for each load, in turns, and what counts is the median over rounds of the ratio within a round.

    swiftkv checkpoint make --arch qwen3 --size small CKPT
    swiftkv serve node.yaml &  vllm serve CKPT --served-model-name small --port 8100 … &
    python benchmarks/peers.py swiftkv=http://127.0.0.1:8000 vllm=http://127.0.0.1:8100 --model small

The first server is the one that the others are compared with. Any server will do that takes token ids at
/v1/completions and streams. Loads: prefill of N tokens (one new token), decoding 128 tokens at batch B after a prompt
of 128, and the second turn of a conversation: 2048 tokens that the server has seen, and 32 new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import psutil

from swiftkv.bench.client import Answer, Target, send

NUM_DECODED = 128
NUM_DECODE_PROMPT = 128
NUM_HISTORY = 2048
NUM_FRESH = 32


@dataclass(frozen=True)
class Server:
    name: str
    target: Target
    pid: int | None


@dataclass
class Session:
    """The set-up that every measurement needs; `fresh` prompts never repeat, so nothing is cached by chance."""

    client: httpx.AsyncClient
    rng: random.Random
    vocab: tuple[int, int]

    def fresh(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(*self.vocab) for _ in range(num_tokens)]

    async def ask(self, server: Server, prompt: list[int], num_tokens: int) -> Answer:
        answer = await send(self.client, server.target, prompt, num_tokens)
        if answer.error:
            raise SystemExit(f"{server.name}: {answer.error}")
        if answer.num_output_tokens != num_tokens:
            raise SystemExit(f"{server.name}: {answer.num_output_tokens} tokens came, {num_tokens} were asked for")
        return answer


Measure = Callable[[Session, Server], Awaitable[float]]


@dataclass(frozen=True)
class Load:
    key: str
    label: str
    unit: str
    measure: Measure
    higher_is_better: bool = True


def prefill(num_tokens: int) -> Load:
    """Return a load that measures prompt tokens a second, HTTP included."""

    async def measure(session: Session, server: Server) -> float:
        answer = await session.ask(server, session.fresh(num_tokens), 1)
        return num_tokens / answer.ttft_s

    return Load(f"prefill_{num_tokens}", f"prefill {num_tokens:,}", "tok/s", measure)


def decode(batch: int) -> Load:
    """Return a load that measures tokens a second of `batch` streams together, while all of them decode."""

    async def measure(session: Session, server: Server) -> float:
        prompts = [session.fresh(NUM_DECODE_PROMPT) for _ in range(batch)]
        answers = await asyncio.gather(*(session.ask(server, prompt, NUM_DECODED) for prompt in prompts))
        stamps_s = [list(accumulate(answer.itls_s, initial=answer.start_s + answer.ttft_s)) for answer in answers]
        begin_s, end_s = max(stamps[0] for stamps in stamps_s), min(stamps[-1] for stamps in stamps_s)
        num_tokens = sum(sum(begin_s < stamp <= end_s for stamp in stamps) for stamps in stamps_s)
        return num_tokens / (end_s - begin_s)

    return Load(f"decode_{batch}", f"decode, batch {batch}", "tok/s", measure)


def second_turn() -> Load:
    """Return a load that measures the time to first token of a prompt that was seen but for its last tokens."""

    async def measure(session: Session, server: Server) -> float:
        history = session.fresh(NUM_HISTORY)
        await session.ask(server, history, 1)
        answer = await session.ask(server, history + session.fresh(NUM_FRESH), 1)
        if answer.num_cached_tokens < NUM_HISTORY - 128:
            print(f"{server.name}: only {answer.num_cached_tokens} tokens came from its cache", file=sys.stderr)
        return answer.ttft_s * 1000

    return Load("turn_2_ms", f"turn 2, {NUM_HISTORY:,} cached", "ms", measure, higher_is_better=False)


LOADS = (prefill(512), prefill(2048), decode(1), decode(8), second_turn())


@dataclass
class Results:
    """`values[load][server]`: one figure a round."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, load: Load, server: Server, value: float) -> None:
        self.values.setdefault(load.key, {}).setdefault(server.name, []).append(value)

    def median(self, load: Load, server: Server) -> float:
        return statistics.median(self.values[load.key][server.name])

    def ratio(self, load: Load, ours: Server, theirs: Server) -> float:
        """Return the median over rounds of ours / theirs; for times, below 1 is better."""
        pairs = zip(self.values[load.key][ours.name], self.values[load.key][theirs.name], strict=True)
        return statistics.median(mine / other for mine, other in pairs)


async def measure_all(servers: list[Server], args: argparse.Namespace) -> Results:
    results = Results()
    loads = [load for load in LOADS if not args.only or load.key in args.only]
    async with httpx.AsyncClient(timeout=900) as client:
        session = Session(client, random.Random(args.seed), (300, args.vocab_size))
        for server in servers:  # so that the first round is like the others
            await session.ask(server, session.fresh(600), 8)
        for number in range(args.rounds):
            for load in loads:
                turns = servers if number % 2 == 0 else servers[::-1]
                for server in turns:
                    await asyncio.sleep(args.pause_s)  # threads of the one before may still be spinning
                    value = await load.measure(session, server)
                    results.add(load, server, value)
                    print(
                        f"round {number + 1}  {load.label:22s} {server.name:10s} {value:10.1f} {load.unit}", flush=True
                    )
    return results


def markdown(results: Results, servers: list[Server]) -> str:
    """The table for benchmarks/README.md."""
    ours, others = servers[0], servers[1:]
    heads = ["", *(server.name for server in servers), *(f"{ours.name} / {other.name}" for other in others)]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for load in LOADS:
        if load.key in results.values:
            cells = [f"{load.label}, {load.unit}", *(f"{results.median(load, server):,.1f}" for server in servers)]
            cells += [f"{results.ratio(load, ours, other):.2f}" for other in others]
            lines.append(f"| {' | '.join(cells)} |")
    if any(server.pid for server in servers):
        memory = [f"{rss_gib(server.pid):.1f}" if server.pid else "" for server in servers]
        lines.append(f"| {' | '.join(['RSS after, GiB', *memory, *[''] * len(others)])} |")
    return "\n".join(lines)


def rss_gib(pid: int) -> float:
    """Resident bytes of a process and its descendants; shared pages count once for each."""
    root = psutil.Process(pid)
    return float(sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])) / 2**30


def as_json(results: Results, servers: list[Server], args: argparse.Namespace) -> dict[str, Any]:
    ours, others = servers[0], servers[1:]
    return {
        "machine": {"processor": processor_name(), "cores": psutil.cpu_count(), "python": platform.python_version()},
        "rounds": args.rounds,
        "values": results.values,
        "medians": {
            load.key: {server.name: results.median(load, server) for server in servers}
            for load in LOADS
            if load.key in results.values
        },
        "ratios": {
            other.name: {load.key: results.ratio(load, ours, other) for load in LOADS if load.key in results.values}
            for other in others
        },
    }


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def parse_servers(args: argparse.Namespace) -> list[Server]:
    pids = dict(item.split("=", 1) for item in args.pid)
    servers = []
    for item in args.servers:
        name, equals, url = item.partition("=")
        if not equals:
            raise SystemExit(f"{item!r} is not NAME=URL")
        target = Target(f"{url.rstrip('/').removesuffix('/v1')}/v1/completions", args.model, extra_body=EXTRA)
        servers.append(Server(name, target, int(pids[name]) if name in pids else None))
    return servers


EXTRA = {"temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", default="small", help="the same name at every server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[load.key for load in LOADS], help="default: every load")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between one server and the next")
    parser.add_argument("--vocab-size", type=int, default=31000, help="random prompts use the ids from 300 to here")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="default: another every run")
    parser.add_argument("--pid", nargs="*", default=[], metavar="NAME=PID", help="to report memory")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    servers = parse_servers(args)
    results = asyncio.run(measure_all(servers, args))
    print("\n" + markdown(results, servers))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_json(results, servers, args), indent=1) + "\n")


if __name__ == "__main__":
    main()
