"""The use of a node's limits, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftkv.server.limits import NodeLimits


class LimitMetrics(Collector):
    """The use of the node's limits at the moment of a scrape, for all models together."""

    def __init__(self, limits: NodeLimits) -> None:
        self._limits = limits

    def collect(self) -> Iterable[Metric]:
        limits = self._limits
        yield GaugeMetricFamily("swiftkv:http_connections", "Connections of clients", limits.num_connections)
        yield GaugeMetricFamily(
            "swiftkv:http_requests_waiting", "Requests that wait to begin", limits.rounds.num_waiting
        )
        yield GaugeMetricFamily("swiftkv:http_body_bytes", "Bytes of request bodies in memory", limits.body_bytes)
        refused = CounterMetricFamily(
            "swiftkv:http_refused", "Connections and bodies refused for lack of room, by limit", labels=("limit",)
        )
        refused.add_metric(("max_connections",), limits.num_refused_connections)
        refused.add_metric(("max_bodies",), limits.num_refused_bodies)
        yield refused
