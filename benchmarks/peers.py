"""Measure swiftkv beside other servers on the same machine, in the same minutes.

Machines drift and are shared, so absolute figures of two runs cannot be compared. Here every round measures every
server once for each load, in turns, and the result is the median over rounds of the ratio within a round.

    swiftkv checkpoint make --arch qwen3 --size small CKPT
    swiftkv serve node.yaml &  vllm serve CKPT --served-model-name small --port 8100 … &
    python benchmarks/peers.py swiftkv=http://127.0.0.1:8000 vllm=http://127.0.0.1:8100 --model small

The first server is compared with the others. A server must take token ids at /v1/completions, and stream. Loads:
prefill of N tokens (one new token), decoding 128 tokens at batch B after a prompt of 128, the second turn of a
conversation (2048 tokens that the server has seen, and 32 new ones), and saturation: a fixed number of requests at
once, each followed by the next, of 512 tokens with answers of 128 as `vllm bench serve` sends them, or of the lengths
in a trace (--trace azure_llm_code_2023.csv). Without --only, the loads of saturation are left out: each takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import httpx
import psutil

from swiftkv.bench.client import Target, TimedAnswer, send

NUM_DECODED = 128
NUM_DECODE_PROMPT = 128
NUM_SATURATING_PROMPT = 512
NUM_HISTORY = 2048
NUM_FRESH = 32


@dataclass(frozen=True)
class Server:
    name: str
    target: Target
    pid: int | None


@dataclass
class Session:
    """The set-up of all measurements. Prompts of `fresh` never repeat, so nothing is cached by chance."""

    client: httpx.AsyncClient
    rng: random.Random
    vocab: tuple[int, int]
    trace: Sequence[tuple[int, int]]
    """The lengths of prompts and answers."""

    def fresh(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(*self.vocab) for _ in range(num_tokens)]

    async def ask(self, server: Server, prompt: list[int], num_tokens: int) -> TimedAnswer:
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
        num_pieces = [sum(begin_s < stamp <= end_s for stamp in stamps) for stamps in stamps_s]
        # A piece has several tokens where a server drafts: on average, the answer's tokens over its pieces.
        tokens_a_piece = [(answer.num_output_tokens - 1) / len(answer.itls_s) for answer in answers]
        num_tokens = sum(count * tokens for count, tokens in zip(num_pieces, tokens_a_piece, strict=True))
        return num_tokens / (end_s - begin_s)

    return Load(f"decode_{batch}", f"decode, batch {batch}", "tok/s", measure)


def second_turn() -> Load:
    """Return a load that measures the time to first token of a prompt of which only the last tokens are new."""

    async def measure(session: Session, server: Server) -> float:
        history = session.fresh(NUM_HISTORY)
        await session.ask(server, history, 1)
        answer = await session.ask(server, history + session.fresh(NUM_FRESH), 1)
        if answer.num_cached_tokens < NUM_HISTORY - 128:
            print(f"{server.name}: only {answer.num_cached_tokens} tokens came from its cache", file=sys.stderr)
        return answer.ttft_s * 1000

    return Load("turn_2_ms", f"turn 2, {NUM_HISTORY:,} cached", "ms", measure, higher_is_better=False)


def saturated(at_once: int) -> Load:
    """Return a load that measures the answers' tokens a second, of `3 * at_once` requests, `at_once` at a time."""

    async def measure(session: Session, server: Server) -> float:
        lengths = [(NUM_SATURATING_PROMPT, NUM_DECODED)] * (3 * at_once)
        return await _tokens_a_second(session, server, lengths, at_once)

    return Load(f"saturated_{at_once}", f"512/128, {at_once} at once", "tok/s", measure)


def traced() -> Load:
    """Return a load that measures the answers' tokens a second, 16 requests at once, with the lengths of a trace."""

    async def measure(session: Session, server: Server) -> float:
        return await _tokens_a_second(session, server, session.trace, 16)

    return Load("traced", "lengths of a trace, 16 at once", "tok/s", measure)


async def _tokens_a_second(session: Session, server: Server, lengths: Sequence[tuple[int, int]], at_once: int) -> float:
    places = asyncio.Semaphore(at_once)

    async def ask(num_prompt: int, num_output: int) -> None:
        async with places:
            await session.ask(server, session.fresh(num_prompt), num_output)

    begin_s = time.perf_counter()
    await asyncio.gather(*(ask(*pair) for pair in lengths))
    return sum(num_output for _, num_output in lengths) / (time.perf_counter() - begin_s)


def read_trace(path: Path, num_requests: int, longest: int) -> list[tuple[int, int]]:
    """Return the lengths of prompt and answer of a trace's first requests with at most `longest` tokens in all."""
    with path.open() as file:
        rows = ((int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file))
        return list(islice((pair for pair in rows if pair[1] and sum(pair) <= longest), num_requests))


USUAL = (prefill(512), prefill(2048), decode(1), decode(8), second_turn())
LOADS = (*USUAL, saturated(16), saturated(64), traced())


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
    loads = [load for load in LOADS if load.key in args.only]
    trace = read_trace(args.trace, args.trace_requests, args.longest) if args.trace else []
    async with httpx.AsyncClient(timeout=900) as client:
        session = Session(client, random.Random(args.seed), (300, args.vocab_size), trace)
        for server in servers:  # a warm-up, so that the first round is like the others
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
    """Return the table for benchmarks/results/peers.md."""
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
    """Return the resident GiB of a process and its descendants; shared pages count once for each."""
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
    parser.add_argument("--only", nargs="*", choices=[load.key for load in LOADS], help="default: all but saturation")
    parser.add_argument("--trace", type=Path, help="a file with the columns ContextTokens and GeneratedTokens")
    parser.add_argument(
        "--trace-requests",
        type=int,
        default=64,
        help="requests to take from the start of the trace, of those that are short enough",
    )
    parser.add_argument(
        "--longest", type=int, default=8192, help="the most tokens of prompt and answer of such a request"
    )
    parser.add_argument("--pause-s", type=float, default=1.0, help="seconds between one server and the next")
    parser.add_argument("--vocab-size", type=int, default=31000, help="random prompts use the ids from 300 to here")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**31), help="random seed; default: another one each run"
    )
    parser.add_argument("--pid", nargs="*", default=[], metavar="NAME=PID", help="process whose memory is reported")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    args.only = args.only or [load.key for load in USUAL] + ["traced"] * (args.trace is not None)
    if "traced" in args.only and args.trace is None:
        parser.error("the load 'traced' needs --trace FILE")
    servers = parse_servers(args)
    results = asyncio.run(measure_all(servers, args))
    print("\n" + markdown(results, servers))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_json(results, servers, args), indent=1) + "\n")


if __name__ == "__main__":
    main()
