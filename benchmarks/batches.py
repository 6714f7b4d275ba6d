"""Measure what clients notice of a batch that runs beside them, and how many tokens the batch gets meanwhile:

    python benchmarks/batches.py --checkpoint CKPT --out benchmarks/out/batches.json

One node serves one model. Clients' requests arrive at random, at the same times and of the same lengths in every round,
with and without a batch beside them, in turns. A measurement with a batch begins once the batch's first lines have
ended, so that the engine is full of lines when the first client comes. Last, the batch runs alone.

Times to first token and between tokens are those of all rounds together; offline tokens are those that the engine
generated while clients were served, less the clients'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    parser,
    quantile,
    say,
    small_checkpoint,
    table,
    write_report,
)

from swiftkv.bench.client import TimedAnswer, send

NAME = "chat"
_WARM_LINES = 2
_WARM_REQUESTS = 20
_POLL_S = 0.2


@dataclass
class Measured:
    """The measurements of all rounds of one kind."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    online_tokens: int = 0
    offline_tokens: int = 0
    seconds: float = 0.0

    def add(self, answers: list[TimedAnswer], generated_tokens: int, seconds: float) -> None:
        tokens = sum(answer.num_output_tokens for answer in answers)
        self.ttft_s += [answer.ttft_s for answer in answers]
        self.between_s += [gap for answer in answers for gap in answer.itls_s]
        self.online_tokens += tokens
        self.offline_tokens += generated_tokens - tokens
        self.seconds += seconds

    def row(self) -> list[str]:
        cells = [
            f"{1e3 * quantile(values, part):,.0f}" if values else "-"
            for values in (self.ttft_s, self.between_s)
            for part in (0.5, 0.99)
        ]
        rates = [f"{tokens / self.seconds:.1f}" for tokens in (self.online_tokens, self.offline_tokens)]
        return [self.name, *cells, *rates]


class Batch:
    """A batch that does not end while it is measured."""

    def __init__(self, node: Node, tokens: Tokens, args: argparse.Namespace) -> None:
        self._http = httpx.Client(base_url=node.url, timeout=120)
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": NAME,
                    "prompt": tokens.fresh(args.offline_prompt),
                    "max_tokens": args.offline_tokens,
                    "ignore_eos": True,
                },
            }
            for i in range(args.lines)
        ]
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = self._post("/v1/files", data={"purpose": "batch"}, files={"file": ("requests.jsonl", content)})
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = self._post("/v1/batches", json=body)["id"]

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        answer = self._http.post(path, **content)
        answer.raise_for_status()
        made: dict[str, Any] = answer.json()
        return made

    def _get(self) -> dict[str, Any]:
        batch: dict[str, Any] = self._http.get(f"/v1/batches/{self._id}").raise_for_status().json()
        return batch

    def __enter__(self) -> Batch:
        while (batch := self._get())["request_counts"]["completed"] < _WARM_LINES:
            if batch["status"] not in ("validating", "in_progress"):
                raise SystemExit(f"the batch is {batch['status']}: {batch['errors']}")
            time.sleep(_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._get()["status"] != "in_progress":
            raise SystemExit("the batch ended before it was measured: --lines is too small")
        self._post(f"/v1/batches/{self._id}/cancel")
        while self._get()["status"] != "cancelled":
            time.sleep(_POLL_S)
        self._http.close()


def generated_tokens(node: Node) -> int:
    """Return the tokens that the engine has generated since it started."""
    return int(node.metrics(NAME)["vllm:generation_tokens_total"])


async def serve_clients(node: Node, tokens: Tokens, args: argparse.Namespace, number: int) -> list[TimedAnswer]:
    """Send each request of one round when it is due, even if earlier ones have not been answered."""
    rng = random.Random(args.seed + number)
    target = node.target(NAME)
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=None)) as client:
        sent, due_s = [], time.perf_counter()
        end_s = due_s + args.seconds
        while (due_s := due_s + rng.expovariate(args.rate)) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            prompt = tokens.fresh(args.prompt)
            sent.append(asyncio.create_task(send(client, target, prompt, args.tokens)))
        answers = await asyncio.gather(*sent)
    for answer in answers:
        if answer.error:
            raise SystemExit(f"a client's request failed: {answer.error}")
    return answers


def measure(node: Node, side: Measured, tokens: Tokens, args: argparse.Namespace, number: int) -> None:
    before, start_s = generated_tokens(node), time.perf_counter()
    answers = asyncio.run(serve_clients(node, tokens, args, number))
    seconds = time.perf_counter() - start_s
    side.add(answers, generated_tokens(node) - before, seconds)
    say(f"up to round {number + 1}, of {len(answers)} requests:  " + "  ".join(side.row()))


def main() -> None:
    arguments = parser(__doc__, rounds=3, default_model=SMALL_MODEL)
    arguments.add_argument(
        "--seconds", type=float, default=60, help="how long clients send requests, in each round and kind"
    )
    arguments.add_argument("--rate", type=float, default=0.4, help="clients' requests a second")
    arguments.add_argument("--prompt", type=int, default=256, help="tokens of a client's prompt")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of an answer to a client")
    arguments.add_argument("--offline-prompt", type=int, default=128, help="tokens of a prompt in the batch")
    arguments.add_argument("--offline-tokens", type=int, default=64, help="tokens of an answer in the batch")
    arguments.add_argument("--lines", type=int, default=5000, help="lines of the batch")
    arguments.add_argument("--max-in-flight", type=int, help="node.batches.max_in_flight")
    args = arguments.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    tokens = Tokens(args.seed, (300, vocab_size))
    batches = {} if args.max_in_flight is None else {"max_in_flight": args.max_in_flight}
    served = model(NAME, checkpoint, "1GiB", max_model_len=4096)
    node = Node("batches", {"lending": False, "batches": batches, "state_dir": "state"}, [served])
    alone, beside, only_batch = Measured("clients alone"), Measured("beside a batch"), Measured("a batch alone")
    with nodes_up(node):
        for _ in range(_WARM_REQUESTS):
            asyncio.run(ask(node.target(NAME), tokens.fresh(args.prompt), args.tokens))
        for number in range(args.rounds):
            measure(node, alone, tokens, args, number)
            with Batch(node, tokens, args):
                measure(node, beside, tokens, args, number)
        with Batch(node, tokens, args):
            before, start_s = generated_tokens(node), time.perf_counter()
            time.sleep(args.seconds)
            only_batch.add([], generated_tokens(node) - before, time.perf_counter() - start_s)
    sides = (alone, beside, only_batch)
    heads = ["", "first token, median ms", "P99", "between tokens, median ms", "P99", "online tok/s", "offline tok/s"]
    say(table(heads, [side.row() for side in sides]))
    write_report(args, **{side.name.replace(" ", "_"): vars(side) for side in sides})


if __name__ == "__main__":
    main()
