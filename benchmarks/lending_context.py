"""Measure the longest context that a master serves, with lending and without, beside `swiftkv plan`'s prediction:

    python benchmarks/lending_context.py --out benchmarks/out/context.json

Pools and shapes are in the proportions of the paper's section 5.3, made small: a master beside two workers, each on a
GPU of its own, whose pool is 0.9 of the GPU's memory less the weights (float16). Layers and the ratios of KV bytes per
token are the real ones, so blocks, extents and the split of the master's pool come out as they would there; weights are
random and narrow.

A length is served if a prompt that is one token shorter is answered with one token. A context that is one token longer
than the plan's longest must be refused for lack of memory, not for its length, so `max_model_len` is larger.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from lending_node import Node, Tokens, make_shape, model, nodes_up, parser, say, table, write_report

from swiftkv.bench.client import send
from swiftkv.config import Config, parse_config
from swiftkv.planning.lending import BorrowerRoom, plan_lending
from swiftkv.planning.node import plan_node

MIB = 1 << 20
MAX_POSITIONS = 1 << 18
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Model:
    """A model of the paper's Table 2, with the memory that its weights take."""

    name: str
    num_layers: int
    num_kv_heads: int  # all models have the same head size; divided by 8 here
    weights_gb: float

    def pool_gb(self, gpu_gb: float) -> float:
        return 0.9 * gpu_gb - self.weights_gb


LWM = Model("lwm", 32, 32, 13.5)
QWEN3_8B = Model("qwen3-8b", 36, 8, 16.4)
QWEN3_14B = Model("qwen3-14b", 40, 8, 29.5)
QWEN3_32B = Model("qwen3-32b", 64, 8, 65.5)


@dataclass(frozen=True)
class Case:
    label: str
    master: Model
    workers: tuple[Model, Model]
    gpu_gb: float
    budget_part: float
    master_pool_mib: int
    target: float  # the least ratio of the contexts with and without lending

    def pool_mib(self, of: Model) -> int:
        return round(self.master_pool_mib * of.pool_gb(self.gpu_gb) / self.master.pool_gb(self.gpu_gb))


CASES = {
    "32b-96gb": Case(
        "Qwen3-32B beside 14B and 8B, 96 GB, budgets of 50 %", QWEN3_32B, (QWEN3_14B, QWEN3_8B), 96, 0.5, 51, 3.98
    ),
    "lwm-80gb": Case("LWM beside 14B and 8B, 80 GB, budgets of 90 %", LWM, (QWEN3_14B, QWEN3_8B), 80, 0.9, 64, 1.58),
    "lwm-24gb": Case("LWM beside two 8B, 24 GB, budgets of 90 %", LWM, (QWEN3_8B, QWEN3_8B), 24, 0.9, 64, 1.58),
}


@dataclass(frozen=True)
class Served:
    """The outcome for the longest length that was predicted, and for one token more."""

    predicted: int
    is_served: bool
    seconds: float
    beyond: str  # how one token more was refused; empty: it was served

    @property
    def is_exact(self) -> bool:
        return self.is_served and bool(self.beyond)


def node_sections(case: Case, checkpoints: dict[str, Path], budget: float | None) -> list[dict[str, object]]:
    """Return the models' sections; `budget` is the part of its pool that each worker lends."""
    sections = [
        model(
            "master",
            checkpoints[case.master.name],
            f"{case.master_pool_mib}MiB",
            "master",
            max_num_batched_tokens=2048,
            max_num_seqs=4,
        )
    ]
    for number, worker in enumerate(case.workers):
        lending = {"budget": "0" if budget is None else f"{100 * budget:g}%", "window": "5s"}
        sections.append(
            model(f"worker{number}", checkpoints[worker.name], f"{case.pool_mib(worker)}MiB", lending=lending)
        )
    return sections


def room_of(case: Case, checkpoints: dict[str, Path], budget: float) -> BorrowerRoom:
    """Return the borrower's room in the plan that `swiftkv plan` makes."""
    config: Config = parse_config({"models": node_sections(case, checkpoints, budget)})
    (room,) = plan_lending(plan_node(config, need_weights=False))
    return room


def probe(node: Node, longest: int, tokens: Tokens) -> Served:
    """Serve `longest` tokens, then one more."""
    begin_s = time.perf_counter()
    error = asyncio.run(attempt(node, longest - 1, tokens))
    seconds = time.perf_counter() - begin_s
    if error:
        say(f"  {longest:,} tokens: {error}")
    beyond = asyncio.run(attempt(node, longest + 1, tokens))
    return Served(longest, not error, seconds, beyond)


async def attempt(node: Node, num_tokens: int, tokens: Tokens) -> str:
    """Send a prompt of `num_tokens`, and ask for one more token, which needs no KV. Return what went wrong."""
    async with httpx.AsyncClient(timeout=900) as client:
        return (await send(client, node.target("master"), tokens.fresh(num_tokens), 1)).error


def measure(case: Case, checkpoints: dict[str, Path], tokens: Tokens) -> dict[str, object]:
    room = room_of(case, checkpoints, case.budget_part)
    alone, together = room.beside().sequence_tokens, room.sequence_tokens
    say(f"{case.label}: {alone:,} tokens without lending and {together:,} with are predicted")
    # Nodes start with a larger budget than is then lent, so that memory, not max_model_len, limits the length.
    sections = node_sections(case, checkpoints, case.budget_part + 0.1)
    waiting = {"lending": {"max_wait": "2s"}}
    plain = Node(f"{case.label}, off", {"lending": "off"}, node_sections(case, checkpoints, None))
    lending = Node(case.label, waiting, sections)
    with nodes_up(plain, lending):
        lengths = {"lending: off": probe(plain, alone, tokens)}
        for number, pair in enumerate(room.pairs):
            lending.set_budget(f"worker{number}", pair.lent_bytes)
        lending.wait_until_borrowed("master", room.lent_bytes)
        lengths["budgets as planned"] = probe(lending, together, tokens)
        for number in range(len(room.pairs)):
            lending.set_budget(f"worker{number}", 0)
        lending.wait_until_borrowed("master", 0)
        lengths["budgets of 0"] = probe(lending, alone, tokens)
    for label, served in lengths.items():
        outcome = "served" if served.is_served else "NOT SERVED"
        beyond = f"refused ({served.beyond[:60]}…)" if served.beyond else "SERVED, TOO"
        say(f"  {label}: {served.predicted:,} {outcome} in {served.seconds:.1f} s; one more: {beyond}")
    is_exact = all(served.is_exact for served in lengths.values())
    return {
        "case": case.label,
        "pools_mib": [case.master_pool_mib, *map(case.pool_mib, case.workers)],
        "num_extents": [pair.num_extents for pair in room.pairs],
        "alone": alone,
        "together": together,
        "ratio": together / alone,
        "is_exact": is_exact,
        "asked_for": case.target,
        "lengths": {label: vars(served) for label, served in lengths.items()},
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", choices=list(CASES), default=["32b-96gb", "lwm-80gb"])
    args = arguments.parse_args()
    tokens = Tokens(args.seed, (300, 500))
    with tempfile.TemporaryDirectory(prefix="lend-") as directory:
        cases = [CASES[name] for name in args.cases]
        models = {of.name: of for case in cases for of in (case.master, *case.workers)}
        checkpoints = {
            name: make_shape(Path(directory) / name, of.num_layers, of.num_kv_heads // 8, MAX_POSITIONS)
            for name, of in models.items()
        }
        results = [measure(case, checkpoints, tokens) for case in cases]
    heads = ["master beside workers", "without, tokens", "with, tokens", "ratio", "asked for", "to the block"]
    rows = [
        [
            f"{result['case']}",
            f"{result['alone']:,}",
            f"{result['together']:,}",
            f"{result['ratio']:.3f}",
            f"≥ {result['asked_for']}",
            "yes" if result["is_exact"] else "NO",
        ]
        for result in results
    ]
    say("\n" + table(heads, rows))
    write_report(args, cases=results)


if __name__ == "__main__":
    main()
