"""Count the events that the random histories cause, by state of the cache.

    .venv/bin/python tests/core/visits.py             # lists the pairs that are never visited
    .venv/bin/python tests/core/visits.py --update    # writes visits.txt, which the tests hold the histories to

A state is a few words about one KV group and its engine, before the event:

    room      free: a local block is free; cached: none is, but one is cached; full: neither
    borrowed  none: no borrowed block is present; else the same words about borrowed blocks
    stream    short: the layer-stream cache is smaller than it should be; even: it has not
    leaving   leaving: a recalled extent has not been returned yet; staying: none is
    work      idle: no request; ready: requests, but no step; step, steps: one or two steps are in progress

Where groups share extents, these states are about the group that gets one of another's.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lending_oracle import LendingEngine

FILE = Path(__file__).with_name("visits.txt")
FILE_OF_SHARED = FILE.with_name("visits_of_shared_pools.txt")
State = tuple[str, str, str, str, str]
ROOM, BORROWED = ("free", "cached", "full"), ("none", "free", "cached", "full")
STREAM, LEAVING, WORK = ("even", "short"), ("staying", "leaving"), ("idle", "ready", "step", "steps")
EVENTS = (
    *("add", "abort", "nothing to do", "prefill", "decode", "preempt", "spill", "stream", "copies alone"),
    *("commit", "abandon", "borrow", "recall", "returned", "lose", "lend", "take back", "reset", "hand over"),
)
SCHEDULED = EVENTS[2:9]
# Fewer histories than this may come and go with any change of the scheduler.
MIN_HISTORIES = 5

# Reasons why an event cannot come in a state; the tests hold them to what the histories visit.
Rules = dict[str, Callable[[State, str], bool]]
IMPOSSIBLE: Rules = {
    "what is not there needs no staging": lambda s, e: s[1] == "none" and s[2] == "short",
    "nothing spills to where nothing is borrowed": lambda s, e: s[1] == "none" and e == "spill",
    "an idle engine uses no borrowed block": lambda s, e: s[1] == "full" and s[4] == "idle",
    "an idle engine has no request": lambda s, e: s[4] == "idle" and e in ("abort", "prefill", "decode", "preempt"),
    "an idle engine streams nothing": lambda s, e: s[4] == "idle" and e == "stream",
    "without a step there is nothing to commit": lambda s, e: s[4] in ("idle", "ready") and e in ("commit", "abandon"),
    "only a step alone is abandoned": lambda s, e: s[4] == "steps" and e == "abandon",
    "a third step is not planned": lambda s, e: s[4] == "steps" and e in SCHEDULED,
    "extents are drained when no step is in progress": lambda s, e: s[4] == "step" and e == "copies alone",
}
# Free and cached blocks of shared extents may lie beside used ones, and then their extent stages nothing.
IMPOSSIBLE_IN_REGIONS = IMPOSSIBLE | {
    "who could grow the layer-stream cache does so before a step is planned ahead": lambda s, e: (
        s[0] != "full" and s[2] == "short" and s[4] == "step" and e in SCHEDULED[1:]
    ),
}


class Visits:
    """The number of histories that have caused each event in each state."""

    def __init__(self) -> None:
        self.histories: Counter[tuple[State, str]] = Counter()
        self._of_this_one: set[tuple[State, str]] = set()

    def note(self, states: list[State], *events: str) -> None:
        self._of_this_one.update((state, event) for state in states for event in events)

    def end_history(self) -> None:
        self.histories.update(self._of_this_one)
        self._of_this_one.clear()

    def often(self) -> set[tuple[State, str]]:
        return {pair for pair, count in self.histories.items() if count >= MIN_HISTORIES}


def states_of(engine: LendingEngine) -> list[State]:
    """Return one state per KV group."""
    work = ("step", "steps")[len(engine.planned) - 1] if engine.planned else "ready" if engine.requests else "idle"
    states = []
    for g, stats in enumerate(engine.scheduler.stats().groups):
        links = [i for i, link in enumerate(engine.setup.borrow) if link.group == g]
        held = sum(len(engine.held[i]) * engine.setup.borrow[i].blocks_per_extent for i in links)
        num_layers = engine.setup.groups[g][0]
        wish = min(stats.total - stats.lent, -(-held // num_layers)) * num_layers
        if engine.setup.blocks_per_extent:
            wish = _staging_extents(engine)[g] * engine.setup.blocks_per_extent[g] * num_layers
        is_present = stats.borrowed_free + stats.borrowed_used + stats.borrowed_cached + stats.borrowed_in_flight > 0
        states.append(
            (
                _room(stats.free, stats.cached),
                _room(stats.borrowed_free, stats.borrowed_cached) if is_present else "none",
                "short" if stats.staging_layer_blocks < wish else "even",
                "leaving" if any(engine.recalled[i] for i in links) else "staying",
                work,
            )
        )
    return states


def _staging_extents(engine: LendingEngine) -> list[int]:
    """Return how many of the extents that groups share stage each one's borrowed blocks, when there is room.

    Windows are not staged.
    """
    setup, found = engine.setup, []
    lent = engine.scheduler.stats().groups[0].lent // setup.blocks_per_extent[0]
    left = max(0, setup.num_extents - lent - setup.extents_for_windows)
    for g, ((num_layers, _, window), size) in enumerate(zip(setup.groups, setup.blocks_per_extent, strict=True)):
        links = [i for i, link in enumerate(setup.borrow) if link.group == g]
        held = sum(len(engine.held[i]) * setup.borrow[i].blocks_per_extent for i in links)
        found.append(0 if window else min(-(-held // (size * num_layers)), held // size, left))
        left -= found[-1]
    return found


def _room(free: int, cached: int) -> str:
    return "free" if free else "cached" if cached else "full"


def is_possible(state: State, event: str, rules: Rules) -> bool:
    return not any(rule(state, event) for rule in rules.values())


def write(pairs: set[tuple[State, str]]) -> str:
    events: dict[State, set[str]] = defaultdict(set)
    for state, event in pairs:
        events[state].add(event)
    lines = (f"{' '.join(state)}: {', '.join(e for e in EVENTS if e in events[state])}" for state in _states())
    return "".join(f"{line}\n" for line in lines if not line.endswith(": "))


def read(text: str) -> set[tuple[State, str]]:
    pairs: set[tuple[State, str]] = set()
    for line in text.splitlines():
        words, events = line.split(": ")
        room, borrowed, stream, leaving, work = words.split()
        pairs.update(((room, borrowed, stream, leaving, work), event) for event in events.split(", "))
    return pairs


def _states() -> list[State]:
    return list(itertools.product(ROOM, BORROWED, STREAM, LEAVING, WORK))


def never(visits: Visits, rules: Rules) -> set[tuple[State, str]]:
    possible = {(s, e) for s in _states() for e in EVENTS if is_possible(s, e, rules)}
    return possible - set(visits.histories)


def main() -> None:
    from test_lending_random import FIRST_SEEDS, FIRST_SEEDS_OF_SHARED, Pools, run_seeds

    runs: tuple[tuple[Pools, range, Path], ...] = (
        ("regions", FIRST_SEEDS, FILE),
        ("shared", FIRST_SEEDS_OF_SHARED, FILE_OF_SHARED),
    )
    for pools, seeds, file in runs:
        visits = Visits()
        for first in seeds:
            visits.histories.update(run_seeds(first, pools).histories)
        if "--update" in sys.argv:
            file.write_text(write(visits.often()))
        missing = never(visits, IMPOSSIBLE_IN_REGIONS if pools == "regions" else IMPOSSIBLE)
        print(f"{file.name}: {len(visits.histories)} pairs; {len(missing)} never, and not known to be impossible:")
        print(write(missing), end="")


if __name__ == "__main__":
    main()
