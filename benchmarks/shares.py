"""Measure what a model notices of another one that floods the cores, with shares and with `compute: off`:

    python benchmarks/shares.py --rounds 5 --out benchmarks/out/shares.json

Two nodes serve the same models with all cores each; in one the models share the cores, in the other the operating
system divides them. In each round both nodes are measured in turns, and the other one is held still. `light` answers
requests one after the other, with --pause-s between them: alone on all cores, alone on half of them, and beside
--floods models that answer --flood-streams requests each at any time. Beside one such model an equal share is half of
the cores, so each model should do as well as "alone on half". Then all models answer as much as they can, which gives
all tokens a second, and core time for each.

Times are medians over rounds; ratios are medians over rounds of the ratio within a round. The figures mean little on a
machine that other programs use: engines that share cores run half as many threads, so the other programs get more of
the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lending_node import (
    Node,
    Tokens,
    ask,
    make_shape,
    model,
    nodes_up,
    only,
    parser,
    pin,
    quantile,
    say,
    table,
    write_report,
)

VOCAB = (300, 500)
LIGHT = "light"


@dataclass(frozen=True)
class Waits:
    """The waits of the light model's clients in one load of one round."""

    ttft_s: list[float]
    itl_s: list[float]


@dataclass(frozen=True)
class Throughput:
    """The throughput of all models together, when all are flooded."""

    tokens_per_s: float
    core_s_per_token: float


@dataclass
class Measured:
    """One node's measurements, by round."""

    node: Node
    floods: Sequence[str]  # the models that are flooded
    alone: list[Waits] = field(default_factory=list)
    alone_on_half: list[Waits] = field(default_factory=list)
    beside: list[Waits] = field(default_factory=list)
    light_core_share: list[float] = field(default_factory=list)  # its part of the core time of both, beside a flood
    throughput: list[Throughput] = field(default_factory=list)

    async def round(self, args: argparse.Namespace, tokens: Tokens) -> None:
        cores = sorted(os.sched_getaffinity(0))
        engine = self.node.engine(LIGHT)
        self.alone.append(await self._light(args, tokens))
        pin(engine, cores[: len(cores) // 2])
        try:
            self.alone_on_half.append(await self._light(args, tokens))
        finally:
            pin(engine, cores)
        async with self._flood(args, tokens, self.floods):
            before = self._core_s()
            self.beside.append(await self._light(args, tokens))
            used = {name: s - before[name] for name, s in self._core_s().items()}
        self.light_core_share.append(used[LIGHT] / sum(used.values()))
        async with self._flood(args, tokens, [LIGHT, *self.floods]):
            self.throughput.append(await self._throughput(args))

    async def _light(self, args: argparse.Namespace, tokens: Tokens) -> Waits:
        waits = Waits([], [])
        for _ in range(args.requests):
            answer = await ask(self.node.target(LIGHT), tokens.fresh(args.prompt), args.decoded)
            waits.ttft_s.append(answer.ttft_s)
            waits.itl_s.extend(answer.itls_s)
            await asyncio.sleep(args.pause_s)
        return waits

    @asynccontextmanager
    async def _flood(self, args: argparse.Namespace, tokens: Tokens, names: Sequence[str]) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._keep_busy(name, args, tokens))
            for name in names
            for _ in range(args.flood_streams)
        ]
        await asyncio.sleep(args.lead_s)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if failed := [result for result in results if isinstance(result, SystemExit)]:
            raise failed[0]
        await asyncio.sleep(args.lead_s)  # until the engines have noticed the flood

    async def _keep_busy(self, name: str, args: argparse.Namespace, tokens: Tokens) -> None:
        while True:
            await ask(self.node.target(name), tokens.fresh(args.flood_prompt), args.flood_decoded)

    async def _throughput(self, args: argparse.Namespace) -> Throughput:
        tokens, core_s, begun_s = self._computed_tokens(), sum(self._core_s().values()), time.monotonic()
        await asyncio.sleep(args.flood_s)
        tokens = self._computed_tokens() - tokens
        seconds = time.monotonic() - begun_s
        return Throughput(tokens / seconds, (sum(self._core_s().values()) - core_s) / tokens)

    def _core_s(self) -> dict[str, float]:
        return {name: sum(self.node.engine(name).cpu_times()[:2]) for name in (LIGHT, *self.floods)}

    def _computed_tokens(self) -> int:
        figures = [entry["figures"] for entry in self.node.overview()["models"]]
        return sum(of["prompt_tokens_total"] + of["generation_tokens_total"] for of in figures)


Statistic = Callable[[Waits], float]
STATISTICS: dict[str, Statistic] = {
    "first token, median": lambda waits: statistics.median(waits.ttft_s),
    "first token, P99": lambda waits: quantile(waits.ttft_s, 0.99),
    "between tokens, median": lambda waits: statistics.median(waits.itl_s),
    "between tokens, P99": lambda waits: quantile(waits.itl_s, 0.99),
}


def show(off: Measured, shared: Measured) -> None:
    def ratio(mine: list[Waits], other: list[Waits], of: Statistic) -> str:
        return f"x {statistics.median(of(a) / of(b) for a, b in zip(mine, other, strict=True)):.2f}"

    rows = []
    for name, of in STATISTICS.items():
        columns = (shared.alone, shared.alone_on_half, off.beside, shared.beside)
        cells = [f"{1e3 * statistics.median(map(of, waits)):.1f}" for waits in columns]
        cells += [ratio(measured.beside, measured.alone_on_half, of) for measured in (off, shared)]
        cells.append(ratio(shared.beside, off.beside, of))
        rows.append([f"{name}, ms", *cells])
    heads = ["light", "alone", "alone on half", "beside, off", "beside, shares"]
    say("\n" + table([*heads, "off / half", "shares / half", "shares / off"], rows))
    pairs = list(zip(shared.throughput, off.throughput, strict=True))
    faster = statistics.median(mine.tokens_per_s / other.tokens_per_s for mine, other in pairs)
    cheaper = statistics.median(mine.core_s_per_token / other.core_s_per_token for mine, other in pairs)
    rates = [statistics.median(of.tokens_per_s for of in measured.throughput) for measured in (off, shared)]
    parts = [statistics.median(measured.light_core_share) for measured in (off, shared)]
    say(
        f"\nAll flooded: {rates[0]:,.0f} tokens/s off, {rates[1]:,.0f} sharing: x {faster:.2f} within a round; core "
        f"time for each token x {cheaper:.2f}\nlight's part of core time beside the others: {parts[0]:.0%} off, "
        f"{parts[1]:.0%} sharing"
    )


async def measure(off: Measured, shared: Measured, args: argparse.Namespace) -> None:
    tokens = Tokens(args.seed, VOCAB)
    both = (off.node, shared.node)
    for measured in (off, shared):
        with only(measured.node, both):
            for name in (LIGHT, *measured.floods):  # the engines learn how long their steps take
                await asyncio.gather(*(ask(measured.node.target(name), tokens.fresh(512), 16) for _ in range(4)))
    for number in range(args.rounds):
        for measured in (off, shared) if number % 2 else (shared, off):
            with only(measured.node, both):
                await measured.round(args, tokens)
        say(f"round {number + 1}: light between tokens P99, ms: " + ", ".join(map(_round_line, (off, shared))))


def _round_line(measured: Measured) -> str:
    of = STATISTICS["between tokens, P99"]
    last = (measured.alone[-1], measured.alone_on_half[-1], measured.beside[-1])
    return f"{measured.node.name} " + " / ".join(f"{1e3 * of(waits):.1f}" for waits in last)


def main() -> None:
    options = parser(__doc__ or "", rounds=5, default_model="a random model of 16 layers, 1,024 wide")
    options.add_argument("--requests", type=int, default=6, help="requests to the light model, in each load of a round")
    options.add_argument("--prompt", type=int, default=256, help="tokens of a prompt of the light model")
    options.add_argument("--decoded", type=int, default=32, help="tokens of an answer of the light model")
    options.add_argument(
        "--pause-s", type=float, default=0.0, help="seconds between an answer of the light model and its next request"
    )
    options.add_argument("--floods", type=int, default=1, help="number of models that are flooded")
    options.add_argument("--flood-streams", type=int, default=4, help="requests to each flooded model at any time")
    options.add_argument("--flood-prompt", type=int, default=1024)
    options.add_argument("--flood-decoded", type=int, default=16)
    options.add_argument("--flood-s", type=float, default=30.0, help="seconds for which all models are flooded")
    options.add_argument(
        "--step-tokens", type=int, default=512, help="the most tokens of a step; tokens are counted when a step ends"
    )
    options.add_argument("--lead-s", type=float, default=0.5)
    options.add_argument("--weight", type=int, default=1, help="weight of the light model; the others have 1")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="shares-") as directory:
        checkpoint = args.checkpoint or make_shape(Path(directory), 16, 4, 8192, hidden_size=1024)

        floods = [f"flood-{number}" for number in range(1, args.floods + 1)]

        def measured(name: str, light: object, flood: object) -> Measured:
            options = {"max_num_batched_tokens": args.step_tokens}
            models = [model(LIGHT, checkpoint, "512MiB", compute=light, **options)]
            models += [model(other, checkpoint, "512MiB", compute=flood, **options) for other in floods]
            return Measured(Node(name, {}, models), floods)

        off, shared = measured("off", "off", "off"), measured("shares", {"weight": args.weight}, {"weight": 1})
        with nodes_up(off.node, shared.node):
            off.node.hold()
            shared.node.hold()
            asyncio.run(measure(off, shared, args))
    show(off, shared)
    write_report(args, off=figures(off), shares=figures(shared))


def figures(measured: Measured) -> dict[str, object]:
    """Return all measurements in a form that JSON can hold."""
    waits = {name: [asdict(of) for of in getattr(measured, name)] for name in ("alone", "alone_on_half", "beside")}
    throughput = [asdict(of) for of in measured.throughput]
    return {**waits, "light_core_share": measured.light_core_share, "throughput": throughput}


if __name__ == "__main__":
    main()
