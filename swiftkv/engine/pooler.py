"""Takes numbers for pooled requests from the last positions of their prompts, instead of sampling tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.engine.messages import POOLED_TOKEN
from swiftkv.engine.request import Request
from swiftkv.engine.token_sampler import LogitRows, PendingSample, Sampled
from swiftkv.kernels.host_copies import download, upload


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """A `PendingSample`: numbers on their way to the host."""

    values: torch.Tensor  # float32 [R, width]

    def result(self) -> Sampled:
        values = self.values.numpy()
        return Sampled(np.full(len(values), POOLED_TOKEN, np.int32), {}, ~np.isfinite(values).all(axis=-1), values)


class Pooler:
    """A `TokenSampler` of an engine whose requests are all pooled.

    Its rows are the output of the model: logits, or hidden states if it has no head. A pooled request has one row, that
    of its prompt's last position, because it ends there.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._token_ids: list[list[int]] = [[]] * max_num_seqs  # by slot

    def seat(self, slot: int, request: Request) -> None:
        self._token_ids[slot] = request.pooled_token_ids

    def park(self, slot: int, request: Request) -> None:
        """Keep nothing: a request that is preempted is computed again."""

    def release(self, request_id: int) -> None:
        """Keep nothing of any request."""

    def sample(self, rows: LogitRows) -> PendingSample:
        assert rows.masks is None
        logits = rows.logits
        wanted = np.array([self._token_ids[slot] for slot in rows.slots.tolist()], np.int64)  # [R, 0]: all is wanted
        if wanted.size:
            logits = logits.gather(1, upload(wanted, logits.device))
        return _OnTheirWay(download(logits))

    def retract(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """Take nothing back: nothing was counted."""

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top_counts: Sequence[int]
    ) -> NoReturn:
        raise AssertionError("pooled requests that ask for log-probabilities are refused")


def pooled_by_request(
    sampled: Sampled, request_ids: npt.NDArray[np.uint64], rows: npt.NDArray[np.intp]
) -> dict[int, bytes]:
    """Return the numbers of `rows` by request id; nothing for a step that samples tokens."""
    if sampled.pooled is None:
        return {}
    return {int(request_ids[row]): sampled.pooled[row].tobytes() for row in rows}
