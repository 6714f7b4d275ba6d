"""The hits that a load brings a request, by tier."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ExpectedHits:
    """The blocks that a request can use before its load and after it, and the tiers that they came from."""

    num_before: int
    num_after: int
    is_back: bool = False  # the request uses them only after it has computed its front
    tiers: dict[int, str] = field(default_factory=dict)  # by index in the prompt

    def tiers_of_hits(self, first: int, end: int) -> dict[int, str]:
        """Return the tiers of the blocks `first` to `end` that a request could not use before, by index.

        A block that was read in no group was in the pool, or came meanwhile: it counts for the tier of its neighbours.
        """
        hits: dict[int, str] = {}
        tier = next(iter(self.tiers.values()), None)
        for index in range(max(first, self.num_before), min(end, self.num_after)):
            tier = self.tiers.get(index, tier)
            if tier is not None:
                hits[index] = tier
        return hits
