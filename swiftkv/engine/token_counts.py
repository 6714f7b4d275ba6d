"""Counts of the tokens that the requests in the row slots have had, on which penalties are based."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv.engine.request import Request
from swiftkv.kernels.host_copies import upload


@dataclass(frozen=True, slots=True)
class _Parked:
    """The counts of a request that was preempted."""

    outputs: Tensor  # int32 [vocab]
    in_prompt: Tensor  # bool [vocab]


def token_counts(num_slots: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeros [num_slots, vocab_size]: how often a token was sampled, and whether it was in the prompt."""
    shape = (num_slots, vocab_size)
    return torch.zeros(shape, dtype=torch.int32, device=device), torch.zeros(shape, dtype=torch.bool, device=device)


class TokenCounts:
    """Counts tokens for penalties, on the device of the logits and in order with its steps.

    It takes no memory before a request has penalties.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.outputs, self.in_prompt = token_counts(0, vocab_size, device)
        """The counts, [max_num_seqs, vocab] each; the sampler adds to them."""
        self._is_counted = np.zeros(max_num_seqs, np.bool_)  # by slot
        self._parked: dict[int, _Parked] = {}  # by request id

    def seat(self, slot: int, request: Request) -> bool:
        """Give the slot to `request`. Return whether its tokens are counted, because it has penalties."""
        asked = request.sampling
        counts = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) != (0, 0, 1)
        self._is_counted[slot] = counts
        if not counts:
            return False
        if not len(self.outputs):
            num_slots, vocab_size = len(self._is_counted), self.outputs.shape[1]
            self.outputs, self.in_prompt = token_counts(num_slots, vocab_size, self.outputs.device)
        parked = self._parked.pop(request.request_id, None)
        if parked is None:
            # An assignment of a number would copy it from the host, and wait for all steps that were launched.
            self.outputs[slot].zero_()
            prompt = upload(request.prompt, self.in_prompt.device).long()
            self.in_prompt[slot].zero_().index_fill_(0, prompt, True)
        else:
            self.outputs[slot] = parked.outputs
            self.in_prompt[slot] = parked.in_prompt
        return True

    def park(self, slot: int, request_id: int) -> None:
        """Take the slot from a preempted request, and keep its counts."""
        if self._is_counted[slot]:
            self._parked[request_id] = _Parked(self.outputs[slot].clone(), self.in_prompt[slot].clone())

    def release(self, request_id: int) -> None:
        self._parked.pop(request_id, None)

    def retract(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """Take back the tokens that were counted last for `slots`; a slot may occur several times."""
        counted = np.flatnonzero(self._is_counted[slots])
        if len(counted):
            rows, columns = (upload(ids[counted], self.outputs.device).long() for ids in (slots, token_ids))
            self.outputs.index_put_((rows, columns), self.outputs.new_full((), -1), accumulate=True)
