"""The shares of flows in plain Python: what each has had, and who is past its share."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

PROMPT, ANSWER = 1, 2  # what a token counts
_UNIT = 1 << 16


class NaiveShares:
    def __init__(self, slack_tokens: int) -> None:
        self.slack = slack_tokens * _UNIT
        self.credit = 8 * self.slack  # the most that an idle flow earns
        self.token_costs = {0: _UNIT}
        self.counters = {0: 0}
        self.level = 0  # the largest counter that all who waited had at some time
        self.last = 0  # the flow of which a request left the queue

    def know(self, flow: int, weight: float) -> None:
        self.token_costs[flow] = floor(_UNIT / weight + 0.5)
        self.counters.setdefault(flow, 0)

    def begin_waiting(self, flow: int, others: Iterable[int]) -> None:
        """A request of `flow` begins to wait, beside those of `others` that have the same priority."""
        flows = set(others)
        if flow not in flows:
            least = min((self.counters[other] for other in flows), default=self.counters[self.last])
            self.level = max(self.level, least)
            self.counters[flow] = max(self.counters[flow], self.level - self.credit)

    def charge(self, flow: int, num_tokens: int) -> None:
        self.counters[flow] += num_tokens * self.token_costs[flow]

    def is_past(self, flow: int, others: Iterable[int]) -> bool:
        """Return whether a flow has had much more than the one of `others` that has had least."""
        return self.counters[flow] - min(self.counters[other] for other in others) >= self.slack
