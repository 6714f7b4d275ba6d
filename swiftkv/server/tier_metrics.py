"""The metrics of storage tiers, as engines last reported them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftkv.tier.messages import TierStats

_GAUGES = {
    "degraded": ("1 while the storage is left alone, because it failed or was slow too often", "is_degraded"),
    "queue_bytes": ("Bytes on their way to storage", "queue_bytes"),
    "blocks_to_store": ("Blocks that wait to be written", "num_to_store"),
    "requests_loading": ("Requests that wait for storage", "num_loading"),
}
_COUNTERS = {
    "hit_tokens": ("Prompt tokens whose KV came from storage, and was used", "hit_tokens_total"),
    "loads": ("Prompts for which something was read", "loads_total"),
    "loads_late": ("Prompts that did not wait for storage to the end", "loads_late_total"),
    "loads_declined": ("Prompts that were computed because storage was expected to be slower", "loads_declined_total"),
    "loaded_blocks": ("Blocks read from storage", "loaded_blocks_total"),
    "loaded_bytes": ("Bytes read from storage", "loaded_bytes_total"),
    "stored_blocks": ("Blocks written to storage", "stored_blocks_total"),
    "stored_bytes": ("Bytes written to storage", "stored_bytes_total"),
    "dropped_stores": ("Blocks that left the pool before they could be written", "dropped_stores_total"),
}


class TierMetrics(Collector):
    """Counts from the start of each engine: a restarted engine begins anew, as Prometheus expects of counters."""

    def __init__(self) -> None:
        self._stats: dict[str, TierStats] = {}

    def observe(self, model: str, stats: TierStats | None) -> None:
        if stats is not None:
            self._stats[model] = stats

    def collect(self) -> Iterable[Metric]:
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"swiftkv:tier_{name}", text, labels=("model_name", "tier"))
            for model, stats in self._stats.items():
                gauge.add_metric((model, "storage"), float(getattr(stats, field)))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"swiftkv:tier_{name}", text, labels=("model_name", "tier"))
            for model, stats in self._stats.items():
                counter.add_metric((model, "storage"), float(getattr(stats, field)))
            yield counter
        failures = CounterMetricFamily(
            "swiftkv:tier_failures",
            "Blocks that were not read or written, by what was tried and what came of it",
            labels=("model_name", "tier", "operation", "status"),
        )
        for model, stats in self._stats.items():
            for what, count in stats.failures_total.items():
                operation, _, status = what.partition(" ")
                failures.add_metric((model, "storage", operation, status), float(count))
        yield failures
