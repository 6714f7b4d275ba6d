"""The interface of samplers: the rows of a step from which tokens are sampled, and the tokens that come of them.

`engine/sampler.py` implements it in plain torch, `engine/device_sampler.py` in Triton; `engine/pooler.py` returns
numbers for pooled requests instead of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.engine.messages import SamplingParams, TokenLogprobs
from swiftkv.engine.request import Request
from swiftkv.engine.token_masks import TokenMasks

_GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy."""


def temperature_of(params: SamplingParams) -> float:
    """Return the temperature at which a request's tokens are drawn; 0 if it is greedy."""
    return params.temperature if params.temperature >= _GREEDY_BELOW else 0.0


def top_k_of(params: SamplingParams, vocab_size: int) -> int:
    """Return how many of the likeliest tokens a request's are drawn from; `vocab_size` if from all."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The rows of a step from which tokens are sampled, R of them.

    Several rows of a slot stand together, in the order of their positions.
    """

    logits: torch.Tensor  # float32 [R, vocab], which the sampler overwrites
    slots: npt.NDArray[np.int32]  # [R]
    positions: npt.NDArray[np.int32]  # [R] of the tokens to sample
    masks: TokenMasks | None = None  # for the rows of requests with grammars; None: there are none

    def part(self, rows: slice) -> LogitRows:
        """Return some of the rows; their logits are views."""
        masks = None if self.masks is None else self.masks.of(rows)
        return LogitRows(self.logits[rows], self.slots[rows], self.positions[rows], masks)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: npt.NDArray[np.int32]  # [R]
    logprobs: dict[int, TokenLogprobs]  # by row, of the rows that asked
    broken: npt.NDArray[np.bool_]  # [R] logits that are not finite, or forbid every token: the token means nothing
    pooled: npt.NDArray[np.float32] | None = None  # [R, width] numbers of pooled requests; their tokens mean nothing


class PendingSample(Protocol):
    """The tokens of a step that a device was asked to sample."""

    def result(self) -> Sampled:
        """Return the tokens. Call only after the device has finished the step."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A `PendingSample` that was computed at once."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


class TokenSampler(Protocol):
    """A sampler, as the step loop uses it. Rows of a step belong to the requests in their slots.

    A sampler writes the token that it samples for a slot to `last_token_ids` (int32 [max_num_seqs], on the device of
    the logits), in order with the rest of the step.
    """

    def seat(self, slot: int, request: Request) -> None:
        """Give the row slot to `request`, in place of any request that had it before."""

    def park(self, slot: int, request: Request) -> None:
        """Take the slot from `request`, which was preempted; keep what its parameters do not tell."""

    def release(self, request_id: int) -> None:
        """Forget a request that has ended."""

    def sample(self, rows: LogitRows) -> PendingSample:
        """Sample one token per row, for the requests in the rows' slots.

        If a slot has several rows, each is sampled as if the tokens of the rows before it counted. `last_token_ids`
        then holds one of these tokens, and is not read.
        """

    def retract(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """Take back the tokens that were sampled last for `slots`: they do not count."""

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top_counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return logprobs of `token_ids` [N] under `logits` [N, vocab], and the `top_counts[i]` likeliest of row i."""


def split_repeated(slots: npt.NDArray[np.int32], counts: npt.NDArray[np.bool_]) -> list[slice]:
    """Split the rows, in order, so that no part has a slot twice for which sampled tokens count (`counts [R]`)."""
    repeated = np.flatnonzero((slots[1:] == slots[:-1]) & counts[1:]) + 1
    ends = [*repeated.tolist(), len(slots)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
