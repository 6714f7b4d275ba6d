"""The boundaries that keep their sliding-window tails, in plain Python: a list of them, searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

Prefix = tuple[object, ...]


class Worth(IntEnum):
    """The reason for which a cached block of a sliding-window group stays; what is worth less goes first."""

    NONE, INTERVAL, KEPT = range(3)


@dataclass
class Boundary:
    prefixes: list[Prefix]  # of the blocks below it, the last one first: its longest tail, and one block more
    worth: Worth


@dataclass
class NaiveBoundaries:
    tails: list[int | None]  # per group, in blocks; None: every block of a prefix is needed
    kept: list[Boundary] = field(default_factory=list)

    @property
    def span(self) -> int:
        return max((tail + 1 for tail in self.tails if tail is not None), default=0)

    def needs(self, boundary: Boundary, group: int, prefix: Prefix) -> bool:
        tail = self.tails[group]
        if tail is None:
            return boundary.prefixes[0][: len(prefix)] == prefix
        return prefix in boundary.prefixes[:tail]

    def keep(self, prefixes: list[Prefix], worth: Worth) -> None:
        known = [boundary for boundary in self.kept if boundary.prefixes[0] == prefixes[0]]
        for boundary in known:
            boundary.worth = max(boundary.worth, worth)
        if not known:
            self.kept.append(Boundary(prefixes, worth))

    def lose(self, group: int, prefix: Prefix) -> list[Prefix]:
        """Return the blocks of the boundaries that are no more, now that a group has lost a block."""
        broken = [boundary for boundary in self.kept if self.needs(boundary, group, prefix)]
        self.kept = [boundary for boundary in self.kept if boundary not in broken]
        return [prefix for boundary in broken for prefix in boundary.prefixes]

    def forget(self, prefix: Prefix) -> None:
        """No group has the block any more."""
        for boundary in self.kept:
            boundary.prefixes = [other for other in boundary.prefixes if other != prefix]
        self.kept = [boundary for boundary in self.kept if boundary.prefixes]

    def worth(self, group: int, prefix: Prefix) -> Worth:
        tail = self.tails[group]
        assert tail is not None
        return max((b.worth for b in self.kept if prefix in b.prefixes[: tail + 1]), default=Worth.NONE)
