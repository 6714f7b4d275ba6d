"""Rules of requests about their next token: allowed tokens, bad words, and a budget for reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from swiftkv._core import StepPlan
from swiftkv.arithmetic import ceil_div
from swiftkv.engine.messages import SamplingParams
from swiftkv.engine.reasoning import ReasoningPlace
from swiftkv.engine.token_masks import MASK_BITS, TokenMasks, forbid_unless_needed


@dataclass(frozen=True, slots=True)
class _ThinkingBudget:
    """The answer's place in its reasoning, and the number of tokens that are left for it."""

    reasoning: ReasoningPlace
    num_left: int

    @property
    def is_spent(self) -> bool:
        """Whether the reasoning has to end now."""
        return self.reasoning.is_inside and self.num_left <= 0

    def after(self, token_id: int) -> _ThinkingBudget:
        """Return the budget after the next token."""
        num_left = self.num_left - self.reasoning.is_inside
        reasoning = replace(self.reasoning)
        reasoning.take(token_id)
        return _ThinkingBudget(reasoning, num_left)


@dataclass(frozen=True, slots=True)
class _Place:
    """The rules of a request, and its place in the answer.

    Attributes:
        allowed: The mask of the tokens that are allowed anywhere.
        bad_ends: The last tokens of bad words, by the tokens before them.
        recent: The latest tokens of the answer: at most one fewer than the longest bad word has.
        budget: The budget for reasoning; `None`: there is none.
    """

    allowed: npt.NDArray[np.uint32]  # [ceil(vocab / 32)]
    bad_ends: Mapping[tuple[int, ...], list[int]]
    recent: list[int]
    budget: _ThinkingBudget | None

    def after(self, token_id: int) -> _Place:
        """Return the place after the next token."""
        num_kept = max(map(len, self.bad_ends), default=0)
        recent = [*self.recent, token_id][-num_kept:] if num_kept else []
        return replace(self, recent=recent, budget=None if self.budget is None else self.budget.after(token_id))

    def narrow(self, words: npt.NDArray[np.uint32]) -> None:
        """Remove from a mask the tokens that may not come next."""
        if self.budget is not None and self.budget.is_spent:
            token_id = self.budget.reasoning.next_of_end
            words[:] = 0
            words[token_id // MASK_BITS] = np.uint32(1) << np.uint32(token_id % MASK_BITS)
            return
        words &= self.allowed
        endings = [tuple(self.recent[begin:]) for begin in range(len(self.recent) + 1)]
        if bad := [token_id for ending in endings for token_id in self.bad_ends.get(ending, ())]:
            forbid_unless_needed(words, np.array(bad, np.int32))


class TokenRules:
    """The rules of one engine's requests. All calls come from the thread of the step loop."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = ceil_div(vocab_size, MASK_BITS)
        self._places: dict[int, _Place] = {}

    def __bool__(self) -> bool:
        """Return whether any request has rules."""
        return bool(self._places)

    def hold(self, request_id: int, params: SamplingParams) -> None:
        """Hold a request to its rules from now on, if it has any."""
        if params.allowed_token_ids is None and not params.bad_words and params.thinking_budget is None:
            return
        budget = None
        if params.thinking_budget is not None and params.reasoning is not None:
            budget = _ThinkingBudget(ReasoningPlace.of(params.reasoning), params.thinking_budget)
        self._places[request_id] = _Place(
            self._mask_of(params.allowed_token_ids), _by_beginning(params.bad_words), [], budget
        )

    def release(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self._places.pop(request_id, None)

    def advance(self, request_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Note the new tokens of requests, in order."""
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            if (place := self._places.get(request_id)) is not None:
                self._places[request_id] = place.after(token_id)

    def are_in(self, plan: StepPlan) -> bool:
        """Return whether a step has rows with rules: their masks depend on the tokens of the step before."""
        return bool(self._places) and not self._places.keys().isdisjoint(plan.request_ids.tolist())

    def narrowed(self, masks: TokenMasks | None, plan: StepPlan) -> TokenMasks | None:
        """Return a step's masks, those of grammars included, without the tokens that the rules forbid."""
        if not self.are_in(plan):
            return masks
        rows, narrow = [], []
        place, previous_id = None, None
        for row, (request_id, input_id) in enumerate(
            zip(plan.request_ids[plan.logits_seqs].tolist(), plan.token_ids[plan.logits_rows].tolist(), strict=True)
        ):
            # A request's first row follows its latest token, and each further row one more guess.
            place = (
                self._places.get(request_id) if request_id != previous_id or place is None else place.after(input_id)
            )
            previous_id = request_id
            if place is None:
                continue
            words = self._mask_of(None) if masks is None else masks.words_of(row, self._num_words)
            place.narrow(words)
            rows.append(row)
            narrow.append(words)
        if not rows:
            return masks
        narrowed = TokenMasks(np.array(rows, np.int32), np.stack(narrow))
        return narrowed if masks is None else masks.replaced(narrowed)

    def _mask_of(self, token_ids: Sequence[int] | None) -> npt.NDArray[np.uint32]:
        """Return a mask of these tokens, or of all."""
        if token_ids is None:
            return np.full(self._num_words, 0xFFFF_FFFF, np.uint32)
        words = np.zeros(self._num_words, np.uint32)
        ids = np.array(token_ids, np.int64)
        np.bitwise_or.at(words, ids // MASK_BITS, np.uint32(1) << (ids % MASK_BITS).astype(np.uint32))
        return words


def _by_beginning(words: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return the last tokens of words, by the tokens before them."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for *beginning, last in words:
        ends.setdefault(tuple(beginning), []).append(last)
    return ends
