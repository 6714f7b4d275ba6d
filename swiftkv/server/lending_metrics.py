"""The metrics of lending, as coordinators last reported them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from swiftkv.histogram import Histogram
from swiftkv.lease.messages import LendingState, LinkState
from swiftkv.server.model_collector import ModelCollector


class LendingMetrics(ModelCollector[LendingState]):
    """Lending as coordinators count it: one that is restarted begins anew, and one that is silent has no metrics."""

    def observe(self, model: str, known: LendingState | None) -> None:
        """Keep the answer of a model's coordinator; `None` if none came."""
        if known is None:
            self.forget(model)
        else:
            super().observe(model, known)

    def collect(self) -> Iterable[Metric]:
        lent = GaugeMetricFamily(
            "swiftkv:lent_bytes", "Bytes of the model's pool that are lent", labels=("model_name", "lender", "borrower")
        )
        borrowed = GaugeMetricFamily(
            "swiftkv:borrowed_bytes",
            "Bytes of other pools that the model borrows",
            labels=("model_name", "lender", "borrower"),
        )
        budget = GaugeMetricFamily(
            "swiftkv:lending_budget_bytes", "The most bytes that the model may lend", labels=("model_name",)
        )
        recalls = CounterMetricFamily(
            "swiftkv:recalls", "Recalls of extents, by reason", labels=("model_name", "reason")
        )
        durations = HistogramMetricFamily(
            "swiftkv:recall_seconds", "From a recall until its extents are back", labels=("model_name",)
        )
        dropped = CounterMetricFamily(
            "swiftkv:lease_messages_dropped", "Malformed lease messages, which were dropped", labels=("model_name",)
        )
        for model, state in self._by_model.items():
            dropped.add_metric((model,), state.messages_dropped_total)
            for peer, num_bytes in _by_peer(state.lends):
                lent.add_metric((model, model, peer), num_bytes)
            for peer, num_bytes in _by_peer(state.borrows):
                borrowed.add_metric((model, peer, model), num_bytes)
            if state.lends:
                budget.add_metric((model,), state.budget_bytes)
                add_histogram(durations, (model,), state.recall_seconds)
            for reason, total in state.recalls_total.items():
                recalls.add_metric((model, reason), total)
        return lent, borrowed, budget, recalls, durations, dropped


def _by_peer(links: Iterable[LinkState]) -> Iterator[tuple[str, int]]:
    totals: dict[str, int] = {}
    for link in links:
        totals[link.peer] = totals.get(link.peer, 0) + link.num_bytes
    yield from totals.items()


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = (*map(str, histogram.bounds), "+Inf")
    family.add_metric(labels, list(zip(bounds, histogram.cumulative(), strict=True)), histogram.total)
