"""The metrics of the tiers below the pools, as engines last reported them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftkv.server.model_collector import ModelCollector
from swiftkv.tier.messages import TierStats

_GAUGES = {
    "queue_bytes": ("Bytes on their way to storage", "queue_bytes"),
    "blocks_to_store": ("Blocks that wait to be written", "num_to_store"),
    "requests_loading": ("Requests that wait for storage", "num_loading"),
}
_COUNTERS = {
    "loads": ("Prompts for which something was read", "loads_total"),
    "loads_late": ("Prompts that stopped waiting for storage because it took too long", "loads_late_total"),
    "loads_declined": ("Prompts that were computed because storage was expected to be slower", "loads_declined_total"),
    "loaded_bytes": ("Bytes read from storage", "loaded_bytes_total"),
    "stored_bytes": ("Bytes written to storage", "stored_bytes_total"),
    "dropped_stores": ("Blocks that left the pool before they could be written", "dropped_stores_total"),
}
_LEVEL_COUNTERS = {
    "hit_tokens": ("Prompt tokens whose KV came from this tier, and was used", "hit_tokens_total"),
    "loaded_blocks": ("Blocks read from this tier", "loaded_blocks_total"),
    "stored_blocks": ("Blocks written to this tier", "stored_blocks_total"),
}
_LABELS = ("model_name", "tier")
_ALL_TIERS = "storage"
"""The label of figures that count for all tiers below a pool together."""


class TierMetrics(ModelCollector[TierStats]):
    """Counts from the start of each engine: a restarted engine begins anew, as Prometheus expects of counters."""

    def collect(self) -> Iterable[Metric]:
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"swiftkv:tier_{name}", text, labels=_LABELS)
            for model, stats in self._by_model.items():
                gauge.add_metric((model, _ALL_TIERS), float(getattr(stats, field)))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"swiftkv:tier_{name}", text, labels=_LABELS)
            for model, stats in self._by_model.items():
                counter.add_metric((model, _ALL_TIERS), float(getattr(stats, field)))
            yield counter
        yield from self._collect_levels()

    def _collect_levels(self) -> Iterable[Metric]:
        levels = [(model, level) for model, stats in self._by_model.items() for level in stats.levels]
        degraded = GaugeMetricFamily(
            "swiftkv:tier_degraded",
            "1 while the tier is not used, because it failed or was slow too often, or because a call to it hangs",
            labels=_LABELS,
        )
        for model, level in levels:
            degraded.add_metric((model, level.tier), float(level.is_degraded))
        yield degraded
        for name, (text, field) in _LEVEL_COUNTERS.items():
            counter = CounterMetricFamily(f"swiftkv:tier_{name}", text, labels=_LABELS)
            for model, level in levels:
                counter.add_metric((model, level.tier), float(getattr(level, field)))
            yield counter
        failures = CounterMetricFamily(
            "swiftkv:tier_failures",
            "Blocks that were not read or written, by operation and status",
            labels=(*_LABELS, "operation", "status"),
        )
        for model, level in levels:
            for what, count in level.failures_total.items():
                operation, _, status = what.partition(" ")
                failures.add_metric((model, level.tier, operation, status), float(count))
        yield failures
