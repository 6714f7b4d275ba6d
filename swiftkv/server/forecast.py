"""Forecasts of how soon an engine would begin to answer, from what its gateway sees of it.

A gateway knows which prompts wait, which are being computed, and how many answers go on; the engine tells how much each
token and row adds to the time of a step. So when a prompt arrives, the gateway can tell about when its first token
comes. `swiftkv simulate` uses the same code. It is one file of 400 lines because a forecast is one sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv._core import PRIORITIES_PER_CLASS
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.forecast_errors import ForecastErrors
from swiftkv.server.response_ratio import Waiting, part_before, part_overtaken

_LENGTH, _LEFT, _PAIRS, _ARRIVED_S, _PRIORITY, _DEADLINE_S, _HAS_BEGUN, _DONE_S, _FLOW, _WEIGHT = range(10)
_FIRST_ROWS = 64
_USUAL_ANSWER_TOKENS = 128.0  # until some have ended
_RECENT_ANSWERS = 32
_RECENT_STEPS = 16
_RECENT_PROMPTS = 512
_MAX_OVERTAKING_PART = 0.9
_LEAST_TTFT_S = 1e-6
_PART_IN_TIME_IN_ORDER, _PART_IN_TIME_OVERTAKEN = 0.8, 0.2
"""A request is refused unless so many like it would be in time, by whether later ones may go before it.

benchmarks/README.md compares others.
"""
_INTERRUPTING: frozenset[SchedulingPolicy] = frozenset({"hrrn", "spf", "deadline"})

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ForecastLimits:
    """The part of a model's configuration that decides when its requests begin."""

    policy: SchedulingPolicy = "hrrn"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    step_limit_s: float | None = None
    """The longest step beside answers: `target_tpot`."""
    due_s: float = 10.0
    """The seconds until the first token of a request without a target is due, for `deadline`."""


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt that arrives. `num_cached` of its tokens are expected to be in the cache."""

    num_tokens: int
    num_cached: int = 0
    priority: int = 0
    due_s: float | None = None
    flow: int = 0
    flow_weight: float = 1.0

    @property
    def num_left(self) -> int:
        """The tokens that are to be computed: at least the last one is."""
        return max(1, self.num_tokens - self.num_cached)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prospects of a prompt, in seconds from now.

    Attributes:
        ttft_s: Until its first token, if as many prompts overtake it as of late.
        hopeful_ttft_s: Until its first token, as a part of similar prompts had it: `ttft_s` times an error of late.
        alone_ttft_s: `ttft_s` if nothing else waited.
        tpot_s: The least time for each further token: of a step with the answers that go on, and with its own.
        answer_s: How long an answer usually goes on.
    """

    ttft_s: float
    hopeful_ttft_s: float
    alone_ttft_s: float
    tpot_s: float
    answer_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens that are left of a prompt, the seconds to compute them, and those that the step before may take."""

    num_tokens: int
    computing_s: float
    step_s: float


@dataclass(slots=True)
class _Answer:
    """A sequence that has a token: the tokens it looks back on, those it holds alone, and those it has generated."""

    context: int
    held: int
    priority: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Pace:
    """The speed at which prompts are computed beside the answers that go on."""

    token_s: float
    pair_s: float
    overhead_s: float  # time of a step beside its work on prompts
    spare_s: float  # time of a step that is left for prompts
    budget: int  # tokens of prompts in a step

    @property
    def step_s(self) -> float:
        """The time of a full step."""
        return self.overhead_s + min(self.spare_s, self.budget * self.token_s)

    def work_s(self, left: Floats, pairs: Floats) -> Floats:
        return self.token_s * left + self.pair_s * pairs

    def steps(self, left: Floats, work_s: Floats) -> Floats:
        """Return how many steps prompts fill, parts of steps included."""
        return np.maximum(left / self.budget, work_s / self.spare_s)

    def computing_s(self, work_s: float, num_steps: float) -> float:
        """Return how long a prompt takes that nothing interrupts."""
        return work_s + math.ceil(num_steps - 1e-9) * self.overhead_s


class EngineForecast:
    """Follows the sequences of one engine, and forecasts when those that arrive begin. Times are of one clock."""

    def __init__(self, limits: ForecastLimits | None = None) -> None:
        self._limits = limits or ForecastLimits()
        self.pool_tokens = math.inf
        """The tokens that the engine's memory holds, once they are known."""
        self.longest_context = 0
        """The tokens of the longest sequence so far: the most that a prompt can find in the cache."""
        may_be_overtaken = self._limits.policy in _INTERRUPTING
        self._errors = ForecastErrors(_PART_IN_TIME_OVERTAKEN if may_be_overtaken else _PART_IN_TIME_IN_ORDER)
        self._forecasts: dict[int, tuple[int, float, float]] = {}  # before its first token: left, seconds, arrival
        self._costs: tuple[float, ...] = ()  # seconds of each of STEP_TIME_TERMS; empty: not known
        self._rows: Floats = np.zeros((_FIRST_ROWS, 10))  # sequences without a token; unused rows are zero
        self._unused = list(range(_FIRST_ROWS))
        self._row_of: dict[int, int] = {}
        self._begun: dict[int, None] = {}  # those of them that have been admitted, in order
        self._answers: dict[int, _Answer] = {}
        self._context = 0
        self._latest: Floats = np.zeros((_RECENT_PROMPTS, 10))  # rows of those that came last
        self._num_added = 0
        self._advanced_s = 0.0
        self._last_step_s = 0.0
        self._step_s = 0.0  # the recent time of steps with answers
        self._answer_tokens = _USUAL_ANSWER_TOKENS

    def learn(self, step_time_s: Sequence[float]) -> None:
        """Take over the coefficients of STEP_TIME_TERMS; ignore an empty sequence: the engine does not know them."""
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
        if not self._unused:
            self._unused = list(range(len(self._rows), 2 * len(self._rows)))
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        row = self._row_of[request_id] = self._unused.pop()
        due_s = self._limits.due_s if prompt.due_s is None else prompt.due_s
        times = (now_s, prompt.priority, now_s + due_s, 0, 0)
        self._rows[row] = (prompt.num_tokens, 0, 0, *times, prompt.flow, prompt.flow_weight)
        self._set_left(row, prompt.num_tokens, prompt.num_cached)
        self._latest[self._num_added % _RECENT_PROMPTS] = self._rows[row]
        self._num_added += 1

    def admitted(self, request_id: int, num_cached: int, now_s: float) -> None:
        """Note that the engine has begun with a sequence, and what it found of it in the cache."""
        row = self._row_of.get(request_id)
        if row is None:
            return
        self._advance(now_s)
        self._set_left(row, int(self._rows[row, _LENGTH]), num_cached)
        self._rows[row, _HAS_BEGUN] = 1
        self._begun[request_id] = None

    def token(self, request_id: int, now_s: float) -> None:
        """Note that a sequence has got a token."""
        self._note_step(now_s)
        answer = self._answers.get(request_id)
        if answer is None:
            self._advance(now_s)
            length, left, priority = self._rows[self._row_of[request_id], [_LENGTH, _LEFT, _PRIORITY]].tolist()
            self._leave_queue(request_id)
            answer = self._answers[request_id] = _Answer(int(length), int(left), priority)
            self._context += answer.context
            if request_id in self._forecasts:
                num_left, forecast_s, arrived_s = self._forecasts.pop(request_id)
                self._errors.note(num_left, forecast_s, now_s - arrived_s)
        answer.context += 1
        answer.num_tokens += 1
        self._context += 1

    def miss(self, request_id: int, now_s: float) -> None:
        """Note that a sequence which waits is given up: its first token would have come too late."""
        work = self.work_of(request_id)
        if work is not None and request_id in self._forecasts:
            num_left, forecast_s, arrived_s = self._forecasts.pop(request_id)
            self._errors.note(num_left, forecast_s, now_s + work.computing_s - arrived_s)

    def end(self, request_id: int, now_s: float) -> None:
        """Forget a sequence, however it ended."""
        self._forecasts.pop(request_id, None)
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._context -= answer.context
            self.longest_context = max(self.longest_context, answer.context)
            self._answer_tokens += (answer.num_tokens - self._answer_tokens) / _RECENT_ANSWERS
        elif request_id in self._row_of:
            self._advance(now_s)
            self._leave_queue(request_id)

    # ---- prospects ----

    def work_of(self, request_id: int) -> Work | None:
        """Return the work on a sequence without a token; `None` for others, or while nobody knows how long steps take.

        It is all that was left when the sequence came or was admitted.
        """
        row = self._row_of.get(request_id)
        if row is None or not self._costs:
            return None
        pace, left = self._pace(), self._rows[row, [_LEFT]]
        work_s = pace.work_s(left, self._rows[row, [_PAIRS]])
        computing_s = pace.computing_s(float(work_s[0]), float(pace.steps(left, work_s)[0]))
        return Work(int(left[0]), computing_s, pace.step_s)

    def of(self, prompt: NewPrompt, now_s: float) -> Forecast | None:
        """Return the prospects of a prompt that arrives now; `None` while nobody knows how long steps take."""
        if not self._costs:
            return None
        self._advance(now_s)
        pace = self._pace()
        rows = self._rows
        work_s = pace.work_s(rows[:, _LEFT], rows[:, _PAIRS])
        steps = pace.steps(rows[:, _LEFT], work_s)
        service_s = work_s + steps * pace.overhead_s
        part = 1 - np.minimum(rows[:, _DONE_S] / np.maximum(service_s, 1e-9), 1)  # the part that is left
        before = self._before(prompt, rows[:, _LEFT] * part, service_s * part, now_s, pace.step_s)
        ahead = before > 0
        behind = part * (1 - before)
        own_left = np.array([float(prompt.num_left)])
        own_work_s = pace.work_s(own_left, np.array([_pairs(prompt.num_tokens, prompt.num_left)]))
        own_s, own_steps = float(own_work_s[0]), float(pace.steps(own_left, own_work_s)[0])
        share = self._share(prompt, ahead, service_s * part, own_s + own_steps * pace.overhead_s)
        part *= share * before
        end = float(steps[ahead] @ part[ahead]) + own_steps
        whole = math.ceil(end - 1e-9)
        # A prompt has its token when its last step ends, and that step computes tokens of other prompts, too.
        steps_behind, behind_s = float(steps @ behind), float(work_s @ behind)
        beside_s = behind_s * min(1.0, (whole - end) / steps_behind) if steps_behind else 0.0
        ahead_s = float(work_s[ahead] @ part[ahead])
        alone_s = self._rest_of_step_s(now_s) + pace.computing_s(own_s, own_steps)
        queued_s = self._rest_of_step_s(now_s) + ahead_s + own_s + beside_s + whole * pace.overhead_s
        queued_s /= 1 - self._overtaking_part(prompt, pace, queued_s, now_s)
        waits = ahead & (rows[:, _HAS_BEGUN] == 0) & (rows[:, _LENGTH] > 0)
        room_s = self._room_s(prompt, int(share[waits].sum()), float(rows[waits, _LEFT] @ share[waits]))
        tpot_s = self._decodes_s(1, prompt.num_tokens)
        ttft_s = max(queued_s, room_s + alone_s, _LEAST_TTFT_S)
        hopeful_s = ttft_s * self._errors.allowance(prompt.num_left, ttft_s)
        return Forecast(ttft_s, hopeful_s, alone_s, tpot_s, self._answer_tokens * tpot_s)

    def _share(self, prompt: NewPrompt, ahead: Bools, service_s: Floats, own_s: float) -> Floats:
        """Return the part of each sequence ahead of a prompt that is computed before it, [rows]; 1 for the others.

        While a flow computes its own prompts up to this one, each other flow gets as much time by its weight.
        """
        rows, share = self._rows, np.ones(len(self._rows))
        is_own: Bools = rows[:, _FLOW] == prompt.flow
        others = ahead & ~is_own & (rows[:, _PRIORITY] == prompt.priority)
        own_s += float(service_s[ahead & is_own].sum())
        for flow in np.unique(rows[others, _FLOW]):
            of_flow = others & (rows[:, _FLOW] == flow)
            most_s = own_s * rows[of_flow, _WEIGHT].max() / prompt.flow_weight
            share[of_flow] = min(1.0, most_s / max(float(service_s[of_flow].sum()), 1e-9))
        return share

    def _set_left(self, row: int, num_tokens: int, num_cached: int) -> None:
        left = max(1, num_tokens - num_cached)
        self._rows[row, [_LEFT, _PAIRS]] = left, _pairs(num_tokens, left)

    def _leave_queue(self, request_id: int) -> None:
        row = self._row_of.pop(request_id)
        self._begun.pop(request_id, None)
        self._rows[row] = 0
        self._unused.append(row)

    def _advance(self, now_s: float) -> None:
        """Credit the time since the last call to the prompt that the engine computes."""
        elapsed_s, self._advanced_s = now_s - self._advanced_s, now_s
        if self._begun:
            self._rows[self._row_of[self._head(now_s)], _DONE_S] += elapsed_s

    def _head(self, now_s: float) -> int:
        """Return the prompt that goes first of those that have begun."""
        if len(self._begun) == 1 or self._limits.policy not in _INTERRUPTING:
            return next(iter(self._begun))

        def place(request_id: int) -> tuple[float, float]:
            row = self._rows[self._row_of[request_id]]
            if self._limits.policy == "deadline":
                return row[_PRIORITY], row[_DEADLINE_S]
            if self._limits.policy == "spf":
                return row[_PRIORITY], row[_LEFT]
            return row[_PRIORITY], (row[_ARRIVED_S] - now_s) / row[_LEFT]

        return min(self._begun, key=place)

    def _note_step(self, now_s: float) -> None:
        if now_s <= self._last_step_s:
            return
        if self._answers:
            self._step_s += (now_s - self._last_step_s - self._step_s) / _RECENT_STEPS
        self._last_step_s = now_s

    def _decodes_s(self, num_more: int = 0, context: int = 0) -> float:
        token_s, _, context_s, row_s, _, step_s = self._costs
        num_answers = len(self._answers) + num_more
        return step_s + num_answers * (token_s + row_s) + (self._context + context) * context_s

    def _rest_of_step_s(self, now_s: float) -> float:
        """Return the seconds until the step in progress ends, if it has answers alone."""
        if self._begun or not self._answers:
            return 0.0
        return max(0.0, self._decodes_s() - (now_s - self._last_step_s))

    def _pace(self) -> _Pace:
        token_s, pair_s, _, row_s, _, _ = self._costs
        limits, decodes_s = self._limits, self._decodes_s()
        overhead_s = decodes_s + row_s
        spare_s = math.inf
        if limits.step_limit_s is not None and (self._answers or self._row_of):
            limit_s = max(limits.step_limit_s, 2 * decodes_s)
            spare_s = max(limit_s - overhead_s, limits.block_size * token_s, 1e-6)
        budget = max(1, limits.max_num_batched_tokens - len(self._answers))
        return _Pace(token_s, pair_s, overhead_s, spare_s, budget)

    def _end_of_class(self, prompt: NewPrompt) -> float:
        """Return the priority from which on running requests give way to a prompt: those of lower classes do."""
        if self._limits.policy == "fcfs":
            return math.inf
        return (math.floor(prompt.priority / PRIORITIES_PER_CLASS + 0.5) + 0.5) * PRIORITIES_PER_CLASS

    def _room_s(self, prompt: NewPrompt, num_ahead: int, tokens_ahead: float) -> float:
        """Return when enough answers will have ended to leave a slot, and memory, for a prompt behind those ahead.

        Those of lower classes need not end: they give way.
        """
        end = self._end_of_class(prompt)
        answers = [answer for answer in self._answers.values() if answer.priority < end]
        if not answers:
            return 0.0
        rows = self._rows
        num_running = len(answers) + int(np.sum((rows[:, _HAS_BEGUN] > 0) & (rows[:, _PRIORITY] < end)))
        held = sum(answer.held + answer.num_tokens for answer in answers)
        short_slots = num_ahead + 1 - (self._limits.max_num_seqs - num_running)
        short_tokens = tokens_ahead + prompt.num_left - (self.pool_tokens - held)
        num_ends = max(float(short_slots), short_tokens * len(answers) / max(1, held))
        if num_ends <= 0:
            return 0.0
        part = math.ceil(num_ends) / len(answers)
        return part * self._answer_tokens * max(self._step_s, self._decodes_s())

    def _overtaking_part(self, prompt: NewPrompt, pace: _Pace, wait_s: float, now_s: float) -> float:
        """Return the part of a wait of `wait_s` that later prompts will take, if as many come as of late."""
        latest = self._latest[: self._num_added]
        policy = self._limits.policy
        if policy == "fcfs" or len(latest) < 2:
            return 0.0
        is_more_urgent = latest[:, _PRIORITY] < prompt.priority
        left = latest[:, _LEFT]
        if policy == "hrrn":
            parts = part_overtaken(own=prompt.num_left, others=left)
        elif policy == "spf":
            parts = (left < prompt.num_left).astype(np.float64)
        elif policy == "deadline":
            due_s = self._limits.due_s if prompt.due_s is None else prompt.due_s
            own_due_s = latest[:, _DEADLINE_S] - latest[:, _ARRIVED_S]
            parts = np.clip((due_s - own_due_s) / max(wait_s, 1e-9), 0.0, 1.0)
        else:
            parts = np.zeros(len(latest))
        is_alike = (latest[:, _PRIORITY] == prompt.priority) & (latest[:, _FLOW] == prompt.flow)
        parts = np.where(is_more_urgent, 1.0, parts * is_alike)
        work_s = pace.work_s(left, latest[:, _PAIRS])
        service_s = work_s + pace.steps(left, work_s) * pace.overhead_s
        span_s = max(now_s - float(latest[:, _ARRIVED_S].min()), wait_s, 1e-9)
        return min(float(parts @ service_s) / span_s, _MAX_OVERTAKING_PART)

    def _before(self, prompt: NewPrompt, left: Floats, service_s: Floats, now_s: float, step_s: float) -> Floats:
        """Return the part of each sequence without a token that is computed before a prompt that arrives now, [rows].

        `left` and `service_s` are the tokens and the seconds that are left of each; a step takes `step_s`.
        """
        rows, policy = self._rows, self._limits.policy
        is_used: Bools = rows[:, _LENGTH] > 0
        if policy == "fcfs":
            return is_used.astype(np.float64)
        is_equal: Bools = is_used & (rows[:, _PRIORITY] == prompt.priority)
        ahead: Bools = is_used & (rows[:, _PRIORITY] < prompt.priority)
        if policy == "priority":
            ahead |= is_equal | ((rows[:, _HAS_BEGUN] > 0) & (rows[:, _PRIORITY] < self._end_of_class(prompt)))
        elif policy == "spf":
            ahead |= is_equal & (left <= prompt.num_left)
        elif policy == "deadline":
            due_s = self._limits.due_s if prompt.due_s is None else prompt.due_s
            ahead |= is_equal & (rows[:, _DEADLINE_S] <= now_s + due_s)
        else:
            waiting = Waiting(left, now_s - rows[:, _ARRIVED_S], service_s)
            return part_before(waiting, prompt.num_left, ahead, is_equal, step_s)
        return ahead.astype(np.float64)


def _pairs(num_tokens: int, num_left: int) -> float:
    """Return how many pairs of a token and one before it attention computes for the last `num_left` tokens."""
    return num_left * (num_tokens - 0.5 * num_left)
