"""Turn 2 of a long conversation from the pool, from host memory, from files, and computed:

    python benchmarks/tiers.py --history 4096 --rounds 5 --out benchmarks/out/tiers.json

Three nodes serve the same model, one of them with `tiers.storage` in a directory of --storage, one with `tiers.host`;
those that are not measured are held still. In each round a fresh conversation is computed by the node with storage and
continued (local); then its engine is killed and, once it is back, continues it again, with the files in the page cache
(warm) and without (cold: `POSIX_FADV_DONTNEED`). The engine with host memory is killed in the same way. The third node
computes a prompt of the same length.

Every engine that was started anew first computes --warmup fresh tokens, so that its weights are in memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    only,
    parser,
    say,
    small_checkpoint,
    table,
    write_report,
)

NAME = "small"
_POLL_S = 0.05
_TIMEOUT_S = 300.0


@dataclass
class Figures:
    """Seconds to the first token in every round, and the tokens that came from a tier."""

    local_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    hit_tokens: list[float] = field(default_factory=list)


def metric(node: Node, name: str) -> float:
    for line in httpx.get(f"{node.url}/metrics", timeout=60).text.splitlines():
        if line.startswith(f"{name}{{") and f'model_name="{NAME}"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(_POLL_S)


def engine_view(node: Node) -> dict[str, object]:
    view: dict[str, object] = httpx.get(f"{node.url}/ready", timeout=60).json()["engines"][NAME]
    return view


def restart_engine(node: Node) -> None:
    """Kill the node's engine, and return when the next one serves."""
    restarts = engine_view(node)["restarts"]
    node.engine(NAME).send_signal(signal.SIGKILL)
    wait_until("the engine to be gone", lambda: engine_view(node)["restarts"] != restarts)
    wait_until("the engine to be back", lambda: engine_view(node)["state"] == "ready")


def forget_pages(directory: Path) -> None:
    """Have the kernel drop the files from its page cache."""
    os.sync()
    for file in directory.rglob("objects/*/*"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ttft_s(node: Node, prompt: list[int], num_tokens: int = 8) -> float:
    return float(asyncio.run(ask(node.target(NAME), prompt, num_tokens)).ttft_s)


def write_turn(node: Node, history: list[int], more: list[int]) -> list[int]:
    """Have a node compute a conversation; return its next turn once the blocks are written."""
    answer = asyncio.run(ask(node.target(NAME), history, 32))
    wait_until("the blocks to be written", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)
    assert metric(node, "swiftkv:tier_stored_blocks_total") >= len(history) // node.plan(NAME).block_size
    return [*history, *answer.token_ids, *more]


def measure_round(
    stored: Node, hosted: Node, plain: Node, tokens: Tokens, figures: Figures, directory: Path, args: object
) -> None:
    history, more = tokens.fresh(args.history), tokens.fresh(24)  # type: ignore[attr-defined]
    warmup = args.warmup  # type: ignore[attr-defined]
    with only(hosted, (stored, plain)):
        ttft_s(hosted, tokens.fresh(warmup))
        turn = write_turn(hosted, history, more)
        restart_engine(hosted)
        ttft_s(hosted, tokens.fresh(warmup))
        figures.host_s.append(ttft_s(hosted, turn))
        wait_until("its report", lambda: metric(hosted, "swiftkv:tier_hit_tokens_total") > 0)
        assert metric(hosted, "swiftkv:tier_hit_tokens_total") >= len(history)
    with only(stored, (hosted, plain)):
        ttft_s(stored, tokens.fresh(warmup))
        turn = write_turn(stored, history, more)
        figures.local_s.append(ttft_s(stored, turn))
        for is_cold, to in ((False, figures.warm_s), (True, figures.cold_s)):
            restart_engine(stored)
            ttft_s(stored, tokens.fresh(warmup))
            if is_cold:
                forget_pages(directory)
            to.append(ttft_s(stored, turn))
        wait_until("its report", lambda: metric(stored, "swiftkv:tier_hit_tokens_total") > 0)
        figures.hit_tokens.append(metric(stored, "swiftkv:tier_hit_tokens_total"))
    with only(plain, (stored, hosted)):
        ttft_s(plain, tokens.fresh(warmup))
        figures.computed_s.append(ttft_s(plain, tokens.fresh(len(turn))))


def main() -> None:
    options = parser(__doc__, rounds=5, default_model=SMALL_MODEL)
    options.add_argument("--history", type=int, default=4096, help="tokens of turn 1")
    options.add_argument("--warmup", type=int, default=512, help="fresh tokens after each start")
    options.add_argument("--memory", default="1GiB", help="of each pool")
    options.add_argument("--host", default="2GiB", help="size of the host memory")
    options.add_argument("--storage", type=Path, help="where the files go; default: a temporary directory")
    args = options.parse_args()
    figures = Figures()
    checkpoint = small_checkpoint(args.checkpoint)
    shape = {"max_model_len": args.history + 1024}
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="tier-") as temporary:
        directory = Path(temporary) / "kv"
        storage = {"backend": "file", "path": str(directory), "size": "16GiB", "prefetch_policy": "wait_complete"}
        restarts = {"restart": {"limit": 1000, "backoff": "100ms"}}
        stored = Node("storage", restarts, [model(NAME, checkpoint, args.memory, tiers={"storage": storage}, **shape)])
        plain = Node("plain", {}, [model(NAME, checkpoint, args.memory, **shape)])
        tokens = Tokens(args.seed, (300, stored.plan(NAME).vocab_size))
        host = {"host": {"size": args.host}}
        hosted = Node("host", restarts, [model(NAME, checkpoint, args.memory, tiers=host, **shape)])
        with nodes_up(stored, hosted, plain):
            for number in range(args.rounds):
                measure_round(stored, hosted, plain, tokens, figures, directory, args)
                say(f"round {number + 1}: {figures}")
            kv_bytes = args.history * stored.plan(NAME).bytes_per_token
    report(figures, kv_bytes)
    write_report(args, figures=vars(figures))


def report(figures: Figures, kv_bytes: int) -> None:
    rows = []
    for label, values in (
        ("the pool", figures.local_s),
        ("host memory", figures.host_s),
        ("files, page cache warm", figures.warm_s),
        ("files, cold", figures.cold_s),
        ("computing it", figures.computed_s),
    ):
        median_s = statistics.median(values)
        ratios = [value / other for value, other in zip(values, figures.computed_s, strict=True)]
        rows.append(
            [label, f"{1000 * median_s:.0f}", f"{statistics.median(ratios):.3f}", f"{kv_bytes / median_s / 1e9:.2f}"]
        )
    say(table(["turn 2 from", "first token, ms", "of computing", "GB/s"], rows))


if __name__ == "__main__":
    main()
