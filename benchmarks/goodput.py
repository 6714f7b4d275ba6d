"""Measure in virtual time how many requests, and how many of their tokens, each order serves in time:

    python benchmarks/goodput.py mooncake_conversation.jsonl

A trace comes at several loads, in parts of what the engine can do, as in overload.py: with the same scheduler, step
times, noise, and targets, which are later for longer prompts. Orders: those of swiftkv; `lpm`, the longest cached
prefix first, as in SGLang (without its limit of 128 waiting requests); and `fcfs` and `hrrn` with refusals of requests
that are forecast to miss their target. The figures do not depend on the machine. Rows, for each load: the part of the
requests that were in time, and of all their tokens, of prompts and answers; then the time to the first token of long
prompts (the longest tenth) and of the others, P90 in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from lending_node import say, table
from overload import MAX_NUM_BATCHED_TOKENS, Setting, Verdict, at_load, study_parser, target_of
from policies import shortened

from swiftkv.bench.traces import Arrival, read_trace, spread_ties
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.sent_prefixes import SentPrefixes
from swiftkv.simulate.doors import OpenDoor
from swiftkv.simulate.simulator import EngineRun, Outcome

_LONG_PART = 0.1
REFUSING: dict[str, SchedulingPolicy] = {"fcfs, refusing": "fcfs", "hrrn, refusing": "hrrn"}
POLICIES: dict[str, SchedulingPolicy] = {
    "fcfs": "fcfs",
    "spf": "spf",
    "lpm": "fcfs",
    "turns": "turns",
    "deadline": "deadline",
    "hrrn": "hrrn",
    **REFUSING,
}


class LongestPrefixRun(EngineRun):
    """An engine that is given the waiting requests with the longest cached prefixes, as many as its next step can take.

    Its own scheduler serves in order of arrival. The latest prompts that it was given count as cached, as many as its
    memory holds.
    """

    def __init__(self, pool_tokens: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sent = SentPrefixes()
        self._sent.max_tokens = pool_tokens
        self._pieces: dict[int, list[bytes]] = {}
        self._left: dict[int, int] = {}  # tokens to compute of handed-over prompts that have no token yet

    def enter(self, now_s: float) -> None:
        waiting = dict(self._let_in)
        for request_id, arrival in waiting.items():
            if request_id not in self._pieces:
                self._pieces[request_id] = self._sent.pieces(arrival.prompt().astype("<i4").tobytes(), "")
        while waiting and self._num_left() < MAX_NUM_BATCHED_TOKENS:
            known = {request_id: self._sent.find(self._pieces[request_id]).num_cached for request_id in waiting}
            request_id = max(known, key=lambda i: (known[i], -i))
            arrival = waiting.pop(request_id)
            self._sent.send(request_id, self._pieces[request_id])
            self._sent.begin(request_id)
            self._left[request_id] = max(1, arrival.input_tokens - known[request_id])
            self._add(request_id, arrival)
        self._let_in = list(waiting.items())

    def _num_left(self) -> int:
        self._left = {i: left for i, left in self._left.items() if np.isnan(self._first_token_s[i])}
        return sum(max(0, left - int(self._computed_tokens[i])) for i, left in self._left.items())


def serve(order: str, setting: Setting, arrivals: Sequence[Arrival]) -> Outcome:
    if order == "lpm":
        return setting.serve(arrivals, OpenDoor(), partial(LongestPrefixRun, setting.pool_tokens))
    door = setting.door(refuses=True) if order in REFUSING else OpenDoor(setting.target_ttft_s)
    return setting.serve(arrivals, door)


def figures(verdict: Verdict, is_long: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, float]:
    outcome = verdict.outcome
    in_time = ~verdict.is_refused & ~verdict.is_missed
    tokens = outcome.input_tokens + outcome.output_tokens
    ttft_s = outcome.ttft_s
    return {
        "requests": float(in_time.mean()),
        "tokens": float(tokens[in_time].sum() / tokens.sum()),
        "long_p90_s": float(np.nanquantile(ttft_s[is_long], 0.9)),
        "short_p90_s": float(np.nanquantile(ttft_s[~is_long], 0.9)),
    }


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.3])
    parser.add_argument("--orders", nargs="+", choices=POLICIES, default=POLICIES)
    args = parser.parse_args()
    trace = spread_ties(read_trace(args.trace), np.random.default_rng(args.seed))[: args.requests]
    arrivals = [shortened(arrival, args.shrink) for arrival in trace]

    target_ttft_s = target_of(args)

    def setting_of(order: str) -> Setting:
        return Setting(POLICIES[order], args.seqs, args.pool_tokens, args.noise, args.seed, target_ttft_s)

    target_s = np.array([target_ttft_s(arrival) for arrival in arrivals])
    lengths = np.array([arrival.input_tokens for arrival in arrivals])
    is_long = lengths >= np.quantile(lengths, 1 - _LONG_PART)
    busy_s = setting_of("hrrn").serve(at_load(arrivals, 100.0, 1.0), OpenDoor()).busy_s
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load in args.loads:
        found[f"{load:g}"] = {
            order: figures(Verdict(serve(order, setting_of(order), at_load(arrivals, load, busy_s)), target_s), is_long)
            for order in args.orders
        }
    rows = [
        (
            order,
            *(
                cell
                for by_order in found.values()
                for of in [by_order[order]]
                for cell in (
                    f"{of['requests']:.1%}, {of['tokens']:.1%}",
                    f"{of['long_p90_s']:,.1f}, {of['short_p90_s']:,.1f}",
                )
            ),
        )
        for order in args.orders
    ]
    heads = [head for load in found for head in (f"at {load}: requests, tokens in time", "P90 of long, of others")]
    say(table(("", *heads), rows))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
