"""The view of the whole node for its page and for `swiftkv top`."""

from __future__ import annotations

import time

import msgspec

from swiftkv import __version__
from swiftkv.engine.messages import EngineStats
from swiftkv.server.lending import NodeLending
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.node_views import (
    Figures,
    LendingOverview,
    ModelLending,
    ModelOverview,
    NodeOverview,
)
from swiftkv.server.scrape import ScrapePace, Scrapes

_PART_OF_TIME = 0.02
_INTERVAL_S = 0.25
"""The least time between two views, however many clients watch."""


class Overviews:
    """Makes views of the node. Each serves all requests that came before it began."""

    def __init__(self, models: ModelTable, lending: NodeLending) -> None:
        self._models = models
        self._lending = lending
        self._lent: LendingOverview | None = None
        self._scrapes = Scrapes(self._observe, self._render, ScrapePace(_PART_OF_TIME, _INTERVAL_S))

    async def latest(self) -> bytes:
        """Return a `NodeOverview` of some moment after this call, as JSON."""
        return await self._scrapes.text()

    async def _observe(self) -> None:
        self._lent = await self._lending.overview()

    def _render(self) -> list[bytes]:
        lent = self._lent
        assert lent is not None
        lending = {model.model: model for model in lent.models}
        models = [_view(model, lending[model.name]) for model in self._models.all() if model.name in lending]
        view = NodeOverview(__version__, time.monotonic(), lent.enabled, lent.transport, models)
        return [msgspec.json.encode(view)]


def _view(model: ModelHandle, lending: ModelLending) -> ModelOverview:
    client = model.client
    return ModelOverview(
        model=model.name,
        max_model_len=model.max_model_len,
        engine=client.view(),
        figures=None if client.stats is None else _figures(client.stats),
        first_token=client.metrics.first_token,
        between_tokens=client.metrics.between_tokens,
        lending=lending,
    )


def _figures(stats: EngineStats) -> Figures:
    return Figures(
        running=stats.num_running,
        waiting=stats.num_waiting,
        blocks={"free": stats.num_free_blocks, "used": stats.num_used_blocks, "cached": stats.num_cached_blocks},
        prompt_tokens_total=stats.prompt_tokens_total,
        generation_tokens_total=stats.generation_tokens_total,
        prefix_query_tokens_total=stats.prefix_query_tokens_total,
        prefix_hit_tokens_total=stats.hit_tokens_by_tier(),
        preemptions_total=stats.num_preemptions_total,
        core_s_total=None if stats.compute is None else stats.compute.core_s_total,
        turn_wait_s_total=None if stats.compute is None else stats.compute.waited_s_total,
    )
