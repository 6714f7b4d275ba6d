"""A door of a simulated engine that uses a gateway's forecasts."""

from __future__ import annotations

from swiftkv._core import StepTime
from swiftkv.bench.traces import Arrival
from swiftkv.server.forecast import EngineForecast, Forecast, ForecastLimits, NewPrompt
from swiftkv.server.last_starts import LastStarts
from swiftkv.simulate.doors import OpenDoor, Target


class ForecastingDoor(OpenDoor):
    """Forecasts each request's first token as a gateway does, and refuses requests whose first token would be late.

    Attributes:
        forecasts: The forecasts, by request.
        refused_waiting: The requests that were let in, and waited until it was too late to begin.
    """

    def __init__(
        self,
        limits: ForecastLimits,
        step_time: StepTime,
        pool_tokens: int,
        *,
        target_ttft_s: Target | None = None,
        refuses: bool = True,
    ) -> None:
        """Without `refuses`, forecast but let every request in."""
        super().__init__(target_ttft_s)
        self.forecasts: dict[int, Forecast] = {}
        self._forecast = EngineForecast(limits)
        self._forecast.pool_tokens = self._forecast.prefixes.max_tokens = pool_tokens
        self._forecast.learn(step_time.coefficients)
        self._starts = LastStarts(self._forecast)
        self.refused_waiting: set[int] = set()
        self._refuses = refuses

    def lets_in(self, request_id: int, arrival: Arrival, now_s: float) -> bool:
        target_s = self.target_ttft_s(arrival)
        prefixes = self._forecast.prefixes
        pieces = prefixes.pieces(arrival.prompt().astype("<i4").tobytes(), "")
        found = prefixes.find(pieces)
        new = NewPrompt(arrival.input_tokens, found.num_cached, found.num_coming, due_s=target_s, flow=arrival.flow)
        forecast = self.forecasts[request_id] = self.forecast_of(request_id, new, now_s)
        if self._refuses and forecast.hopeful_ttft_s > target_s:
            return False
        self._forecast.add(request_id, new, now_s, forecast.ttft_s)
        self._starts.add(request_id, now_s + target_s)
        prefixes.send(request_id, pieces)
        return True

    def forecast_of(self, request_id: int, new: NewPrompt, now_s: float) -> Forecast:
        forecast = self._forecast.of(new, now_s)
        assert forecast is not None, "the times of steps are known"
        return forecast

    def begun(self, request_id: int, num_cached: int, now_s: float) -> None:
        self._forecast.admitted(request_id, num_cached, now_s)
        self._starts.admitted(request_id, now_s)

    def token(self, request_id: int, now_s: float) -> None:
        self._forecast.token(request_id, now_s)
        self._starts.token(request_id, now_s)

    def ended(self, request_id: int, now_s: float) -> None:
        self._forecast.end(request_id, now_s)
        self._starts.end(request_id)

    def dropped(self, now_s: float) -> list[int]:
        passed = self._starts.passed(now_s)
        self.refused_waiting.update(passed)
        if not self._refuses:
            return []
        for request_id in passed:
            self._forecast.miss(request_id, now_s)
            self.ended(request_id, now_s)
        return passed
