"""Measure how much faster answers are with drafts (`speculative_config`), by how many of the guesses are right:

    python benchmarks/drafts.py --checkpoint CKPT --rounds 5

Two nodes serve the same model on the CPU; one makes drafts. In each round both are measured in turns, and the other is
held still. A model with random weights says nothing that could be guessed, so `logit_bias` leaves it two tokens, of
which the second comes as often as the load says: the more often the same token comes, the more guesses are right. With
`all tokens` nothing is left out, and there is hardly anything to guess. Both nodes must give the same answers.

The table has output tokens a second without drafts, and the medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from lending_node import EXTRA, Node, Tokens, make_shape, model, nodes_up, only, parser, say, table, write_report

from swiftkv.bench.client import Target, TimedAnswer, send

VOCAB = (300, 500)
_TOKENS = (311, 322)
_LOADS: Mapping[str, float | None] = {"0 %": 0.0, "5 %": 0.05, "20 %": 0.2, "50 %": 0.5, "all tokens": None}
"""The probability of the second of two tokens, by name; `None`: all tokens may come."""
_HTTP_TIMEOUT_S = 900.0


@dataclass
class Load:
    """The figures of one load with so many answers at once, of all rounds."""

    name: str
    at_once: int
    plain_rates: list[float] = field(default_factory=list)  # output tokens a second
    ratios: list[float] = field(default_factory=list)  # with drafts, of those without
    guesses: float = 0.0
    right: float = 0.0

    def row(self) -> Sequence[str]:
        share = f"{self.right / self.guesses:.0%}" if self.guesses else "none made"
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        plain = f"{statistics.median(self.plain_rates):.0f}"
        return self.name, f"{self.at_once}", share, plain, f"{statistics.median(self.ratios):.2f} ({spread})"


def options_of(probability: float | None, seed: int) -> dict[str, Any]:
    """Return the fields of a request whose answer has the second token with this probability."""
    common = {**EXTRA, "temperature": 1.0, "seed": seed}
    if probability is None:
        return common
    first, second = _TOKENS
    if probability == 0:
        return common | {"logit_bias": {first: 100}}
    # Biases are at most 100, and the difference of two of them is the logarithm of the odds.
    return common | {"logit_bias": {first: 100, second: 100 - math.log((1 - probability) / probability)}}


async def answers(node: Node, prompts: Sequence[list[int]], load: Load, num_tokens: int) -> list[TimedAnswer]:
    async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S) as client:

        def ask(number: int, prompt: list[int]) -> asyncio.Task[TimedAnswer]:
            body = options_of(_LOADS[load.name], number)
            target = Target(f"{node.url}/v1/completions", "drafts", extra_body=body)
            return asyncio.create_task(send(client, target, prompt, num_tokens))

        done = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    if errors := [answer.error for answer in done if answer.error]:
        raise SystemExit(f"{node.name}: {errors[0]}")
    return list(done)


def rate(done: Sequence[TimedAnswer]) -> float:
    begin_s = min(answer.start_s for answer in done)
    return sum(len(answer.token_ids) for answer in done) / (max(a.start_s + a.latency_s for a in done) - begin_s)


def guesses_so_far(node: Node) -> tuple[float, float]:
    """Return the guesses that a node has made, and those that were right."""
    values = node.metrics("drafts")
    return values["vllm:spec_decode_num_draft_tokens_total"], values["vllm:spec_decode_num_accepted_tokens_total"]


def run_round(load: Load, plain: Node, drafting: Node, prompts: Sequence[list[int]], num_tokens: int) -> None:
    with only(plain, (plain, drafting)):
        without = asyncio.run(answers(plain, prompts, load, num_tokens))
    with only(drafting, (plain, drafting)):
        guesses, right = guesses_so_far(drafting)
        with_drafts = asyncio.run(answers(drafting, prompts, load, num_tokens))
        more_guesses, more_right = guesses_so_far(drafting)
    if [answer.token_ids for answer in without] != [answer.token_ids for answer in with_drafts]:
        raise SystemExit(f"{load.name}, {load.at_once} at once: an answer with drafts differs")
    load.plain_rates.append(rate(without))
    load.ratios.append(rate(with_drafts) / rate(without))
    load.guesses += more_guesses - guesses
    load.right += more_right - right


def measure(args: argparse.Namespace, plain: Node, drafting: Node) -> list[Load]:
    tokens = Tokens(args.seed, VOCAB)
    loads = [Load(name, at_once) for at_once in args.at_once for name in _LOADS]
    warming_up = Load("all tokens", args.at_once[-1])
    run_round(warming_up, plain, drafting, [tokens.fresh(args.prompt) for _ in range(args.at_once[-1])], 32)
    for number in range(args.rounds):
        for load in loads:
            prompts = [tokens.fresh(args.prompt) for _ in range(load.at_once)]
            run_round(load, plain, drafting, prompts, args.answer)
        say(f"round {number + 1} of {args.rounds}")
    return loads


def main() -> None:
    options = parser(__doc__ or "", rounds=5, default_model="a random model of 16 layers, 1,024 wide")
    options.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], help="answers at once")
    options.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    options.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    options.add_argument("--guesses", type=int, default=7, help="num_speculative_tokens")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="drafts-") as directory:
        checkpoint = args.checkpoint or make_shape(Path(directory), 16, 4, 8192, hidden_size=1024)

        def node(name: str, drafts: object) -> Node:
            return Node(name, {}, [model("drafts", checkpoint, "1GiB", speculative_config=drafts, max_model_len=2048)])

        plain, drafting = node("plain", "off"), node("drafting", {"num_speculative_tokens": args.guesses})
        with nodes_up(plain, drafting):
            plain.hold()
            drafting.hold()
            loads = measure(args, plain, drafting)
    heads = ("the other token", "at once", "guesses right", "tok/s without", "with drafts, of that")
    say(table(heads, [load.row() for load in loads]))
    write_report(args, loads=[asdict(load) for load in loads])


if __name__ == "__main__":
    main()
