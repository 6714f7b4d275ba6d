"""The metrics of the time that models share, as engines last reported them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from swiftkv.engine.messages import ComputeStats
from swiftkv.server.model_collector import ModelCollector

_COUNTERS = {
    "core_seconds": ("Core time that the model's engine has taken, or time of a GPU that it shares", "core_s_total"),
    "turn_wait_seconds": ("Time that steps have waited while other models had their turn", "waited_s_total"),
}


class ComputeMetrics(ModelCollector[ComputeStats]):
    """Counts from the start of each engine: a restarted engine begins anew, as Prometheus expects of counters."""

    def collect(self) -> Iterable[Metric]:
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"swiftkv:{name}", text, labels=("model_name",))
            for model, stats in self._by_model.items():
                counter.add_metric((model,), getattr(stats, field))
            yield counter
