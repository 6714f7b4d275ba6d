"""Measure conversations that exceed a model's pool: swiftkv, which borrows from two idle neighbours, beside vLLM:

    python benchmarks/lending_multiturn.py --vllm-venv VENV --checkpoint CKPT --out benchmarks/out/multiturn.json

Both serve the model with a pool of 1 GiB. In swiftkv's node two idle models of the same shape, with pools of their own,
lend it 1.8 GiB together. `--sessions` conversations grow for `--turns` turns, each of which sends the whole history and
`--new` fresh tokens, and asks for `--out-tokens`: once in a fixed order, one at a time, and once in random order, two
at a time. In each turn of the conversations the servers are measured one after the other, and the others are held
still. First turns, which are new to every server, are left out of the figures.

With several numbers of conversations (`--sessions 2 4 8`) each has a report of its own, such as multiturn-8.json, and
lending_plots.py draws a curve of them.

VENV has vLLM's CPU build. Without --vllm-venv, or with --alone, the master is measured without lending as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from lending_node import (
    EXTRA,
    SMALL_MODEL,
    Node,
    StreamSeconds,
    Tokens,
    ask,
    free_port,
    hold_tree,
    kill_tree,
    model,
    parser,
    quantile,
    resume_tree,
    say,
    small_checkpoint,
    table,
    write_report,
)

from swiftkv.bench.client import Target, TimedAnswer

NAME = "small"
POOL_GIB = 1
LENT_MIB = 920  # by each neighbour: 1.8 GiB together, for all histories and what a turn adds
SETTLE_S = 0.5  # time for a continued process to do its overdue work
VLLM_START_TIMEOUT_S = 900
VLLM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "lib/libiomp5.so")  # the second in the venv


class Server(Protocol):
    name: str

    def target(self, model: str) -> Target: ...
    def hold(self) -> None: ...
    def resume(self) -> None: ...


class VLLM:
    """vLLM's server with prefix caching, on the same cores."""

    name = "vLLM"

    def __init__(self, venv: Path, checkpoint: Path, max_model_len: int, directory: Path) -> None:
        self._port = free_port()
        self._log = directory / "vllm.log"
        preload = [path for path in (Path(VLLM_LIBRARIES[0]), venv / VLLM_LIBRARIES[1]) if path.exists()]
        cores = sorted(os.sched_getaffinity(0))
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "OMP_NUM_THREADS": str(len(cores)),
            "LD_PRELOAD": ":".join(str(path.resolve()) for path in preload),
        }
        command = [str(venv / "bin" / "vllm"), "serve", str(checkpoint), "--served-model-name", NAME]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--dtype", "bfloat16"]
        command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "16"]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + VLLM_START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"vLLM did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)

    def target(self, model: str) -> Target:
        return Target(f"http://127.0.0.1:{self._port}/v1/completions", model, extra_body=EXTRA)

    def hold(self) -> None:
        hold_tree(self.process.pid)

    def resume(self) -> None:
        resume_tree(self.process.pid)

    def stop(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.wait()


def swiftkv(checkpoint: Path, max_model_len: int, lending: bool) -> Node:
    """Return a node with the model by itself, or beside two neighbours that lend."""
    sections = [model(NAME, checkpoint, f"{POOL_GIB}GiB", "master", max_model_len=max_model_len, max_num_seqs=16)]
    if not lending:
        return Node("swiftkv alone", {"lending": "off"}, sections)
    budget = {"budget": f"{LENT_MIB}MiB"}
    sections += [model(f"neighbour{n}", checkpoint, "1GiB", lending=budget) for n in (1, 2)]
    return Node("swiftkv", {}, sections)


@dataclass(frozen=True)
class Scenario:
    label: str
    concurrency: int
    in_random_order: bool


SCENARIOS = (Scenario("in turn", 1, False), Scenario("random order, 2 at a time", 2, True))


@dataclass
class Conversations:
    """One server's side of a scenario. All servers get the same questions; a server's answers join its history."""

    server: Server
    history: list[list[int]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    stream: StreamSeconds = field(default_factory=StreamSeconds)

    async def turn(self, number: int, order: list[int], fresh: list[list[int]], scenario: Scenario, num: int) -> None:
        waiting = list(order)

        async def work() -> None:
            while waiting:
                session = waiting.pop(0)
                await self._say(number, session, fresh[session], num, scenario.concurrency == 1)

        before = self._stream_seconds()
        await asyncio.gather(*(work() for _ in range(scenario.concurrency)))
        if number:  # figures leave out the first turns
            self.stream = self._added(self._stream_seconds() - before)

    async def _say(self, number: int, session: int, fresh: list[int], num_tokens: int, is_alone: bool) -> None:
        before = self._stream_seconds() if is_alone else StreamSeconds()
        history = self.history[session]
        answer: TimedAnswer = await ask(self.server.target(NAME), history + fresh, num_tokens)
        if len(answer.token_ids) != num_tokens:
            raise SystemExit(f"{self.server.name}: {len(answer.token_ids)} token ids came, {num_tokens} were asked for")
        spent = self._stream_seconds() - before if is_alone else StreamSeconds()
        row: dict[str, Any] = {"turn": number, "session": session}
        row |= {"ttft_s": answer.ttft_s, "latency_s": answer.latency_s}
        row |= {"num_prompt": len(history) + len(fresh), "num_history": len(history)}
        row |= {"num_cached": min(answer.num_cached_tokens, len(history)), "stream": asdict(spent)}
        self.rows.append(row)
        self.history[session] = history + fresh + answer.token_ids

    def _stream_seconds(self) -> StreamSeconds:
        return self.server.stream_seconds_at_rest(NAME) if isinstance(self.server, Node) else StreamSeconds()

    def _added(self, more: StreamSeconds) -> StreamSeconds:
        return StreamSeconds(*(a + b for a, b in zip(asdict(self.stream).values(), asdict(more).values(), strict=True)))

    @property
    def later(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["turn"]]

    def summary(self) -> dict[str, Any]:
        ttft_s = [row["ttft_s"] for row in self.later]
        cached, history = (sum(row[key] for row in self.later) for key in ("num_cached", "num_history"))
        return {
            "server": self.server.name,
            "p50_ms": 1e3 * statistics.median(ttft_s),
            "p99_ms": 1e3 * quantile(ttft_s, 0.99),
            "cached_share": cached / history,
            "stream": asdict(self.stream),
            "rows": self.rows,
        }


@contextmanager
def measured(server: Server) -> Iterator[None]:
    server.resume()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        server.hold()


def run(scenario: Scenario, servers: list[Server], args: argparse.Namespace, tokens: Tokens) -> list[Conversations]:
    first = [tokens.fresh(args.first) for _ in range(args.sessions)]
    sides = [Conversations(server, [list(history) for history in first]) for server in servers]
    rng = random.Random(args.seed)
    for number in range(args.turns):
        order = list(range(args.sessions))
        if scenario.in_random_order:
            rng.shuffle(order)
        fresh = [tokens.fresh(args.new) if number else [] for _ in order]
        for side in sides if number % 2 else sides[::-1]:
            with measured(side.server):
                begin_s = time.monotonic()
                asyncio.run(side.turn(number, order, fresh, scenario, args.out_tokens))
            ttft_s = [row["ttft_s"] for row in side.rows if row["turn"] == number]
            say(
                f"{scenario.label}, turn {number + 1}  {side.server.name:14s} "
                f"median {1e3 * statistics.median(ttft_s):7.0f} ms, worst {1e3 * max(ttft_s):7.0f} ms to first token "
                f"({time.monotonic() - begin_s:.0f} s)"
            )
    return sides


def report(results: dict[str, list[list[dict[str, Any]]]]) -> tuple[str, dict[str, Any]]:
    """Return the table and the ratios to the other servers, from the summaries `results[scenario][round]`."""
    rows, ratios = [], {}
    for label, rounds in results.items():
        for number, summary in enumerate(rounds[0]):
            p50, p99, cached = (
                statistics.median(of[number][key] for of in rounds) for key in ("p50_ms", "p99_ms", "cached_share")
            )
            parts = [of[0]["p99_ms"] / of[number]["p99_ms"] for of in rounds]
            ratio = statistics.median(parts)
            ratios[f"{label} / {summary['server']}"] = ratio
            shown = f"{ratio:.2f}" if number else ""
            rows.append([label, summary["server"], f"{p50:,.0f}", f"{p99:,.0f}", f"{cached:.0%}", shown])
    heads = ["", "server", "P50 TTFT, ms", "P99 TTFT, ms", "history cached", "P99: swiftkv / this"]
    return table(heads, rows), ratios


def compare(servers: list[Server], args: argparse.Namespace, tokens: Tokens) -> None:
    """Run every scenario with one number of conversations, and report."""
    scenarios = SCENARIOS[:1] if args.in_turn else SCENARIOS
    results: dict[str, list[list[dict[str, Any]]]] = {scenario.label: [] for scenario in scenarios}
    for _ in range(args.rounds):
        for scenario in scenarios:
            sides = run(scenario, servers, args, tokens)
            results[scenario.label].append([side.summary() for side in sides])
    text, ratios = report(results)
    say(f"\n{args.sessions} conversations, later turns; asked for: P99 at most 0.31 of vLLM's\n\n{text}")
    write_report(args, results=results, ratios=ratios)


def start_servers(stack: ExitStack, args: argparse.Namespace, checkpoint: Path, directory: Path) -> list[Server]:
    """Start servers one after the other, and hold each still once it is up, so that loading servers do not compete."""
    servers: list[Server] = []
    vllm = VLLM(args.vllm_venv, checkpoint, args.max_model_len, directory) if args.vllm_venv else None
    if vllm is not None:
        stack.callback(vllm.stop)
        say("vLLM is starting; this takes a minute or two")
        vllm.wait_until_ready()
        vllm.hold()
    for lending in [True, False] if args.alone or vllm is None else [True]:
        node = stack.enter_context(swiftkv(checkpoint, args.max_model_len, lending))
        if lending:
            promised_bytes = node.promised_bytes(NAME)
            node.wait_until_borrowed(NAME, promised_bytes)
            say(f"{node.name}: borrows {promised_bytes / 2**30:.2f} GiB")
        node.hold()
        servers.append(node)
    return [*servers, *([vllm] if vllm is not None else [])]


def main() -> None:
    arguments = parser(__doc__, rounds=1, default_model=SMALL_MODEL)
    arguments.add_argument("--vllm-venv", type=Path, help="virtual environment with vLLM's CPU build")
    arguments.add_argument("--alone", action="store_true", help="measure the master without lending, too")
    arguments.add_argument(
        "--sessions",
        type=int,
        nargs="+",
        default=[10],
        help="numbers of conversations; each number is a run of its own",
    )
    arguments.add_argument("--in-turn", action="store_true", help="leave out the runs in random order")
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--first", type=int, default=2048, help="tokens of the first prompt")
    arguments.add_argument("--new", type=int, default=96, help="fresh prompt tokens of each later turn")
    arguments.add_argument("--out-tokens", type=int, default=16)
    arguments.add_argument("--max-model-len", type=int, default=8192)
    args = arguments.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    tokens = Tokens(args.seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lend-")))
        servers = start_servers(stack, args, checkpoint, directory)
        for server in servers:
            with measured(server):
                asyncio.run(ask(server.target(NAME), tokens.fresh(600), 8))  # so that the first turn is like the others
        for sessions in args.sessions:
            out = args.out
            if out is not None and len(args.sessions) > 1:
                out = out.with_stem(f"{out.stem}-{sessions}")
            compare(servers, argparse.Namespace(**(vars(args) | {"sessions": sessions, "out": out})), tokens)


if __name__ == "__main__":
    main()
