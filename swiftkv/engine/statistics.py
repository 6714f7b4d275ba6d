"""The figures that an engine reports about itself, added up from its start."""

from __future__ import annotations

from swiftkv._core import Scheduler
from swiftkv.engine.messages import DURATION_BOUNDS_S, EngineConfig, EngineStats
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine.tier import Tier
from swiftkv.histogram import Histogram


class EngineStatistics:
    """Counts steps, and asks the scheduler and the layer stream for the rest."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, tier: Tier) -> None:
        self._block_size = config.block_size
        self._runner = runner
        self._scheduler = scheduler
        self._tier = tier
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._load, self._store, self._exposed = (Histogram(DURATION_BOUNDS_S) for _ in range(3))

    def count_step(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        self._steps_total += 1
        self._prompt_tokens_total += num_prompt_tokens
        self._generation_tokens_total += num_generated_tokens

    def now(self) -> EngineStats:
        stats = self._scheduler.stats()
        step_time = self._scheduler.step_time()
        streams = self._runner.layer_stream is not None
        self._count_streamed()
        graphs = self._runner.decode_graphs
        num_local = sum(group.used + group.cached for group in stats.groups)
        num_borrowed = sum(group.borrowed_used + group.borrowed_cached for group in stats.groups)
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=sum(group.total for group in stats.groups),
            num_free_blocks=sum(group.free for group in stats.groups),
            num_used_blocks=sum(group.used for group in stats.groups),
            num_cached_blocks=sum(group.cached for group in stats.groups),
            num_preemptions_total=stats.num_preemptions_total,
            prefix_query_tokens_total=stats.prefix_query_tokens_total,
            prefix_hit_tokens_total=stats.prefix_hit_tokens_total,
            steps_total=self._steps_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            prefix_hit_tokens_peer_total=stats.borrowed_hit_tokens_total,
            window_missed_tokens_total=stats.window_missed_tokens_total,
            kv_tokens_local=num_local * self._block_size // len(stats.groups),
            kv_tokens_peer=num_borrowed * self._block_size // len(stats.groups),
            layer_stream_load=self._load if streams else None,
            layer_stream_store=self._store if streams else None,
            layer_stream_exposed=self._exposed if streams else None,
            cuda_graph_hits_total=None if graphs is None else graphs.hits_total,
            cuda_graph_misses_total=None if graphs is None else graphs.misses_total,
            step_time_error_ratio=stats.step_time_error_ratio,
            step_time_s=step_time.coefficients if step_time.is_known else [],
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            expert_load_factors=self._runner.expert_loads.factors(),
            tier=self._tier.stats(),
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
