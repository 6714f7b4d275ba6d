"""Measure scheduling policies where more agents talk to a model than its cache holds, in virtual time:

    python benchmarks/agents.py --pool-tokens 200000 400000 600000

Each client holds one conversation after the other and sends a turn as soon as it has the answer to the one before, as
agents do (a closed loop). A conversation has 5 to 39 turns. It begins with 1,000 to 4,000 tokens, of which 1,000 are
those of all others (the system prompt); each turn adds an answer of 20 to 199 tokens and 100 to 1,199 tokens of a
tool's. Steps and columns are those of policies.py; the real scheduler and prefix cache serve, no model computes.

Or real servers serve them, one after the other; --shrink divides the lengths:

    python benchmarks/agents.py --shrink 8 --clients 8 --conversations 16 --model chat turns=http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from lending_node import say, table
from policies import COLUMNS, compared, draw, rates, serve, ttft_figures

from swiftkv.bench.client import Target, TimedAnswer, send
from swiftkv.bench.traces import Arrival
from swiftkv.policies import SchedulingPolicy

_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "spf", "hrrn", "turns")
_MAX_TOKENS = 16_384
_BLOCK_TOKENS = 16
_SYSTEM_TOKENS = 1_000


def conversation(number: int, rng: np.random.Generator, shrink: int) -> list[Arrival]:
    """Return the turns of a conversation; each prompt is the one before, its answer, and what a tool said."""
    system = range(_SYSTEM_TOKENS // shrink // _BLOCK_TOKENS)
    blocks = (*system, *((number + 1) * _MAX_TOKENS + i for i in range(_MAX_TOKENS // _BLOCK_TOKENS)))
    turns: list[Arrival] = []
    num_turns, num_tokens = int(rng.integers(5, 40)), int(rng.integers(1_000, 4_000)) // shrink
    for _ in range(num_turns):
        answer_tokens = max(1, int(rng.integers(20, 200)) // shrink)
        if num_tokens + answer_tokens >= _MAX_TOKENS:
            break
        held = blocks[: math.ceil(num_tokens / _BLOCK_TOKENS)]
        turns.append(Arrival(0.0, num_tokens, answer_tokens, held, _BLOCK_TOKENS, conversation=number))
        num_tokens += answer_tokens + int(rng.integers(100, 1_200)) // shrink
    return turns


def prompt_ids(turn: Arrival) -> list[int]:
    """Return token ids; equal blocks have equal ones."""
    return [1_000 + (block * 7_919 + i) % 20_000 for block in turn.blocks for i in range(_BLOCK_TOKENS)][
        : turn.input_tokens
    ]


async def talk(url: str, model: str, conversations: Sequence[list[Arrival]], num_clients: int) -> list[TimedAnswer]:
    """Have clients hold the conversations with a server."""
    left, answers = deque(conversations), []
    target = Target(f"{url}/v1/completions", model, extra_body={"ignore_eos": True, "temperature": 0})
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def hold_conversations() -> None:
            while left:
                for turn in left.popleft():
                    answer = await send(client, target, prompt_ids(turn), turn.output_tokens)
                    assert not answer.error, answer.error
                    answers.append(answer)

        await asyncio.gather(*(hold_conversations() for _ in range(num_clients)))
    return answers


def ask_servers(servers: Sequence[str], model: str, conversations: Sequence[list[Arrival]], num_clients: int) -> None:
    """Print a row for each server, given as `name=url`."""
    rows = []
    for name, url in (server.split("=", 1) for server in servers):
        begin_s = time.perf_counter()
        answers = asyncio.run(talk(url, model, conversations, num_clients))
        elapsed_s = time.perf_counter() - begin_s
        num_cached = sum(answer.num_cached_tokens for answer in answers)
        num_tokens = sum(answer.num_prompt_tokens for answer in answers)
        figures = ttft_figures([answer.ttft_s for answer in answers])
        rows.append((name, *(f"{value:.2f}" for value in figures), *rates(num_cached, num_tokens, elapsed_s)))
        say(f"{name}: {len(answers)} answers in {elapsed_s:.0f} s")
    say("\n" + table(COLUMNS, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="NAME=URL", help="real servers; default: virtual time")
    parser.add_argument("--model", default="chat", help="the servers' name of the model")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[200_000, 400_000, 600_000])
    parser.add_argument("--seqs", type=int, default=100, help="max_num_seqs")
    parser.add_argument("--target-s", type=float, help="target_tpot; default: off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw the times to the first token with the last pool here")
    args = parser.parse_args()
    args.block_size = _BLOCK_TOKENS
    rng = np.random.default_rng(args.seed)
    conversations = [conversation(number, rng, args.shrink) for number in range(args.conversations)]
    arrivals = [turn for turns in conversations for turn in turns]
    mean_tokens = np.mean([turn.input_tokens for turn in arrivals])
    say(f"{len(arrivals):,} turns of {args.conversations} conversations, {mean_tokens:,.0f} tokens on average")
    if args.servers:
        ask_servers(args.servers, args.model, conversations, args.clients)
        return
    for pool_tokens in args.pool_tokens:
        settings = argparse.Namespace(**(vars(args) | {"pool_tokens": pool_tokens}))
        outcomes = {policy: serve(policy, arrivals, settings, args.clients) for policy in _POLICIES}
        say(f"\na pool of {pool_tokens:,} tokens, {args.clients} clients\n")
        say(compared(outcomes))
    if args.plot is not None:
        draw(outcomes, f"agents, {args.clients} clients, a cache of {pool_tokens:,} tokens", args.plot)


if __name__ == "__main__":
    main()
