"""The slots of the sampler, and the requests that have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from swiftkv._core import StepPlan
from swiftkv.engine.request import Request
from swiftkv.engine.token_sampler import TokenSampler


class Seats:
    """Follows the scheduler's plans, and tells the sampler which request loses or gets a slot."""

    def __init__(self, sampler: TokenSampler, max_num_seqs: int) -> None:
        self._sampler = sampler
        self._request_ids = np.zeros(max_num_seqs, np.uint64)  # by slot: the last request in it
        self._is_taken = np.zeros(max_num_seqs, np.bool_)

    def follow(self, plan: StepPlan, requests: Mapping[int, Request]) -> None:
        """Take the slots of the requests that a plan preempts, and give their slots to those that it computes."""
        for request_id in plan.preempted_request_ids.tolist():
            for slot in np.flatnonzero(self._is_taken & (self._request_ids == request_id)).tolist():
                self._is_taken[slot] = False
                self._sampler.park(slot, requests[request_id])
        slots, request_ids = plan.row_slots, plan.request_ids
        for index in np.flatnonzero(~self._is_taken[slots] | (self._request_ids[slots] != request_ids)):
            self._sampler.seat(int(slots[index]), requests[int(request_ids[index])])
        self._request_ids[slots] = request_ids
        self._is_taken[slots] = True
