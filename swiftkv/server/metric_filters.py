"""Parts of the metrics: those of some models, and single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class SomeModels(Collector):
    """The metrics in a registry whose model is wanted; the model of the node's own metrics is `None`."""

    def __init__(self, registry: CollectorRegistry, wanted: Callable[[str | None], bool]) -> None:
        self._registry = registry
        self._wanted = wanted

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if self._wanted(sample.labels.get("model_name"))]
            yield metric


class OneMetric(Collector):
    """A metric that has been collected."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
