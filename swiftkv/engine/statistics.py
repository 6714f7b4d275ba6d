"""The figures that an engine reports about itself, added up from its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from swiftkv._core import GroupStats, Scheduler
from swiftkv.engine.messages import DURATION_BOUNDS_S, STEP_TOKENS_BOUNDS, EngineConfig, EngineStats
from swiftkv.engine.pins import Pins
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.tier import Tier
from swiftkv.engine.turns import Turns
from swiftkv.histogram import Histogram
from swiftkv.lease.messages import GroupBlocks


class EngineStatistics:
    """Counts steps, and asks the scheduler and the layer stream for the rest."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, tier: Tier, turns: Turns, pins: Pins
    ) -> None:
        self._block_size = config.block_size
        self._runner = runner
        self._scheduler = scheduler
        self._tier = tier
        self._turns = turns
        self._pins = pins
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._hit_tokens_total = 0
        self._peer_hit_tokens_total = 0
        self._load, self._store, self._exposed = (Histogram(DURATION_BOUNDS_S) for _ in range(3))
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)

    def count_step(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        self._steps_total += 1
        self._prompt_tokens_total += num_prompt_tokens
        self._generation_tokens_total += num_generated_tokens
        self._step_tokens.add(num_prompt_tokens + num_generated_tokens)

    def count_hits(self, num_tokens: int, in_peers: int) -> None:
        """Count the cached tokens that a request began with, or found later.

        The totals agree with what clients are told. The scheduler's own totals do not: it counts hits when it plans a
        step, before the tiers below count theirs, and it counts a block that was loaded and then moved to a peer as the
        peer's.
        """
        self._hit_tokens_total += num_tokens
        self._peer_hit_tokens_total += in_peers

    def now(self) -> EngineStats:
        stats = self._scheduler.stats()
        step_time = self._scheduler.step_time()
        streams = self._runner.layer_stream is not None
        self._count_streamed()
        graphs = self._runner.decode_graphs
        num_local = sum(group.used + group.cached for group in stats.groups)
        num_borrowed = sum(group.borrowed_used + group.borrowed_cached for group in stats.groups)
        num_in_host = sum(group.host_used + group.host_cached for group in stats.groups)
        count = partial(_count_blocks, stats.groups)
        num_blocks = _pool_blocks(stats.groups)
        num_taken = count(lambda group: group.total - group.elsewhere - group.free)
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks - num_taken,
            num_used_blocks=count(lambda group: group.used),
            num_cached_blocks=count(lambda group: group.cached),
            num_preemptions_total=stats.num_preemptions_total,
            num_displaced_total=stats.num_displaced_total,
            drafts_total=stats.drafts_total,
            draft_tokens_total=stats.draft_tokens_total,
            accepted_draft_tokens_total=stats.accepted_draft_tokens_total,
            prefix_query_tokens_total=stats.prefix_query_tokens_total,
            prefix_hit_tokens_total=self._hit_tokens_total,
            steps_total=self._steps_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            prefix_hit_tokens_peer_total=self._peer_hit_tokens_total,
            window_missed_tokens_total=stats.window_missed_tokens_total,
            kv_tokens_local=num_local * self._block_size // len(stats.groups),
            kv_tokens_peer=num_borrowed * self._block_size // len(stats.groups),
            kv_tokens_host=num_in_host * self._block_size // len(stats.groups),
            layer_stream_load=self._load if streams else None,
            layer_stream_store=self._store if streams else None,
            layer_stream_exposed=self._exposed if streams else None,
            cuda_graph_hits_total=None if graphs is None else graphs.hits_total,
            cuda_graph_misses_total=None if graphs is None else graphs.misses_total,
            step_time_error_ratio=stats.step_time_error_ratio,
            step_time_s=step_time.coefficients if step_time.is_known else [],
            usual_step_time_s=step_time.usual_coefficients if step_time.is_known else [],
            usual_token_ratios=step_time.usual_token_ratios if step_time.is_known else [],
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            compute=self._turns.stats(),
            expert_load_factors=self._runner.expert_loads.factors(),
            tier=self._tier.stats(),
            groups=[msgspec.convert(group, GroupBlocks, from_attributes=True) for group in stats.groups],
            pins=self._pins.views(),
            step_tokens=self._step_tokens,
        )

    def _count_streamed(self) -> None:
        if self._runner.layer_stream is None:
            return
        recent = self._runner.layer_stream.recent
        while recent:
            step = recent.popleft()
            self._load.add(step.load_s)
            self._store.add(step.store_s)
            self._exposed.add(step.exposed_s)


def _shares_extents(groups: Sequence[GroupStats]) -> bool:
    """Return whether KV groups share extents, so that no two of them can have all blocks."""
    return any(group.elsewhere for group in groups)


def _pool_blocks(groups: Sequence[GroupStats]) -> int:
    """Return the number of blocks in the pool. If groups share extents, count the pool in its smallest blocks."""
    return max(group.total for group in groups) if _shares_extents(groups) else sum(group.total for group in groups)


def _count_blocks(groups: Sequence[GroupStats], of_group: Callable[[GroupStats], int]) -> int:
    """Add up blocks of all groups. If groups share extents, a large block counts as the small blocks it takes up."""
    if not _shares_extents(groups):
        return sum(map(of_group, groups))
    return sum(of_group(group) * _pool_blocks(groups) // group.total for group in groups)
