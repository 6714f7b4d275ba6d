"""Measure how long answers stand still while long prompts come in, without `target_tpot` and with it:

    python benchmarks/stalls.py --target 250ms --out benchmarks/out/stalls.json

Two nodes serve the same random model on the CPU; one has `target_tpot: off`. In each round both are measured in turns,
and the other is held still: four streams decode, then three prompts of 2,000 tokens come at once, and a short one after
them. Between the arrival of the prompts and the last one's first token it measures the times between two tokens of the
streams (median, P99, longest), prompt tokens a second, and the short prompt's time to its first token. The last column
has the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path

import httpx
from lending_node import (
    EXTRA,
    Node,
    Tokens,
    make_shape,
    model,
    nodes_up,
    only,
    parser,
    quantile,
    say,
    table,
    write_report,
)

from swiftkv.bench.client import Target, TimedAnswer, send

VOCAB = (300, 500)
STREAM_PROMPT = 128
_HTTP_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Round:
    """One round of one node."""

    itls_s: list[float]  # between tokens of all streams, while prompts were computed
    prefill_tokens_per_s: float
    short_ttft_s: float

    @property
    def p99_s(self) -> float:
        return quantile(self.itls_s, 0.99)


@dataclass
class Measured:
    node: Node
    rounds: list[Round] = field(default_factory=list)

    async def round(self, args: argparse.Namespace, tokens: Tokens) -> None:
        target = Target(f"{self.node.url}/v1/completions", "stalls", extra_body=EXTRA)
        async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S) as client:

            def ask(num_prompt: int, num_tokens: int) -> asyncio.Task[TimedAnswer]:
                return asyncio.create_task(send(client, target, tokens.fresh(num_prompt), num_tokens))

            streams = [ask(STREAM_PROMPT, args.stream_tokens) for _ in range(args.streams)]
            await asyncio.sleep(args.lead_s)  # until all of them decode
            prompts = [ask(args.prompt, 1) for _ in range(args.prompts)]
            await asyncio.sleep(args.short_after_s)
            short = ask(args.short, 1)
            answers = await asyncio.gather(*prompts, short, *streams)
        if errors := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"{self.node.name}: {errors[0]}")
        long_ones, short_one, streamed = answers[: args.prompts], answers[args.prompts], answers[args.prompts + 1 :]
        begin_s = min(answer.start_s for answer in long_ones)
        end_s = max(answer.start_s + answer.ttft_s for answer in long_ones)
        itls_s = [itl for answer in streamed for itl in _within(answer, begin_s, end_s)]
        if min(answer.start_s + answer.latency_s for answer in streamed) < end_s:
            raise SystemExit(f"{self.node.name}: a stream ended before the prompts; raise --stream-tokens")
        prefill_rate = args.prompts * args.prompt / (end_s - begin_s)
        self.rounds.append(Round(itls_s, prefill_rate, short_one.ttft_s))


def _within(answer: TimedAnswer, begin_s: float, end_s: float) -> list[float]:
    """Return the times between tokens that overlap with `begin_s` to `end_s`."""
    ends_s = list(accumulate(answer.itls_s, initial=answer.start_s + answer.ttft_s))[1:]
    return [itl for itl, at_s in zip(answer.itls_s, ends_s, strict=True) if at_s > begin_s and at_s - itl < end_s]


def show(off: Measured, on: Measured, args: argparse.Namespace) -> None:
    def row(name: str, unit: float, value: str) -> tuple[str, ...]:
        pairs = [[getattr(r, value) for r in measured.rounds] for measured in (off, on)]
        ratio = statistics.median(b / a for a, b in zip(*pairs, strict=True))
        return name, *(f"{statistics.median(values) * unit:,.0f}" for values in pairs), f"x {ratio:.2f}"

    every = [[itl for r in measured.rounds for itl in r.itls_s] for measured in (off, on)]
    rows = [
        ("between tokens, median, ms", *(f"{statistics.median(itls) * 1e3:,.0f}" for itls in every), ""),
        row("between tokens, P99, ms", 1e3, "p99_s"),
        ("between tokens, longest, ms", *(f"{max(itls) * 1e3:,.0f}" for itls in every), ""),
        row("prompt tokens a second", 1.0, "prefill_tokens_per_s"),
        row(f"first token of {args.short} tokens behind them, ms", 1e3, "short_ttft_s"),
    ]
    say(table(("", "off", args.target, "ratio"), rows))


async def measure(off: Measured, on: Measured, args: argparse.Namespace) -> None:
    tokens = Tokens(args.seed, VOCAB)
    for number in range(-1, args.rounds):  # the first is for warming up, and for the engine to learn
        for measured in (off, on):
            with only(measured.node, (off.node, on.node)):
                await measured.round(args, tokens)
        if number < 0:
            off.rounds.clear()
            on.rounds.clear()
        else:
            say(f"round {number + 1}: P99 {off.rounds[-1].p99_s:.3f} s off, {on.rounds[-1].p99_s:.3f} s on")


def main() -> None:
    options = parser(__doc__ or "", rounds=5, default_model="a random model of 16 layers, 1,024 wide")
    options.add_argument("--target", default="250ms", help="target_tpot of the second node")
    options.add_argument("--policy", default="hrrn", help="scheduling_policy of both nodes")
    options.add_argument("--streams", type=int, default=4)
    options.add_argument("--stream-tokens", type=int, default=400)
    options.add_argument("--prompts", type=int, default=3, help="number of long prompts")
    options.add_argument("--prompt", type=int, default=2000, help="tokens of each long prompt")
    options.add_argument("--short", type=int, default=68, help="tokens of the short prompt")
    options.add_argument(
        "--short-after-s", type=float, default=0.5, help="seconds from the long prompts to the short one"
    )
    options.add_argument(
        "--lead-s", type=float, default=1.0, help="seconds for which streams run before the prompts come"
    )
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="stalls-") as directory:
        checkpoint = args.checkpoint or make_shape(Path(directory), 16, 4, 8192, hidden_size=1024)

        def node(name: str, target: str) -> Node:
            section = model("stalls", checkpoint, "1GiB", target_tpot=target, scheduling_policy=args.policy)
            return Node(name, {}, [section])

        off, on = Measured(node("off", "off")), Measured(node("on", args.target))
        with nodes_up(off.node, on.node):
            off.node.hold()
            on.node.hold()
            asyncio.run(measure(off, on, args))
    show(off, on, args)
    write_report(args, off=[asdict(r) for r in off.rounds], on=[asdict(r) for r in on.rounds])


if __name__ == "__main__":
    main()
