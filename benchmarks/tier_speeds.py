"""Time turn 2 of a conversation with storage of five speeds: loading it, computing it, and the planner's choice:

    python benchmarks/tier_speeds.py --history 1024 --rounds 3 --out benchmarks/out/tier_speeds.json
    swiftkv checkpoint make --arch gemma3_text --size small HYBRID
    python benchmarks/tier_speeds.py --checkpoint HYBRID --history 2048

There is one node. Conversations are computed and stored at full speed; then storage of a limited speed (`fault` with
`bandwidth`) is attached while the node runs, and the engine is killed, so that its pool is empty. The new engine first
computes fresh prompts, by which it learns how long its steps take. Then a conversation is continued: it is loaded,
because the engine does not know yet how fast storage reads. Then --turns other conversations are continued as the
planner decides; after each, a fresh prompt of the same length is computed. The speeds are multiples of the one at which
computing and loading take equally long; of layers with windows only the tails are loaded.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lending_node import (
    SMALL_MODEL,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    parser,
    say,
    small_checkpoint,
    table,
    write_report,
)
from tiers import NAME, change_storage, metric, restart_engine, ttft_s, wait_until

from swiftkv.tier.load_choice import num_needed

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
_WARMUP_PROMPTS = 6


@dataclass
class Speed:
    """Seconds to the first token, at one speed of storage."""

    bytes_per_s: int
    loading_s: list[float] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)
    chosen_s: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)  # the part of each prompt that came from storage by choice
    ratios: list[float] = field(default_factory=list)  # of `chosen_s` to the faster way alone


def stored_conversation(node: Node, tokens: Tokens, length: int) -> list[int]:
    """Compute turn 1, and return turn 2 once turn 1 is stored."""
    history = tokens.fresh(length)
    answer = asyncio.run(ask(node.target(NAME), history, 8))
    wait_until("the blocks to be written", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)
    return [*history, *answer.token_ids, *tokens.fresh(24)]


def measure(node: Node, tokens: Tokens, speed: Speed, file: dict[str, Any], args: Namespace) -> None:
    change_storage(node, file)
    first, *others = [stored_conversation(node, tokens, args.history) for _ in range(1 + args.turns)]
    narrow = {"backend": "fault", "inner": file, "bandwidth": speed.bytes_per_s, "prefetch_timeout_base": "60s"}
    change_storage(node, narrow)
    restart_engine(node)
    for _ in range(_WARMUP_PROMPTS):
        ttft_s(node, tokens.fresh(min(args.history, 512)))
    loading_s = ttft_s(node, first, 1)
    speed.loading_s.append(loading_s)
    for number, turn in enumerate(others, 1):
        wait_until("the reports of the turns before", lambda: num_decided(node) >= number)  # noqa: B023
        answer = asyncio.run(ask(node.target(NAME), turn, 1))
        computing_s = ttft_s(node, tokens.fresh(len(turn)), 1)
        speed.chosen_s.append(answer.ttft_s)
        speed.computing_s.append(computing_s)
        speed.loaded.append(answer.num_cached_tokens / args.history)
        speed.ratios.append(answer.ttft_s / min(loading_s, computing_s))


def num_decided(node: Node) -> float:
    """Return for how many prompts the planner has decided whether to load them."""
    return metric(node, "swiftkv:tier_loads_total") + metric(node, "swiftkv:tier_loads_declined_total")


def crossing(node: Node, tokens: Tokens, length: int) -> float:
    """Return the bytes per second at which loading would take as long as computing."""
    times_s = [ttft_s(node, tokens.fresh(length), 1) for _ in range(3)]
    groups = node.plan(NAME).groups
    num_bytes = sum(num_needed(group, 0, length // group.block_size) * group.block_bytes for group in groups)
    return num_bytes / statistics.median(times_s)


def main() -> None:
    options = parser(__doc__, rounds=3, default_model=SMALL_MODEL)
    options.add_argument("--history", type=int, default=1024, help="tokens of turn 1")
    options.add_argument(
        "--turns",
        type=int,
        default=1,
        help="turns at each speed in a round for which the planner decides whether to load",
    )
    options.add_argument("--memory", default="1GiB", help="size of the pool")
    options.add_argument(
        "--multiples",
        type=float,
        nargs="+",
        default=MULTIPLES,
        help="speeds of storage, as multiples of the one at which loading takes as long as computing",
    )
    options.add_argument("--storage", type=Path, help="directory for the files; default: a temporary one")
    args = options.parse_args()
    checkpoint = small_checkpoint(args.checkpoint)
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="tier-") as temporary:
        file = {"backend": "file", "path": str(Path(temporary) / "kv"), "size": "16GiB", "min_free": 0}
        restarts = {"restart": {"limit": 1000, "window": "1s", "backoff": "100ms"}}
        node = Node("speeds", restarts, [model(NAME, checkpoint, args.memory, max_model_len=args.history + 1024)])
        tokens = Tokens(args.seed, (300, node.plan(NAME).vocab_size))
        with nodes_up(node):
            ttft_s(node, tokens.fresh(512))
            equal = crossing(node, tokens, args.history)
            say(f"loading would take as long as computing at {equal / 1e6:.1f} MB/s")
            speeds = [Speed(round(multiple * equal)) for multiple in args.multiples]
            for number in range(args.rounds):
                for speed in speeds:
                    measure(node, tokens, speed, file, args)
                    say(f"round {number + 1}: {speed}")
    report(speeds)
    write_report(args, speeds=[vars(speed) for speed in speeds])


def report(speeds: list[Speed]) -> None:
    rows = []
    for speed in speeds:
        times_s = map(statistics.median, (speed.loading_s, speed.computing_s, speed.chosen_s))
        loaded = ", ".join(f"{part:.2f}" for part in speed.loaded)
        ratios = ", ".join(f"{ratio:.2f}" for ratio in speed.ratios)
        ratio = f"{statistics.median(speed.ratios):.2f}"
        rows.append([f"{speed.bytes_per_s / 1e6:.1f}", *(f"{1000 * s:.0f}" for s in times_s), loaded, ratio, ratios])
    heads = ["MB/s", "loading, ms", "computing, ms", "chosen, ms", "loaded", "of the better", "each"]
    say(table(heads, rows))


if __name__ == "__main__":
    main()
