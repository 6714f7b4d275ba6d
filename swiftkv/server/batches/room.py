"""The room that clients' requests leave in a model for the lines of batches."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_KV_USAGE = 0.8
"""The part of a model's KV blocks that may be in use when a line begins."""
_SPARE_PART = 8
"""One in this many slots stays free, so that a client's request finds one at once."""
_SHARE_BESIDE_CLIENTS = 4
"""While clients have requests in flight, batches keep one in this many of the slots that they have without."""


@dataclass(frozen=True, slots=True)
class Load:
    """The use of one model at one moment, in sequences.

    Attributes:
        waiting: Sequences of clients and batches that the engine has not begun.
        online: Sequences of clients, waiting or running.
        offline: Sequences of batches.
        beginning: Lines of batches that have no token yet.
        kv_usage: The part of the KV blocks that running sequences use.
    """

    waiting: int
    online: int
    offline: int
    beginning: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Room:
    """The size of one model: its slots, and the most of them that batches may have together."""

    max_num_seqs: int
    max_in_flight: int

    @classmethod
    def of(cls, max_num_seqs: int, max_in_flight: int | None) -> Room:
        """Return the room of a model; batches have half of its slots unless `max_in_flight` says otherwise."""
        return cls(max_num_seqs, max_in_flight or max(1, max_num_seqs // 2))

    def num_lines(self, load: Load) -> int:
        """Return how many more lines may begin.

        No line begins while any request waits: the engine takes waiting requests by priority, but a running one keeps
        its slot. Beside clients' requests, one prompt of a batch is computed at a time, so that no step has several.
        """
        if load.waiting or load.kv_usage > _MAX_KV_USAGE:
            return 0
        free = self.max_num_seqs - self.max_num_seqs // _SPARE_PART - load.online - load.offline
        if not load.online:
            return max(0, min(free, self.max_in_flight - load.offline))
        share = max(1, self.max_in_flight // _SHARE_BESIDE_CLIENTS)
        return max(0, min(free, share - load.offline, 1 - load.beginning))
