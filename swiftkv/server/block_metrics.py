"""The blocks of engines' pools, by KV group and state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from swiftkv.lease.messages import GroupBlocks
from swiftkv.server.model_collector import ModelCollector

STATES = ("free", "used", "cached", "lent", "in_flight", "staging", "loading", "elsewhere")


class BlockMetrics(ModelCollector[Sequence[GroupBlocks]]):
    """Gauges of engines' blocks, as last reported; an engine that is down has none."""

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily(
            "swiftkv:kv_blocks",
            "Blocks in the engine's own pool by KV group and state; those elsewhere are in memory of other groups",
            labels=("model_name", "group", "state"),
        )
        for model, groups in self._by_model.items():
            for number, group in enumerate(groups):
                for state in STATES:
                    blocks.add_metric((model, str(number), state), getattr(group, state))
        pinned = GaugeMetricFamily(
            "swiftkv:kv_blocks_pinned",
            "Blocks in use that pins keep, by KV group",
            labels=("model_name", "group"),
        )
        for model, groups in self._by_model.items():
            for number, group in enumerate(groups):
                pinned.add_metric((model, str(number)), group.pinned)
        return [blocks, pinned]
