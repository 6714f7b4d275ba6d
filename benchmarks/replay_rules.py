"""Rules about tails that the core does not have, in plain Python, for the columns of replay.py that it cannot give.

All rules have one pool that is not divided between full attention and windows. A running request takes no room. An item
is either a node, which is the full-attention KV of 512 tokens after a given beginning, or the tail of the window layers
at the end of a node; only there does the trace say whether two prompts agree.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Path = tuple[int, ...]
"""The nodes of a prompt. Equal nodes have the same number in all prompts, and different nodes different numbers."""

Tails = Callable[[int, int, int], Sequence[int]]
"""A function (nodes found, nodes known, nodes of the prompt) -> the lengths, in nodes, at which it leaves tails."""


def every_tail(found: int, known: int, length: int) -> Sequence[int]:
    return range(found + 1, length + 1)


def latest_tail(found: int, known: int, length: int) -> Sequence[int]:
    return (length,)


def end_and_branch(found: int, known: int, length: int) -> Sequence[int]:
    """Return where the core keeps tails: where a prompt ends, and where it parts from what was known."""
    return (known, length) if found < known < length else (length,)


@dataclass(frozen=True)
class Sizes:
    """The bytes of the two kinds of items."""

    node: int
    tail: int


def replay_recency(paths: Sequence[Path], sizes: Sizes, pool_bytes: int, tails: Tails) -> list[int]:
    """Return how many nodes of each prompt were found, if the least recently used item is evicted first."""
    items: OrderedDict[tuple[str, int], int] = OrderedDict()  # bytes, the oldest first
    used = 0
    found_nodes = []

    def touch(kind: str, node: int, nbytes: int) -> None:
        nonlocal used
        used += 0 if (kind, node) in items else nbytes
        items[kind, node] = nbytes
        items.move_to_end((kind, node))

    for path in paths:
        known = next((i for i, node in enumerate(path) if ("node", node) not in items), len(path))
        found = next((length for length in range(known, 0, -1) if ("tail", path[length - 1]) in items), 0)
        found_nodes.append(found)
        for node in reversed(path):  # the last one is evicted first
            touch("node", node, sizes.node)
        for length in (found, *tails(found, known, len(path))):
            if length > 0:
                touch("tail", path[length - 1], sizes.tail)
        while used > pool_bytes:
            used -= items.popitem(last=False)[1]
    return found_nodes


@dataclass(frozen=True)
class Promise:
    """A boundary that is kept for a later prompt."""

    path: Path  # the nodes up to the boundary
    next_use: int  # the prompt's number


class Clairvoyant:
    """Keeps boundaries for later prompts by Belady's rule: the one that is used last is evicted first.

    It is no upper bound: if a prompt's longest boundary was evicted, a shorter one is kept only if another prompt needs
    it.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sizes, pool_bytes: int) -> None:
        self._paths = paths
        self._sizes = sizes
        self._pool_bytes = pool_bytes
        self._used = 0
        self._kept: dict[int, Promise] = {}  # by the last node
        self._holders: Counter[int] = Counter()  # the number of boundaries at or after each node
        self._last_first: list[tuple[int, int]] = []  # a heap of (-next use, last node), some of it outdated
        self._uses = self._all_uses()

    def _all_uses(self) -> dict[int, deque[int]]:
        """Return, for each node, the later prompts whose longest known beginning ends there."""
        uses: dict[int, deque[int]] = {}
        seen: set[int] = set()
        for number, path in enumerate(self._paths):
            known = next((i for i, node in enumerate(path) if node not in seen), len(path))
            if known:
                uses.setdefault(path[known - 1], deque()).append(number)
            seen.update(path)
        return uses

    def replay(self) -> list[int]:
        """Return how many nodes of each prompt were found."""
        return [self._serve(number, path) for number, path in enumerate(self._paths)]

    def _serve(self, number: int, path: Path) -> int:
        found = next((length for length in range(len(path), 0, -1) if path[length - 1] in self._kept), 0)
        for length, node in enumerate(path, 1):
            uses = self._uses.get(node)
            while uses and uses[0] <= number:
                uses.popleft()
            if node in self._kept and self._kept[node].next_use <= number:
                self._drop(node)
            if uses and node not in self._kept:
                self._keep(node, Promise(path[:length], uses[0]))
        while self._used > self._pool_bytes:
            next_use, node = heapq.heappop(self._last_first)
            if node in self._kept and self._kept[node].next_use == -next_use:
                self._drop(node)
        return found

    def _keep(self, node: int, promise: Promise) -> None:
        self._kept[node] = promise
        heapq.heappush(self._last_first, (-promise.next_use, node))
        self._used += self._sizes.tail + self._sizes.node * sum(self._holders[one] == 0 for one in promise.path)
        self._holders.update(promise.path)

    def _drop(self, node: int) -> None:
        path = self._kept.pop(node).path
        self._holders.subtract(path)
        self._used -= self._sizes.tail + self._sizes.node * sum(self._holders[one] == 0 for one in path)
