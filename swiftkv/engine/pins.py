"""Prefixes that stay in the pool of an engine until they are unpinned, or their time is over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swiftkv._core import Scheduler, block_keys
from swiftkv.engine.cache_records import CacheRecords
from swiftkv.engine.messages import PinPrompt, PinView

MAX_PINS = 256


@dataclass(slots=True)
class _Pin:
    num_tokens: int
    ends_s: float  # monotonic
    is_lost: bool = False


class Pins:
    """Pins prompts, of recent requests or given as tokens, within the model's share of the pool.

    A lost pin is shown until its time is over.
    """

    def __init__(self, scheduler: Scheduler, records: CacheRecords, *, block_size: int, max_share: float) -> None:
        self._scheduler = scheduler
        self._records = records
        self._block_size = block_size
        self._max_share = max_share
        self._pins: OrderedDict[int, _Pin] = OrderedDict()
        self._num_pinned = 0

    def pin_request(self, request_ids: Sequence[int], ttl_s: float, now_s: float) -> PinView | str:
        """Pin the prompt of the first of these requests that is remembered; return the reason if it cannot be done."""
        known = (keys for number in request_ids if (keys := self._records.keys_of(number)) is not None)
        keys = next(known, None)
        if keys is None:
            return "the engine does not remember the request; it remembers at most its last 1,024 sequences"
        return self._pin(keys, ttl_s, now_s)

    def pin_prompt(self, message: PinPrompt, now_s: float) -> PinView | str:
        """Pin the blocks that the pool has of a prompt; return the reason if it cannot be done."""
        token_ids = np.frombuffer(message.prompt, np.int32)
        keys = block_keys(message.cache_salt.encode(), token_ids, self._block_size)
        return self._pin(keys, message.ttl_s, now_s)

    def _pin(self, keys: bytes, ttl_s: float, now_s: float) -> PinView | str:
        self.before_step(now_s)
        if len(self._pins) == MAX_PINS:
            return f"the model has {MAX_PINS} pins, the most it may have; unpin one"
        pin_id = self._num_pinned + 1
        length, share, is_kept = self._scheduler.pin(pin_id, keys, self._max_share)
        if length == 0:
            return "no whole block of the prompt is in the model's own pool now; send a request with the prompt first"
        if not is_kept:
            return (
                f"pins would take {share:.0%} of the pool, and kv_cache.max_pinned is {self._max_share:.0%}; "
                "unpin something, or raise it"
            )
        self._num_pinned = pin_id
        pin = self._pins[pin_id] = _Pin(length * self._block_size, now_s + ttl_s)
        return _view(pin_id, pin)

    def unpin(self, pin_id: int) -> bool:
        """End a pin, and return whether there was one."""
        self._scheduler.unpin(pin_id)
        return self._pins.pop(pin_id, None) is not None

    def before_step(self, now_s: float) -> bool:
        """End the pins whose time is over, note those that are lost, and return whether there were any."""
        if not self._pins:
            return False
        lost = self._scheduler.take_lost_pins().tolist()
        for pin_id in lost:
            if pin := self._pins.get(pin_id):
                pin.is_lost = True
        over = [pin_id for pin_id, pin in self._pins.items() if pin.ends_s <= now_s]
        for pin_id in over:
            self.unpin(pin_id)
        return bool(lost or over)

    def views(self) -> list[PinView]:
        return [_view(pin_id, pin) for pin_id, pin in self._pins.items()]


def _view(pin_id: int, pin: _Pin) -> PinView:
    return PinView(pin_id, pin.num_tokens, pin.ends_s, pin.is_lost)
