"""The room that clients' requests leave in a model for the lines of batches."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_KV_USAGE = 0.8
"""The part of a model's KV blocks that may be in use when a line begins."""
_SPARE_PART = 8
"""One slot in so many stays free, so that a client's request finds one at once."""
_SHARE_BESIDE_CLIENTS = 4
"""One in so many of the places that batches have alone stays theirs beside clients' requests."""


@dataclass(frozen=True, slots=True)
class Load:
    """The use of one model at one moment, in sequences.

    Attributes:
        waiting: Sequences of anybody that the engine has not begun with.
        online: Sequences of clients, whatever they do.
        offline: Sequences of batches.
        beginning: Those of batches that have no token yet.
        kv_usage: The part of the KV blocks that running sequences use.
    """

    waiting: int
    online: int
    offline: int
    beginning: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Room:
    """The size of one model: its slots, and how many of them batches may have together."""

    max_num_seqs: int
    max_in_flight: int

    @classmethod
    def of(cls, max_num_seqs: int, max_in_flight: int | None) -> Room:
        """Return the room of a model; batches have half of its slots unless `max_in_flight` says otherwise."""
        return cls(max_num_seqs, max_in_flight or max(1, max_num_seqs // 2))

    def places(self, load: Load) -> int:
        """Return how many more lines may begin.

        None does while somebody waits: the engine takes what waits in order of priority, but what runs keeps its slot.
        Beside clients, one prompt of a batch is computed at a time, so that no step has several.
        """
        if load.waiting or load.kv_usage > _MAX_KV_USAGE:
            return 0
        free = self.max_num_seqs - self.max_num_seqs // _SPARE_PART - load.online - load.offline
        if not load.online:
            return max(0, min(free, self.max_in_flight - load.offline))
        share = max(1, self.max_in_flight // _SHARE_BESIDE_CLIENTS)
        return max(0, min(free, share - load.offline, 1 - load.beginning))
