"""Divides a lender's pool between its own requests and its borrowers, and among the borrowers."""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv.arithmetic import ceil_div
from swiftkv.lease.messages import LendingSpec
from swiftkv.worker.borrowers import BorrowerPeer, LendLink
from swiftkv.worker.lend_policy import Demand, LendPolicy, LongestRequestPolicy, TotalDemandPolicy


class Division:
    """Computes how many extents each link should have, from the budget, the policy and the attached borrowers."""

    def __init__(self, spec: LendingSpec, peers: Sequence[BorrowerPeer], group_blocks: Sequence[int]) -> None:
        """`group_blocks` has the size of each KV group of the lender's pool."""
        self._peers = peers
        self._links = [link for peer in peers for link in peer.links]
        self._group_blocks = group_blocks
        policy = {"total": TotalDemandPolicy, "longest": LongestRequestPolicy}[spec.policy]
        self._policies: list[LendPolicy] = [policy(spec.window_s) for _ in group_blocks]

    def observe(self, now_s: float, group: int, demand: Demand) -> None:
        """Note the demand of the lender's own requests for a KV group."""
        self._policies[group].observe(now_s, demand)

    def links_of(self, group: int) -> list[LendLink]:
        return [link for link in self._links if link.geometry.lender_group == group]

    def targets(self, budget_bytes: int) -> list[int]:
        """Return extents by link: an even part of the budget for each borrower that is attached."""
        attached = [peer for peer in self._peers if peer.is_attached]
        targets = [0] * len(self._links)
        for peer in attached:
            for link in peer.links:
                part = budget_bytes * link.share // (len(attached) * link.geometry.extent_bytes)
                targets[link.number] = min(part, link.geometry.num_extents)
        return targets

    def lendable_targets(self, budget_bytes: int, now_s: float) -> list[int]:
        """Return `targets`, cut down in proportion where the policy keeps more of a KV group for the lender itself."""
        targets = self.targets(budget_bytes)
        for group in range(len(self._policies)):
            links = self.links_of(group)
            wanted = sum(targets[link.number] * link.geometry.meu_w for link in links)
            lendable = self.lendable_blocks(group, now_s)
            if wanted > lendable:
                for link in links:
                    targets[link.number] = targets[link.number] * lendable // wanted
        return targets

    def lendable_blocks(self, group: int, now_s: float) -> int:
        """Return how many blocks of a KV group the policy does not keep for the lender itself."""
        return max(0, self._group_blocks[group] - self._policies[group].keep_blocks(now_s))

    def over_budget(self, budget_bytes: int) -> dict[int, int]:
        """Return extents to recall, by link number, so that the lent memory falls to the budget.

        They come from the links that are furthest above their part.
        """
        targets = self.targets(budget_bytes)
        excess_bytes = sum(link.asked_for * link.geometry.extent_bytes for link in self._links) - budget_bytes
        over = {link.number: link.asked_for - targets[link.number] for link in self._links}
        counts = {}
        for link in sorted(self._links, key=lambda link: over[link.number] * link.geometry.extent_bytes, reverse=True):
            count = min(over[link.number], ceil_div(excess_bytes, link.geometry.extent_bytes))
            if count > 0:
                counts[link.number] = count
                excess_bytes -= count * link.geometry.extent_bytes
        return counts

    def short_of(self, group: int, short_blocks: int) -> dict[int, int]:
        """Return extents to recall, by link number, for requests that lack `short_blocks` of a KV group.

        They come from the links that have most; extents that are already on their way home are subtracted.
        """
        links = self.links_of(group)
        missing = short_blocks - sum(link.ledger.recalled * link.geometry.meu_w for link in links)
        counts: dict[int, int] = {}
        for link in sorted(links, key=lambda link: link.asked_for * link.geometry.meu_w, reverse=True):
            count = min(link.asked_for, ceil_div(missing, link.geometry.meu_w))
            if count > 0:
                counts[link.number] = count
                missing -= count * link.geometry.meu_w
        return counts
