"""A door of a simulated engine that goes by the forecasts of a gateway."""

from __future__ import annotations

from swiftkv._core import StepTime
from swiftkv.bench.traces import Arrival
from swiftkv.server.forecast import EngineForecast, Forecast, ForecastLimits, NewPrompt
from swiftkv.server.sent_prefixes import SentPrefixes
from swiftkv.simulate.doors import OpenDoor, Target


class ForecastingDoor(OpenDoor):
    """Forecasts each request's first token as a gateway does, and refuses those that it would come too late for.

    Attributes:
        forecasts: The forecasts, by request.
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
        """Without `refuses`, only forecast."""
        super().__init__(target_ttft_s)
        self.forecasts: dict[int, Forecast] = {}
        self._forecast = EngineForecast(limits)
        self._forecast.pool_tokens = pool_tokens
        self._forecast.learn(step_time.coefficients)
        self._sent = SentPrefixes()
        self._sent.max_tokens = pool_tokens
        self._refuses = refuses

    def lets_in(self, request_id: int, arrival: Arrival, now_s: float) -> bool:
        target_s = self.target_ttft_s(arrival)
        pieces = self._sent.pieces(arrival.prompt().astype("<i4").tobytes(), "")
        num_cached = min(self._sent.num_known(pieces), arrival.input_tokens - 1)
        new = NewPrompt(arrival.input_tokens, num_cached, due_s=target_s, flow=arrival.flow)
        forecast = self._forecast.of(new, now_s)
        assert forecast is not None, "the times of steps are known"
        self.forecasts[request_id] = forecast
        if self._refuses and forecast.cautious_ttft_s > target_s:
            return False
        self._forecast.add(request_id, new, now_s, forecast.ttft_s)
        self._sent.add(pieces)
        return True

    def begun(self, request_id: int, num_cached: int, now_s: float) -> None:
        self._forecast.admitted(request_id, num_cached, now_s)

    def token(self, request_id: int, now_s: float) -> None:
        self._forecast.token(request_id, now_s)

    def ended(self, request_id: int, now_s: float) -> None:
        self._forecast.end(request_id, now_s)
