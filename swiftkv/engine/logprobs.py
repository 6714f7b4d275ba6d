"""Log-probabilities of the model's raw distribution: of sampled tokens, and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.engine.request import Request

_LOGITS_BYTES = 64 << 20
"""The most bytes of float32 logits that prompt logprobs may hold at once."""


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int32], top_counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Return logprobs of `token_ids` [N] under `logits` [N, vocab], and the `top_counts[i]` likeliest of row i.

    Equally likely tokens come in the order of their ids: a greedy request gets the first of them.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = torch.from_numpy(token_ids).to(logits.device, torch.int64).unsqueeze(1)  # [N, 1]
    ranks = (logits > logits.gather(1, chosen)).sum(-1) + 1
    top_ids = _likeliest(logits, min(max(top_counts), logits.shape[1]))
    rows = zip(
        logprobs.gather(1, chosen).squeeze(1).tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        logprobs.gather(1, top_ids).tolist(),
        top_counts,
        strict=True,
    )
    return [TokenLogprobs(logprob, rank, ids[:k], values[:k]) for logprob, rank, ids, values, k in rows]


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tokens [N, count] of the largest `logits` [N, vocab], in falling order; equal ones in order of id."""
    # torch returns equal values in any order, and if several tokens tie for the last place, any of them.
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    for row in torch.nonzero(values[:, count - 1 : count] == values[:, count:])[:, 0].tolist():
        at_least = torch.nonzero(~(logits[row] < values[row, count - 1])).squeeze(1)  # and NaN
        ids[row, :count] = at_least[logits[row, at_least].argsort(descending=True, stable=True)[:count]]
    ids = ids[:, :count].sort(dim=-1).values
    order = logits.gather(1, ids).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The log-probabilities of consecutive tokens of one prompt, as one step computed them."""

    sequence: int  # index into the step's sequences
    request_id: int
    start: int  # the first entry is of prompt token `start + 1`
    entries: list[TokenLogprobs]


class PromptLogprobs:
    """Collects the logprobs of prompts over the steps that compute them, for the few requests that ask.

    The results of a step are kept only once it is committed: a lender may die while the step reads lent blocks.
    """

    def __init__(
        self,
        vocab_size: int,
        logprobs_of: Callable[[torch.Tensor, npt.NDArray[np.int32], Sequence[int]], list[TokenLogprobs]],
    ) -> None:
        """`logprobs_of`: `token_logprobs`, or its equivalent on the device of the logits."""
        self._logprobs_of = logprobs_of
        self._rows_per_slice = max(1, _LOGITS_BYTES // (4 * vocab_size))
        self._waiting: dict[int, tuple[Request, list[TokenLogprobs]]] = {}

    def __bool__(self) -> bool:
        """Return whether any request still waits for its prompt logprobs."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        if request.sampling.prompt_logprobs is not None:
            self._waiting[request.request_id] = (request, [])

    def discard(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def pop(self, request_id: int) -> list[TokenLogprobs] | None:
        """Return a request's logprobs of prompt tokens 1, 2, …, once; None if it did not ask or has had them."""
        request, logprobs = self._waiting.pop(request_id, (None, []))
        assert request is None or len(logprobs) == len(request.prompt) - 1
        return None if request is None else logprobs

    def collect(
        self,
        request_ids: npt.NDArray[np.uint64],
        query_starts: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        logits_of: Callable[[slice], torch.Tensor],
    ) -> list[PromptPart]:
        """Compute a step's part of the log-probabilities, for `commit` when the step's outcome is known.

        `logits_of` gives the float32 logits of a slice of the step's rows.
        """
        parts = []
        for sequence, request_id in enumerate(request_ids.tolist()):
            if request_id not in self._waiting:
                continue
            request, known = self._waiting[request_id]
            first_row, end_row = query_starts[sequence : sequence + 2].tolist()
            end_position = int(context_lens[sequence])
            first_position = end_position - (end_row - first_row)
            # A preempted request computes its prompt again from the start: known log-probabilities are skipped.
            start, stop = max(first_position, len(known)), min(end_position, len(request.prompt) - 1)
            entries: list[TokenLogprobs] = []
            for part in self._slices(start, stop):
                targets = request.prompt[part.start + 1 : part.stop + 1]
                to_row = first_row - first_position
                logits = logits_of(slice(part.start + to_row, part.stop + to_row))
                top_count = request.sampling.prompt_logprobs or 0
                entries += self._logprobs_of(logits, targets, [top_count] * len(targets))
            if entries:
                parts.append(PromptPart(sequence, request_id, start, entries))
        return parts

    def commit(self, parts: Sequence[PromptPart], counts: npt.NDArray[np.uint8]) -> None:
        """Keep the parts of the step's sequences that count; `counts [S]` is that of the step's `StepResult`."""
        for part in parts:
            if not counts[part.sequence]:
                continue
            _, known = self._waiting[part.request_id]
            assert part.start == len(known), "every position of the prompt is computed, in order"
            known += part.entries

    def _slices(self, start: int, stop: int) -> Iterator[slice]:
        for begin in range(start, stop, self._rows_per_slice):
            yield slice(begin, min(stop, begin + self._rows_per_slice))
