"""Records that explain why the prompts of recent requests found no more of their KV in the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler, blake3
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.messages import CacheStop, Explanation
from swiftkv.engine.request import Request
from swiftkv.tier.keys import BLOCK_KEY_BYTES
from swiftkv.tier.messages import LoadStop

_MAX_RECORDS = 1024
_MAX_KEY_BYTES = 32 << 20  # the keys of all remembered prompts: a million blocks
_MAX_BEGINNINGS = 4096
_MAX_NAMESPACES = 8  # namespaces remembered for one beginning


class CacheRecords:
    """Records each request when it begins: the reason cannot be found later. This costs a look-up of its keys."""

    def __init__(self, scheduler: Scheduler, groups: Sequence[KVGroup]) -> None:
        self._scheduler = scheduler
        self._block_size = groups[0].block_size
        self._is_full = np.array([group.kind != "window" for group in groups])
        self._records: OrderedDict[int, Explanation] = OrderedDict()  # by request
        self._beginnings: OrderedDict[bytes, set[bytes]] = OrderedDict()  # namespaces by hash of a first block
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # the keys of a prompt's blocks, by request
        self._num_key_bytes = 0

    def admitted(self, request: Request, cached_tokens: int, tier_outcome: LoadStop | None) -> None:
        """Record why a request that begins now found no more than `cached_tokens`.

        `tier_outcome` is the reason why a tier below the pool gave less than it had; `None` if it did not.
        """
        keys, is_resident, _ = self._scheduler.look_up(request.request_id)
        self._remember_keys(request.request_id, keys)
        reason, age_s = self._reason(request, cached_tokens, tier_outcome, keys, is_resident)
        self._records[request.request_id] = Explanation(
            request.request_id, len(request.prompt), cached_tokens, reason, age_s
        )
        _bound(self._records, _MAX_RECORDS)
        first = request.prompt[: self._block_size]
        if len(first) == self._block_size:
            namespaces = self._beginnings.setdefault(blake3(first.tobytes()), set())
            if len(namespaces) < _MAX_NAMESPACES:
                namespaces.add(request.namespace)
            _bound(self._beginnings, _MAX_BEGINNINGS)

    def found_more(self, request_id: int, cached_tokens: int) -> None:
        """Note that a request has found more of its prompt than when it began: `cached_tokens` in all."""
        if record := self._records.get(request_id):
            self._records[request_id] = msgspec.structs.replace(record, cached_tokens=cached_tokens)

    def explain(self, request_ids: Sequence[int]) -> list[Explanation]:
        """Return the records of these requests, as far as they are remembered."""
        return [self._records[request_id] for request_id in request_ids if request_id in self._records]

    def keys_of(self, request_id: int) -> bytes | None:
        """Return the keys of the full blocks of a request's prompt; `None` if it is not remembered."""
        return self._keys.get(request_id)

    def _remember_keys(self, request_id: int, keys: bytes) -> None:
        self._keys[request_id] = keys
        self._num_key_bytes += len(keys)
        while len(self._keys) > _MAX_RECORDS or self._num_key_bytes > max(_MAX_KEY_BYTES, len(keys)):
            self._num_key_bytes -= len(self._keys.popitem(last=False)[1])

    def _reason(
        self,
        request: Request,
        cached_tokens: int,
        tier_outcome: LoadStop | None,
        keys: bytes,
        is_resident: npt.NDArray[np.uint8],
    ) -> tuple[CacheStop, float | None]:
        if request.sampling.prompt_logprobs is not None:
            return "prompt_logprobs", None
        num_matched = cached_tokens // self._block_size
        num_matchable = (len(request.prompt) - 1) // self._block_size  # the last token is always computed
        if num_matched >= min(num_matchable, len(keys) // BLOCK_KEY_BYTES):
            return "complete", None
        here = is_resident.reshape(-1, len(self._is_full)).astype(bool)[num_matched]
        if here.all() or (here[self._is_full].all() and self._is_full.any()):
            return "tail_gone", None
        if tier_outcome is not None:
            return tier_outcome, None
        first_missing = keys[num_matched * BLOCK_KEY_BYTES : (num_matched + 1) * BLOCK_KEY_BYTES]
        age_s = self._scheduler.evicted_age_s(first_missing)
        if age_s is not None:
            return "evicted", age_s
        if num_matched == 0 and self._is_known_elsewhere(request):
            return "other_salt", None
        return "never_stored", None

    def _is_known_elsewhere(self, request: Request) -> bool:
        """Return whether the prompt's first block has been seen in other namespaces, but not in its own."""
        known = self._beginnings.get(blake3(request.prompt[: self._block_size].tobytes()), set())
        return bool(known) and request.namespace not in known


def _bound(entries: OrderedDict[int, Explanation] | OrderedDict[bytes, set[bytes]], size: int) -> None:
    while len(entries) > size:
        entries.popitem(last=False)
