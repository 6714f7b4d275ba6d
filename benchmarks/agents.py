"""Measure scheduling policies where more agents talk to a model than its cache holds, in virtual time:

    python benchmarks/agents.py --pool-tokens 200000 400000 600000

Each client holds one conversation after the other and sends a turn as soon as it has the answer to the one before, as
agents do (a closed loop). A conversation has 5 to 39 turns. It begins with 1,000 to 4,000 tokens, of which 1,000 are
those of all others (the system prompt); each turn adds an answer of 20 to 199 tokens and 100 to 1,199 tokens of a
tool's. Steps and columns are those of policies.py; the real scheduler and prefix cache serve, no model computes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from lending_node import say
from policies import compared, draw, serve

from swiftkv.bench.traces import Arrival
from swiftkv.policies import SchedulingPolicy

_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "spf", "hrrn", "turns")
_MAX_TOKENS = 16_384
_BLOCK_TOKENS = 16
_SYSTEM_TOKENS = 1_000


def conversation(number: int, rng: np.random.Generator) -> list[Arrival]:
    """Return the turns of a conversation; each prompt is the one before, its answer, and what a tool said."""
    system = range(_SYSTEM_TOKENS // _BLOCK_TOKENS)
    blocks = (*system, *((number + 1) * _MAX_TOKENS + i for i in range(_MAX_TOKENS // _BLOCK_TOKENS)))
    turns: list[Arrival] = []
    num_turns, num_tokens = int(rng.integers(5, 40)), int(rng.integers(1_000, 4_000))
    for _ in range(num_turns):
        answer_tokens = int(rng.integers(20, 200))
        if num_tokens + answer_tokens >= _MAX_TOKENS:
            break
        held = blocks[: math.ceil(num_tokens / _BLOCK_TOKENS)]
        turns.append(Arrival(0.0, num_tokens, answer_tokens, held, _BLOCK_TOKENS, conversation=number))
        num_tokens += answer_tokens + int(rng.integers(100, 1_200))
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[200_000, 400_000, 600_000])
    parser.add_argument("--seqs", type=int, default=100, help="max_num_seqs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw the times to the first token with the last pool here")
    args = parser.parse_args()
    args.block_size, args.target_s = _BLOCK_TOKENS, None
    rng = np.random.default_rng(args.seed)
    arrivals = [turn for number in range(args.conversations) for turn in conversation(number, rng)]
    mean_tokens = np.mean([turn.input_tokens for turn in arrivals])
    say(f"{len(arrivals):,} turns of {args.conversations} conversations, {mean_tokens:,.0f} tokens on average")
    for pool_tokens in args.pool_tokens:
        settings = argparse.Namespace(**(vars(args) | {"pool_tokens": pool_tokens}))
        outcomes = {policy: serve(policy, arrivals, settings, args.clients) for policy in _POLICIES}
        say(f"\na pool of {pool_tokens:,} tokens, {args.clients} clients\n")
        say(compared(outcomes))
        if args.plot is not None:
            draw(outcomes, f"agents, {args.clients} clients, a cache of {pool_tokens:,} tokens", args.plot)


if __name__ == "__main__":
    main()
