"""Forecasts of how soon an engine would begin to answer, from what its gateway sees of it.

A gateway knows which prompts wait, which are being computed, and how many answers go on; the engine reports how much
each token and row adds to the time of a step. So when a prompt arrives, the gateway can estimate when its first token
will come. `swiftkv simulate` uses the same code. `_core.PromptQueue` (C++) sums up the work ahead of a prompt, because
thousands may wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv._core import ForecastErrors, PromptPace, PromptQueue, QueuedPrompt, WorkAhead
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.sent_prefixes import Found, SentPrefixes

_USUAL_ANSWER_TOKENS = 128.0  # until some have ended
_MOST_ANSWER_TOKENS = 1e6  # a finite stand-in for an answer without a bound, so that sums stay exact
_RECENT_ANSWERS = 32
_RECENT_STEPS = 16
_RECENT_ROWS = 64  # of answers in steps
_LEAST_TTFT_S = 1e-6
_PART_IN_TIME_IN_ORDER, _PART_IN_TIME_OVERTAKEN = 0.8, 0.3
"""The part of similar requests that must have been in time, or a new one is refused.

The first number is for policies under which later requests cannot go first, the second for all others.
benchmarks/results/forecasts.md compares other values.
"""
_INTERRUPTING: frozenset[SchedulingPolicy] = frozenset({"hrrn", "spf", "turns", "deadline"})


@dataclass(frozen=True, slots=True)
class ForecastLimits:
    """The part of a model's configuration that decides when its requests begin."""

    policy: SchedulingPolicy = "hrrn"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    step_limit_s: float | None = None
    """The longest that a step with answers may take: `target_tpot`."""
    due_s: float = 10.0
    """The seconds until the first token of a request without a target is due, for `deadline`."""


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt that arrives. `num_cached` of its tokens are expected to be in the cache.

    `num_coming` of the others will be there once waiting prompts have begun; the engine's order does not depend on
    them.
    """

    num_tokens: int
    num_cached: int = 0
    num_coming: int = 0
    priority: int = 0
    due_s: float | None = None
    flow: int = 0
    flow_weight: float = 1.0
    max_tokens: float = math.inf
    """The most tokens that its answer may have; infinite if that is not known."""

    @property
    def num_left(self) -> int:
        return _num_left(self.num_tokens, self.num_cached)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prospects of a prompt, in seconds from now.

    Attributes:
        ttft_s: Until its first token, if as many prompts overtake it as did lately.
        hopeful_ttft_s: `ttft_s` times a quantile of the latest errors on similar prompts.
        alone_ttft_s: `ttft_s` if nothing else waited.
        tpot_s: The least time for each further token: that of a step with the current answers and this one, divided by
            the tokens that an answer has lately got per step.
        alone_tpot_s: `tpot_s` if there were no other answer.
        answer_s: From the first token to the last, for the usual length of an answer, or its `max_tokens` if that is
            less.
    """

    ttft_s: float
    hopeful_ttft_s: float
    alone_ttft_s: float
    tpot_s: float
    alone_tpot_s: float
    answer_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """The work left on a prompt: its tokens, the seconds to compute them, and those that the step before may take."""

    num_tokens: int
    computing_s: float
    step_s: float


@dataclass(slots=True)
class _AnswerInProgress:
    """A sequence that has a token: how many tokens it attends to, holds alone, may generate, and has generated.

    `step_tokens` of them came with the step that ended at `step_end_s`: several, if it has drafts.
    """

    context: int
    held: int
    priority: int
    max_tokens: float
    num_tokens: int = 0
    step_tokens: int = 0
    step_end_s: float = -math.inf


@dataclass(slots=True)
class _Holding:
    """The answers of one priority: their number, the tokens that only they hold, and the most they may generate."""

    num_answers: int = 0
    num_tokens: int = 0
    max_tokens: float = 0.0


class EngineForecast:
    """Follows the sequences of one engine, and forecasts when new ones will have a token. Times are by one clock."""

    def __init__(self, limits: ForecastLimits | None = None) -> None:
        self._limits = limits or ForecastLimits()
        self.pool_tokens = math.inf
        """The number of tokens that the engine's memory can hold; infinite until it is known."""
        self.longest_context = 0
        """The tokens of the longest sequence so far: the most that a prompt can find in the cache."""
        self.prefixes = SentPrefixes()
        """The beginnings of the prompts that the engine was sent, once its memory is known."""
        may_be_overtaken = self._limits.policy in _INTERRUPTING
        self._errors = ForecastErrors(_PART_IN_TIME_OVERTAKEN if may_be_overtaken else _PART_IN_TIME_IN_ORDER)
        self._forecasts: dict[int, tuple[int, float, float]] = {}  # before its first token: tokens, forecast, arrival
        self._costs: tuple[float, ...] = ()  # seconds of each of STEP_TIME_TERMS; empty: not known
        self._queue = PromptQueue(self._limits.policy)  # sequences without a token
        self._max_tokens: dict[int, float] = {}  # of their answers
        self._answers: dict[int, _AnswerInProgress] = {}
        self._holding: dict[int, _Holding] = {}  # by priority
        self._context = 0
        self._last_step_s = 0.0
        self._step_s = 0.0  # the recent time of steps with answers
        self._answer_tokens = _USUAL_ANSWER_TOKENS
        self._tokens_a_step = 1.0  # that an answer gets

    def learn(self, step_time_s: Sequence[float]) -> None:
        """Take over the coefficients of STEP_TIME_TERMS; ignore an empty sequence: the engine knows none yet."""
        if step_time_s:
            self._costs = tuple(step_time_s)

    def forget_costs(self) -> None:
        """Make no forecasts until `learn` is called."""
        self._costs = ()

    # ---- sequences come and go ----

    def add(self, request_id: int, prompt: NewPrompt, now_s: float, forecast_s: float | None = None) -> None:
        """Note that a sequence has come; `forecast_s` is its `Forecast.ttft_s`, if one was made."""
        if forecast_s is not None:
            self._forecasts[request_id] = prompt.num_left, forecast_s, now_s
        self._queue.add(request_id, self._queued(prompt, now_s))
        self._max_tokens[request_id] = min(prompt.max_tokens, _MOST_ANSWER_TOKENS)

    def admitted(self, request_id: int, num_cached: int, now_s: float) -> None:
        """Note that the engine has begun a sequence, and how many of its tokens were cached."""
        queued = self._queue.find(request_id)
        if queued is not None:
            self._advance(now_s)
            self._queue.begin(request_id, _num_left(int(queued.num_tokens), num_cached))
        for other_id, found in self.prefixes.begin(request_id).items():
            self._expect(other_id, found)

    def _expect(self, request_id: int, found: Found) -> None:
        queued = self._queue.find(request_id)
        if queued is not None:
            num_left = _num_left(int(queued.num_tokens), found.num_cached)
            self._queue.expect(request_id, num_left, min(found.num_coming, num_left - 1))

    def token(self, request_id: int, now_s: float) -> None:
        """Note that a sequence has got a token."""
        self._note_step(now_s)
        answer = self._answers.get(request_id)
        if answer is None:
            queued = self._queue.find(request_id)
            assert queued is not None, "a sequence comes before its token"
            self._advance(now_s)
            self._queue.remove(request_id)
            max_tokens = self._max_tokens.pop(request_id)
            answer = _AnswerInProgress(int(queued.num_tokens), int(queued.num_left), queued.priority, max_tokens)
            self._add_answer(request_id, answer)
            if request_id in self._forecasts:
                num_left, forecast_s, arrived_s = self._forecasts.pop(request_id)
                self._errors.note(num_left, forecast_s, now_s - arrived_s)
        self._note_row(answer, now_s)
        answer.context += 1
        answer.held += 1
        answer.num_tokens += 1
        self._holding[answer.priority].num_tokens += 1
        self._context += 1

    def miss(self, request_id: int, now_s: float) -> None:
        """Note that a waiting sequence is given up: its first token would have come too late."""
        work = self.work_of(request_id)
        if work is not None and request_id in self._forecasts:
            num_left, forecast_s, arrived_s = self._forecasts.pop(request_id)
            self._errors.note(num_left, forecast_s, now_s + work.computing_s - arrived_s)

    def end(self, request_id: int, now_s: float) -> None:
        """Forget a sequence, however it ended."""
        self.prefixes.end(request_id)
        self._forecasts.pop(request_id, None)
        answer = self._remove_answer(request_id)
        if answer is not None:
            self.longest_context = max(self.longest_context, answer.context)
            self._answer_tokens += (answer.num_tokens - self._answer_tokens) / _RECENT_ANSWERS
        else:
            self._advance(now_s)
            self._queue.remove(request_id)
            self._max_tokens.pop(request_id, None)

    def _add_answer(self, request_id: int, answer: _AnswerInProgress) -> None:
        self._answers[request_id] = answer
        self._context += answer.context
        holding = self._holding.setdefault(answer.priority, _Holding())
        holding.num_answers += 1
        holding.num_tokens += answer.held
        holding.max_tokens += answer.max_tokens

    def _remove_answer(self, request_id: int) -> _AnswerInProgress | None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._context -= answer.context
            holding = self._holding[answer.priority]
            holding.num_answers -= 1
            holding.num_tokens -= answer.held
            holding.max_tokens -= answer.max_tokens
            if not holding.num_answers:
                del self._holding[answer.priority]
        return answer

    # ---- prospects ----

    def work_of(self, request_id: int) -> Work | None:
        """Return the work on a sequence without a token; `None` for others, or while step times are unknown.

        It is the work that was left when the sequence came or was admitted.
        """
        queued = self._queue.find(request_id)
        if queued is None or not self._costs:
            return None
        pace = self._pace()
        return Work(int(queued.num_left), pace.computing_s(queued), pace.step_s)

    def of(self, prompt: NewPrompt, now_s: float) -> Forecast | None:
        """Return the prospects of a prompt that arrives now; `None` while step times are unknown."""
        if not self._costs:
            return None
        pace, own = self._pace(), self._queued(prompt, now_s)
        self._queue.advance(now_s, pace)
        ahead = self._queue.ahead_of(own, pace)
        own_s = pace.work_s(own)
        end = ahead.steps + pace.steps(own, own_s)
        whole = math.ceil(end - 1e-9)
        # A prompt has its token when its last step ends, and that step computes tokens of other prompts, too.
        beside_s = ahead.work_behind_s * min(1.0, (whole - end) / ahead.steps_behind) if ahead.steps_behind else 0.0
        rest_s = self._rest_of_step_s(now_s)
        alone_s = rest_s + pace.computing_s(own)
        queued_s = rest_s + ahead.work_s + own_s + beside_s + whole * pace.overhead_s
        queued_s /= 1 - self._queue.overtaking_part(own, pace, queued_s)
        room_s = self._room_s(own, ahead)
        tpot_s = self._decodes_s(1, prompt.num_tokens) / self._tokens_a_step
        alone_tpot_s = self._step_s_of(1, prompt.num_tokens) / self._tokens_a_step
        ttft_s = max(queued_s, room_s + alone_s, _LEAST_TTFT_S)
        hopeful_s = ttft_s * self._errors.allowance(prompt.num_left, ttft_s)
        answer_s = min(self._answer_tokens, prompt.max_tokens) * tpot_s
        return Forecast(ttft_s, hopeful_s, alone_s, tpot_s, alone_tpot_s, answer_s)

    def _queued(self, prompt: NewPrompt, now_s: float) -> QueuedPrompt:
        due_s = self._limits.due_s if prompt.due_s is None else prompt.due_s
        return QueuedPrompt(
            prompt.num_tokens,
            prompt.num_left,
            now_s,
            priority=prompt.priority,
            deadline_s=now_s + due_s,
            flow=prompt.flow,
            flow_weight=prompt.flow_weight,
            num_coming=min(prompt.num_coming, prompt.num_left - 1),
        )

    def _advance(self, now_s: float) -> None:
        self._queue.advance(now_s, self._pace() if self._costs else None)

    def _note_step(self, now_s: float) -> None:
        if now_s <= self._last_step_s:
            return
        if self._answers:
            self._step_s += (now_s - self._last_step_s - self._step_s) / _RECENT_STEPS
        self._last_step_s = now_s

    def _note_row(self, answer: _AnswerInProgress, now_s: float) -> None:
        """Note that an answer gets a token; those of one step come at one time."""
        if now_s == answer.step_end_s:
            answer.step_tokens += 1
            return
        if answer.step_tokens:
            self._tokens_a_step += (answer.step_tokens - self._tokens_a_step) / _RECENT_ROWS
        answer.step_tokens, answer.step_end_s = 1, now_s

    def _decodes_s(self, num_more: int = 0, context: int = 0) -> float:
        return self._step_s_of(len(self._answers) + num_more, self._context + context)

    def _step_s_of(self, num_answers: int, context: int) -> float:
        """Return the seconds of a step with so many answers, which attend to `context` tokens together."""
        token_s, _, context_s, row_s, _, step_s = self._costs
        return step_s + num_answers * (token_s + row_s) + context * context_s

    def _rest_of_step_s(self, now_s: float) -> float:
        """Return the seconds until the step in progress ends if it has only answers, else 0."""
        if self._queue.has_begun or not self._answers:
            return 0.0
        return max(0.0, self._decodes_s() - (now_s - self._last_step_s))

    def _pace(self) -> PromptPace:
        token_s, pair_s, _, row_s, _, _ = self._costs
        limits, decodes_s = self._limits, self._decodes_s()
        overhead_s = decodes_s + row_s
        spare_s = math.inf
        if limits.step_limit_s is not None and (self._answers or not self._queue.is_empty):
            limit_s = max(limits.step_limit_s, 2 * decodes_s)
            spare_s = max(limit_s - overhead_s, limits.block_size * token_s, 1e-6)
        budget = max(1, limits.max_num_batched_tokens - len(self._answers))
        return PromptPace(token_s=token_s, pair_s=pair_s, overhead_s=overhead_s, spare_s=spare_s, budget=budget)

    def _room_s(self, prompt: QueuedPrompt, ahead: WorkAhead) -> float:
        """Return the seconds until enough answers have ended to make room for a prompt and those ahead of it.

        Answers of lower classes need not end: they are displaced.
        """
        end = self._queue.end_of_class(prompt.priority)
        staying = [holding for priority, holding in self._holding.items() if priority < end]
        if not staying:
            return 0.0
        num_answers = sum(holding.num_answers for holding in staying)
        held = sum(holding.num_tokens for holding in staying)
        short_slots = int(ahead.num_waiting) + 1 - (self._limits.max_num_seqs - num_answers - ahead.num_begun)
        short_tokens = ahead.tokens_waiting + prompt.num_left - (self.pool_tokens - held)
        num_ends = max(float(short_slots), short_tokens * num_answers / max(1, held))
        if num_ends <= 0:
            return 0.0
        part = math.ceil(num_ends) / num_answers
        answer_tokens = min(self._answer_tokens, sum(holding.max_tokens for holding in staying) / num_answers)
        return part * answer_tokens * max(self._step_s, self._decodes_s()) / self._tokens_a_step


def _num_left(num_tokens: int, num_cached: int) -> int:
    """Return the tokens of a prompt that are to be computed: at least the last one is."""
    return max(1, num_tokens - num_cached)
