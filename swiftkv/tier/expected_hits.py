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
        """Return the tiers of the blocks `first` to `end` that a request could not use before its load, by index.

        A block that the load did not read was in the pool already, or came there meanwhile. It counts as if it came
        from the tier of the block before it, or of the first block that was read.
        """
        hits: dict[int, str] = {}
        tier = next(iter(self.tiers.values()), None)
        for index in range(max(first, self.num_before), min(end, self.num_after)):
            tier = self.tiers.get(index, tier)
            if tier is not None:
                hits[index] = tier
        return hits
