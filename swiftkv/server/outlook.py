"""Forecasts when the requests of one model get their tokens, and refuses those that would get them too late."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from swiftkv.engine.messages import AddRequest, EngineStats, Ready
from swiftkv.server.errors import ApiError
from swiftkv.server.forecast import EngineForecast, Forecast, ForecastLimits, NewPrompt
from swiftkv.server.last_starts import LastStarts
from swiftkv.server.metrics import ModelMetrics
from swiftkv.server.queued_prompts import MAX_RETRY_S, QueuedPrompts
from swiftkv.server.sent_prefixes import Found
from swiftkv.server.targets import NO_TARGETS, Targets
from swiftkv.server.tenants import ANYBODY, Sender

_LEAST_RETRY_S = 1.0
_FORECAST_ONE_OF = 16
"""One in this many requests without targets gets a forecast, for the metric."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sequence without a token: the length of its prompt, and the forecast of its first token, if there was one."""

    num_tokens: int
    arrived_s: float
    forecast_s: float | None
    target_ttft_s: float | None


class Outlook:
    """Follows the messages to and from an engine, so that its client can refuse requests that would be late.

    Times are of `time.perf_counter`, in seconds.
    """

    def __init__(
        self,
        model: str,
        metrics: ModelMetrics,
        limits: ForecastLimits | None = None,
        *,
        max_queued_tokens: int | None = None,
        caches_prefixes: bool = True,
    ) -> None:
        self.queued = QueuedPrompts(max_queued_tokens)
        self.forecast = EngineForecast(limits)
        self._starts = LastStarts(self.forecast)
        self._model = model
        self._metrics = metrics
        self._caches_prefixes = caches_prefixes
        self._last_prompt: tuple[bytes, str, list[bytes]] = (b"", "", [])
        self._has_storage = False
        self._num_without_targets = 0
        self._waiting: dict[int, _Waiting] = {}

    # ---- the engine ----

    def engine_up(self, ready: Ready) -> None:
        """Note that a new engine serves, whose cache is empty."""
        pool_tokens = ready.num_blocks * ready.block_size
        self.forecast.pool_tokens = pool_tokens
        self.forecast.prefixes.clear()
        self.forecast.prefixes.max_tokens = pool_tokens if self._caches_prefixes else 0

    def engine_down(self) -> None:
        """Make no forecasts until an engine reports how long its steps take."""
        self.forecast.forget_costs()

    def observe(self, stats: EngineStats) -> None:
        self.forecast.learn(stats.step_time_s)
        self.queued.tokens_per_s = stats.prefill_tokens_per_s
        self._has_storage = stats.tier is not None
        if any(group.borrowed_free + group.borrowed_used + group.borrowed_cached for group in stats.groups):
            self.forecast.pool_tokens = math.inf  # the gateway does not know how much memory others lend

    # ---- sequences ----

    def sent(
        self,
        message: AddRequest,
        now_s: float,
        target_ttft_s: float | None = None,
        forecast_s: float | None = None,
    ) -> None:
        """Note that a sequence was sent to the engine. It is refused later if it can no longer meet its target.

        `forecast_s` is the result of `check`, if it was asked about this sequence.
        """
        request_id, num_tokens = message.request_id, len(message.prompt) // 4
        found = self.forecast.prefixes.send(request_id, self._pieces(message))
        self.forecast.add(request_id, _new_prompt(message, found), now_s, forecast_s)
        if target_ttft_s is not None and not self._has_storage:  # a prompt that storage has needs less time
            self._starts.add(request_id, now_s + target_ttft_s)
        self.queued.num_tokens += num_tokens
        self._waiting[request_id] = _Waiting(num_tokens, now_s, forecast_s, target_ttft_s)

    def admitted(self, request_id: int, num_cached: int, now_s: float) -> None:
        self.forecast.admitted(request_id, num_cached, now_s)
        self._starts.admitted(request_id, now_s)

    def token(self, request_id: int, now_s: float) -> None:
        """Note that a sequence has got a token."""
        self.forecast.token(request_id, now_s)
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._starts.token(request_id, now_s)
        self.queued.num_tokens -= waiting.num_tokens
        if waiting.forecast_s is not None:
            self._metrics.observe_forecast(waiting.forecast_s, now_s - waiting.arrived_s)

    def ended(self, request_id: int, now_s: float) -> None:
        """Note that a sequence is over, however it ended."""
        self.forecast.end(request_id, now_s)
        self._starts.end(request_id)
        if waiting := self._waiting.pop(request_id, None):
            self.queued.num_tokens -= waiting.num_tokens

    # ---- refusals ----

    def refuse_unread(self, least_tokens: int, priority: int, targets: Targets, sender: Sender = ANYBODY) -> None:
        """Refuse a request that cannot meet its targets even if its prompt has as few tokens as its text allows.

        Raises:
            ApiError: 429 that says what is forecast, and what the target is.
        """
        if targets == NO_TARGETS:
            return
        most_cached = least_tokens - 1 if self._has_storage else min(least_tokens - 1, self.forecast.longest_context)
        num_cached = most_cached if self._caches_prefixes else 0
        standing = (priority, targets.ttft_s, sender.flow, sender.weight)
        forecast = self.forecast.of(NewPrompt(least_tokens, num_cached, 0, *standing), time.perf_counter())
        if forecast is not None:
            self._check(forecast, min(forecast.ttft_s, forecast.hopeful_ttft_s), targets, "at least")

    def check(self, message: AddRequest, targets: Targets) -> float | None:
        """Refuse a sequence that cannot meet its targets.

        Return the forecast of its seconds to the first token; `None` if there is none. Of sequences without targets,
        only some have a forecast.

        Raises:
            ApiError: 429 that says what is forecast, and what the target is.
        """
        if targets == NO_TARGETS:
            self._num_without_targets += 1
            if self._num_without_targets % _FORECAST_ONE_OF != 1:
                return None
        found = self.forecast.prefixes.find(self._pieces(message))
        forecast = self.forecast.of(_new_prompt(message, found), time.perf_counter())
        if forecast is None:
            return None
        self._check(forecast, forecast.hopeful_ttft_s, targets, "about")
        return forecast.ttft_s

    def too_late(self, now_s: float) -> list[int]:
        """Return the sequences that have not begun and can no longer meet their targets, each of them once."""
        return self._starts.passed(now_s)

    def refuse_waiting(self, request_id: int, now_s: float) -> ApiError:
        """Return the refusal of a sequence that is `too_late`."""
        waiting, work = self._waiting[request_id], self.forecast.work_of(request_id)
        assert waiting.target_ttft_s is not None
        assert work is not None, "a request that is too late has a forecast"
        self.forecast.miss(request_id, now_s)
        least_s = max(now_s + work.computing_s - waiting.arrived_s, waiting.target_ttft_s)
        takes = f"about {least_s:.3g} s to the first token"
        return self._too_late("target_ttft", takes, waiting.target_ttft_s, self.queued.retry_after_s())

    def check_queue(self) -> None:
        """Raise `ApiError` 429 if too many prompt tokens wait."""
        if self.queued.is_full:
            num_tokens, most = self.queued.num_tokens, self.queued.max_tokens
            raise self.busy("max_num_queued_tokens", f"has {num_tokens} of at most {most} prompt tokens waiting")

    def busy(self, limit: str, reason: str) -> ApiError:
        """Return the refusal of a request that met `limit`; `reason` completes "model 'x' …"."""
        self._metrics.count_refused(limit)
        message = f"model '{self._model}' {reason} ({limit})"
        return ApiError(429, message, code="queue_full", retry_after_s=self.queued.retry_after_s())

    def _check(self, forecast: Forecast, ttft_s: float, targets: Targets, about: str) -> None:
        if targets.ttft_s is not None and ttft_s > targets.ttft_s:
            retry_s = MAX_RETRY_S if forecast.alone_ttft_s > targets.ttft_s else ttft_s - targets.ttft_s
            takes = f"{about} {ttft_s:.3g} s to the first token"
            raise self._too_late("target_ttft", takes, targets.ttft_s, retry_s)
        if targets.tpot_s is not None and forecast.tpot_s > targets.tpot_s:
            wait_s = forecast.answer_s * (1 - targets.tpot_s / forecast.tpot_s)
            retry_s = MAX_RETRY_S if forecast.alone_tpot_s > targets.tpot_s else wait_s
            raise self._too_late("target_tpot", f"at least {forecast.tpot_s:.3g} s per token", targets.tpot_s, retry_s)

    def _too_late(self, target: str, takes: str, wanted_s: float, retry_after_s: float) -> ApiError:
        self._metrics.count_refused(target)
        return ApiError(
            429,
            f"model '{self._model}' would take {takes}; the target is {wanted_s:.3g} s ({target})",
            code=f"predicted_{target.removeprefix('target_')}",
            retry_after_s=min(max(_LEAST_RETRY_S, retry_after_s), MAX_RETRY_S),
        )

    def _pieces(self, message: AddRequest) -> list[bytes]:
        """Return the keys of a prompt's beginnings. The last prompt's are kept, because `n` sequences share one."""
        prompt, salt, pieces = self._last_prompt
        if message.prompt is not prompt or message.cache_salt != salt:
            pieces = self.forecast.prefixes.pieces(message.prompt, message.cache_salt)
            self._last_prompt = message.prompt, message.cache_salt, pieces
        return pieces


def _new_prompt(message: AddRequest, found: Found) -> NewPrompt:
    if message.sampling.prompt_logprobs is not None:  # all of it is computed
        found = Found()
    standing = (message.priority, message.target_ttft_s, message.flow, message.flow_weight)
    max_tokens = message.sampling.max_tokens
    return NewPrompt(len(message.prompt) // 4, found.num_cached, found.num_coming, *standing, max_tokens=max_tokens)
