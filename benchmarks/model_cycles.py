"""Add, put to sleep, wake and remove a model again and again beside two that stream:

    python benchmarks/model_cycles.py --cycles 100 --out benchmarks/out/model_cycles.json

One node serves two models, one of which lends to the other; both answer all the time, one request after the other. In
each cycle a third one, the guest, is added, put to sleep (at level 1 and level 2 in turns), woken, asked for a few
tokens and removed. Before or after that, in turns, comes a calm time of --calm-s. Printed are the times between tokens
of the two models, calm and in each kind of change; asked for: P99 of all changes together at most 1.2 times that of the
calm times, as the median over cycles of the ratio within a cycle.

After --warm cycles, and after each later one, the node's processes and files, `/dev/shm`, and the threads and open
files of the gateway and the two engines are listed; asked for: nothing is added that stays. Their private memory is
read too; asked for: from the least of the first half of all cycles to the least of the second half, it grows by less
than --growth-kib. Memory that a process keeps once does not grow with the number of cycles, but a leak does; it takes a
hundred cycles to tell the two apart, not ten. The exit status is 1 if a check failed.

`--streams 0 --calm-s 0` checks only what is left behind, in a fraction of the time: in each cycle the two models answer
one request each.

With `--checkpoint` models of real size stream, whose tokens are tens of milliseconds apart: pools grow with them, to
hold the longest sequence of each stream. The guest stays small unless `--guest` names another.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from lending_node import Tokens, ask, model, parser, quantile, say, table, write_report
from watched_node import (
    DEMO_CHECKPOINTS,
    GATEWAY,
    MIB,
    Checks,
    Usage,
    WatchedNode,
    plain_table,
    problems_at_rest,
    usage_of,
)

from swiftkv.arithmetic import ceil_div
from swiftkv.models.registry import read_config

VOCAB = (300, 4000)
STREAMING = ("chat", "code")
GUEST = "guest"
CALM = "calm"
CHANGES = ("add", "sleep", "wake", "remove")
_PROMPT_TOKENS = 64
_GUEST_TOKENS = 4
_GUEST_MODEL_LEN = 2048
_BLOCK_SIZE = 16
_REST_TIMEOUT_S = 30.0
_SETTLE_S = 0.3
_SHOWN_PARTS = (0.06, 0.24, 0.5, 0.75, 1.0)
_TO_COLLECT = 2
"""The threads of a removed model's tokenizer, which end when Python collects it."""


@dataclass(frozen=True)
class Span:
    """A time in which one change was made, or none."""

    cycle: int
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Belongings:
    """The belongings of a node, to which a removed model must have added nothing."""

    processes: list[str]
    files: list[str]
    shared_memory: list[str]
    threads: dict[str, int]
    open_files: dict[str, int]


@dataclass
class Figures:
    """The figures of a run, cycle by cycle."""

    spans: list[Span] = field(default_factory=list)
    token_times_s: list[tuple[float, float]] = field(default_factory=list)
    """The times of each two consecutive tokens of an answer."""
    belongings: list[Belongings] = field(default_factory=list)
    """The node's belongings after each cycle."""
    private_bytes: dict[str, list[int]] = field(default_factory=dict)
    """The resident memory after each cycle, by process, without shared mappings, which pools and files are."""

    @contextmanager
    def span(self, cycle: int, name: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.spans.append(Span(cycle, name, begin_s, time.perf_counter()))

    def gaps_s(self, names: Sequence[str], cycle: int | None = None) -> list[float]:
        """Return the times between tokens in the spans of these names, of one cycle or of all.

        A gap counts for every change that it overlaps, and for a calm time only if it lies within it.
        """
        begins, ends = np.array(self.token_times_s).reshape(-1, 2).T
        counts = np.zeros(len(begins), bool)
        for span in self.spans:
            if span.name not in names or cycle not in (None, span.cycle):
                continue
            if span.name == CALM:
                counts |= (begins >= span.begin_s) & (ends <= span.end_s)
            else:
                counts |= (begins < span.end_s) & (ends > span.begin_s)
        gaps_s: list[float] = (ends - begins)[counts].tolist()
        return gaps_s

    def ratios(self, num_cycles: int) -> list[float]:
        """Return, for each cycle, P99 in its changes divided by P99 in its calm time."""
        both = [(self.gaps_s(CHANGES, cycle), self.gaps_s([CALM], cycle)) for cycle in range(num_cycles)]
        return [quantile(changing, 0.99) / quantile(calm, 0.99) for changing, calm in both if changing and calm]


class Cycles:
    """Runs the cycles beside the streams."""

    def __init__(self, node: WatchedNode, args: argparse.Namespace) -> None:
        self.figures = Figures()
        self._node = node
        self._args = args
        self._tokens = Tokens(args.seed, VOCAB)
        self._is_over = False

    async def run(self) -> tuple[Belongings, Belongings]:
        """Run all cycles; return the node's belongings after the warm-up and at the end."""
        await self._beside_streams(self._args.warm)
        before, self.figures = await self._at_rest(), Figures()
        await self._beside_streams(self._args.cycles)
        return before, await self._at_rest()

    async def _beside_streams(self, num_cycles: int) -> None:
        self._is_over = False
        streams = [asyncio.create_task(self._stream(name)) for name in STREAMING for _ in range(self._args.streams)]
        await asyncio.sleep(_SETTLE_S)
        for cycle in range(num_cycles):
            parts = (self._be_calm, self._change)
            for part in parts if cycle % 2 else reversed(parts):
                await part(cycle)
            for name, usage in self._usages().items():
                memory = psutil.Process(usage.pid).memory_info()
                self.figures.private_bytes.setdefault(name, []).append(memory.rss - memory.shared)
            self.figures.belongings.append(self._belongings())
            if cycle % 10 == 9:
                say(f"{cycle + 1} of {num_cycles} cycles")
        self._is_over = True
        await asyncio.gather(*streams)

    async def _be_calm(self, cycle: int) -> None:
        with self.figures.span(cycle, CALM):
            for name in () if self._args.streams else STREAMING:
                await self._answer(name)
            await asyncio.sleep(self._args.calm_s)

    async def _change(self, cycle: int) -> None:
        """Add the guest, put it to sleep, wake it, ask it and remove it."""
        checkpoint = self._args.guest or DEMO_CHECKPOINTS / "code"
        memory = pool_memory(checkpoint, 16, _GUEST_MODEL_LEN)
        section = model(GUEST, checkpoint, memory, threads=1, max_model_len=_GUEST_MODEL_LEN)
        level = 1 + cycle % 2
        with self.figures.span(cycle, "add"):
            await self._admin("POST", "models", json=section)
        with self.figures.span(cycle, "sleep"):
            await self._admin("POST", f"models/{GUEST}/sleep?level={level}")
        with self.figures.span(cycle, "wake"):
            await self._admin("POST", f"models/{GUEST}/wake")
        await ask(self._node.target(GUEST), self._tokens.fresh(_PROMPT_TOKENS), _GUEST_TOKENS)
        with self.figures.span(cycle, "remove"):
            await self._admin("DELETE", f"models/{GUEST}")
        await asyncio.sleep(_SETTLE_S)

    async def _admin(self, method: str, path: str, **options: Any) -> None:
        answer = await asyncio.to_thread(self._node.admin, method, path, **options)
        if not answer.is_success:
            raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text}\n{self._node.log_tail()}")

    async def _stream(self, name: str) -> None:
        while not self._is_over:
            await self._answer(name)

    async def _answer(self, name: str) -> None:
        answer = await ask(self._node.target(name), self._tokens.fresh(_PROMPT_TOKENS), self._args.stream_tokens)
        times_s = list(accumulate(answer.itls_s, initial=answer.start_s + answer.ttft_s))
        self.figures.token_times_s += pairwise(times_s)

    def _usages(self) -> dict[str, Usage]:
        pids = {name: pid for name, pid in self._node.pids().items() if name in (GATEWAY, *STREAMING)}
        return {name: usage for name, pid in pids.items() if (usage := usage_of(pid)) is not None}

    async def _at_rest(self) -> Belongings:
        await asyncio.sleep(_SETTLE_S)
        return self._belongings()

    def _belongings(self) -> Belongings:
        usages = self._usages()
        children = psutil.Process(self._node.pid).children(recursive=True)
        directory = self._node.directory
        return Belongings(
            sorted(" ".join(child.cmdline()[-3:]) for child in children),
            sorted(str(path.relative_to(directory)) for path in directory.rglob("*")),
            sorted(path.name for path in Path("/dev/shm").iterdir()),
            {name: usage.threads for name, usage in usages.items()},
            {name: usage.fds for name, usage in usages.items()},
        )


def pool_memory(checkpoint: Path, least_mib: int, num_tokens: int) -> str:
    """Return the size of a pool that holds `num_tokens`, at least `least_mib`, as the YAML file has it."""
    block_bytes = sum(group.block_bytes for group in read_config(checkpoint).kv_groups(_BLOCK_SIZE, "bfloat16"))
    return f"{max(least_mib, ceil_div(ceil_div(num_tokens, _BLOCK_SIZE) * block_bytes, MIB))}MiB"


def growth_kib(values: Sequence[int]) -> float:
    """Return the growth from the least of the first half of `values` to the least of the second."""
    half = len(values) // 2
    return (min(values[half:]) - min(values[:half])) / 1024 if half else 0.0


def check(checks: Checks, figures: Figures, before: Belongings, after: Belongings, args: argparse.Namespace) -> None:
    if ratios := figures.ratios(args.cycles):
        ratio = statistics.median(ratios)
        checks.add("P99 between tokens, changes / calm", ratio <= 1.2, f"x {ratio:.2f}", "<= x 1.20")
    for name, differences in changed(before, after).items():
        checks.add(name.replace("_", " "), not differences, ", ".join(differences) or "as before", "as before")
    for name, values in figures.private_bytes.items():
        grown = growth_kib(values)
        checks.add(f"{name}: memory", grown < args.growth_kib, f"{grown:+,.0f} KiB", f"< {args.growth_kib:,.0f}")


def changed(before: Belongings, after: Belongings) -> dict[str, list[str]]:
    """Return the belongings that were added (+) and removed (-), by kind."""
    pairs = zip(asdict(before).items(), asdict(after).values(), strict=True)
    return {name: _differences(then, now) for (name, then), now in pairs}


def _differences(then: Any, now: Any) -> list[str]:
    if isinstance(then, dict):
        return [f"{name} {then[name]} -> {now[name]}" for name in then if now[name] - then[name] > _TO_COLLECT]
    gone, come = ([item for item in these if item not in those] for these, those in ((then, now), (now, then)))
    return [*(f"- {item}" for item in gone), *(f"+ {item}" for item in come)]


def rows(figures: Figures) -> list[list[str]]:
    """Return table rows: how long each kind of change took, and the times between tokens meanwhile."""
    made = []
    for name in (CALM, *CHANGES):
        gaps_s = figures.gaps_s([name])
        lengths_s = [span.end_s - span.begin_s for span in figures.spans if span.name == name]
        took = [f"{quantile(lengths_s, part):.2f}" for part in (0.5, 1.0)]
        gaps = [f"{1e3 * quantile(gaps_s, part):.1f}" if gaps_s else "" for part in (0.5, 0.99, 1.0)]
        made.append([name, *took, *gaps])
    return made


def holdings(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table: the node's belongings after some of the cycles."""
    num_cycles = len(figures.belongings)
    shown = sorted({max(1, round(num_cycles * part)) for part in _SHOWN_PARTS})
    columns = [figures.belongings[count - 1] for count in shown]
    made = [
        [what.replace("_", " "), *(str(len(getattr(column, what))) for column in columns)]
        for what in ("processes", "files", "shared_memory")
    ]
    for name, values in figures.private_bytes.items():
        made.append([f"{name}: private memory, KiB", *(f"{values[count - 1] >> 10:,}" for count in shown)])
        both = (f"{column.threads.get(name)}, {column.open_files.get(name)}" for column in columns)
        made.append([f"{name}: threads, open files", *both])
    return ["after so many cycles", *map(str, shown)], made


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--cycles", type=int, default=100)
    options.add_argument("--warm", type=int, default=10, help="cycles before measuring begins")
    options.add_argument(
        "--checkpoint", type=Path, help="checkpoint of the models that stream; default: those of the demo"
    )
    options.add_argument("--guest", type=Path, help="checkpoint of the model that comes and goes; default: the demo's")
    options.add_argument("--max-model-len", type=int, default=2048, help="max_model_len of the models that stream")
    options.add_argument("--threads", type=int, default=1, help="threads of each model that streams")
    options.add_argument(
        "--streams",
        type=int,
        default=1,
        help="answers in progress at any time, for each model that streams; 0: one answer a cycle",
    )
    options.add_argument("--stream-tokens", type=int, default=500)
    options.add_argument("--calm-s", type=float, default=3.0)
    options.add_argument("--growth-kib", type=float, default=1024.0, help="KiB of growth in all cycles that still pass")
    options.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    args = options.parse_args()
    shared: dict[str, Any] = {"threads": args.threads, "max_model_len": args.max_model_len}
    checkpoints = [args.checkpoint or DEMO_CHECKPOINTS / name for name in STREAMING]
    num_tokens = args.streams * args.max_model_len
    pools = [pool_memory(checkpoint, least, num_tokens) for checkpoint, least in zip(checkpoints, (8, 16), strict=True)]
    models = [
        model(STREAMING[0], checkpoints[0], pools[0], "master", **shared),
        model(STREAMING[1], checkpoints[1], pools[1], lending={"budget": "50%"}, **shared),
    ]
    checks, show = Checks(), table if args.markdown else plain_table
    with WatchedNode("cycles", {}, models) as node:
        cycles = Cycles(node, args)
        try:
            before, after = asyncio.run(cycles.run())
        except httpx.HTTPError as error:
            raise SystemExit(f"{error!r}\n{node.log_tail()}") from None
        problems = problems_at_rest(node, _REST_TIMEOUT_S)
    figures = cycles.figures
    heads = ["", "took, median s", "longest", "between tokens, median ms", "P99", "longest"]
    say(show(heads, rows(figures)))
    say("\n" + show(*holdings(figures)))
    check(checks, figures, before, after, args)
    checks.add("pools", not problems, "; ".join(problems) or "sane", "sane")
    say("\n" + show(Checks.HEADS, checks.rows))
    spans = [asdict(span) for span in figures.spans]
    gaps = {name: figures.gaps_s([name]) for name in (CALM, *CHANGES)}
    belongings = [asdict(each) for each in figures.belongings]
    memory = figures.private_bytes
    write_report(args, checks=checks.rows, spans=spans, gaps_s=gaps, private_bytes=memory, belongings=belongings)
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
