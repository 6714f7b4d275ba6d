"""Turn 2 of a conversation from the pool, from a Mooncake Store and computed:

    mooncake_master --rpc_port=50051 &
    mooncake_client --host=127.0.0.1 --metadata_server=P2PHANDSHAKE --master_server_address=127.0.0.1:50051 \
        --global_segment_size=8GB &
    python benchmarks/tier_mooncake.py --master 127.0.0.1:50051 --history 1024 --rounds 3

In each round one node computes a conversation and continues it (the pool); its engine is killed and, once it is back
and has computed fresh prompts, continues it again (the store). Then it computes a fresh prompt of the same length.
"""

from __future__ import annotations

import asyncio
import statistics

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
from tiers import NAME, metric, restart_engine, ttft_s, wait_until

_WARMUP_PROMPTS = 2


def measure(node: Node, tokens: Tokens, length: int, times_s: dict[str, list[float]]) -> None:
    history = tokens.fresh(length)
    answer = asyncio.run(ask(node.target(NAME), history, 8))
    turn = [*history, *answer.token_ids, *tokens.fresh(24)]
    wait_until("the blocks to be written", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)
    times_s["the pool"].append(ttft_s(node, turn, 1))
    restart_engine(node)
    for _ in range(_WARMUP_PROMPTS):
        ttft_s(node, tokens.fresh(256))
    times_s["a Mooncake Store"].append(ttft_s(node, turn, 1))
    wait_until("its report", lambda: metric(node, "swiftkv:tier_hit_tokens_total") >= length - length % 16)
    times_s["computing it"].append(ttft_s(node, tokens.fresh(len(turn)), 1))


def main() -> None:
    options = parser(__doc__, rounds=3, default_model=SMALL_MODEL)
    options.add_argument("--master", default="127.0.0.1:50051", metavar="HOST:PORT", help="its store must have memory")
    options.add_argument("--history", type=int, default=1024, help="tokens of turn 1")
    options.add_argument("--memory", default="1GiB", help="of the pool")
    args = options.parse_args()
    storage = {"backend": "mooncake", "master_server_address": args.master, "prefetch_policy": "wait_complete"}
    shape = {"max_model_len": args.history + 1024, "tiers": {"storage": storage}}
    restarts = {"restart": {"limit": 1000, "backoff": "100ms"}}
    node = Node("mooncake", restarts, [model(NAME, small_checkpoint(args.checkpoint), args.memory, **shape)])
    tokens = Tokens(args.seed, (300, node.plan(NAME).vocab_size))
    times_s: dict[str, list[float]] = {"the pool": [], "a Mooncake Store": [], "computing it": []}
    with nodes_up(node):
        for number in range(args.rounds):
            measure(node, tokens, args.history, times_s)
            say(f"round {number + 1}: {times_s}")
    rows = []
    for label, values in times_s.items():
        ratios = [value / other for value, other in zip(values, times_s["computing it"], strict=True)]
        rows.append([label, f"{1000 * statistics.median(values):.0f}", f"{statistics.median(ratios):.3f}"])
    say(table(["turn 2 from", "first token, ms", "of computing"], rows))
    write_report(args, times_s=times_s)


if __name__ == "__main__":
    main()
