"""Prometheus metrics under vLLM's names, one label set per model, so that dashboards made for vLLM work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftkv.engine.messages import HIT_TIERS, STEP_TIME_TERMS, EngineStats, Ready
from swiftkv.policies import ServiceTier
from swiftkv.server.block_metrics import BlockMetrics
from swiftkv.server.compute_metrics import ComputeMetrics
from swiftkv.server.engine_state import EngineState
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.lending_metrics import LendingMetrics, add_histogram
from swiftkv.server.limit_metrics import LimitMetrics
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metric_filters import SomeModels
from swiftkv.server.node_views import EngineView, Latency
from swiftkv.server.scrape import ScrapePace
from swiftkv.server.tenant_metrics import TenantMetrics
from swiftkv.server.tier_metrics import TierMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISHED_REASONS = ("stop", "length", "abort", "error")
LOCAL_TIER, PEER_TIER = "local", "peer"
_SERVICE_TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_RATIOS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 5, 10)
_TOKENS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))


class GatewayMetrics:
    """The metrics of every model behind one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.scrape_pace = ScrapePace()
        self._hidden: set[str] = set()
        self.num_requests_running = self._gauge("vllm:num_requests_running", "Requests in the running batch")
        self.num_requests_waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled")
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1")
        self.engine_up = self._gauge("swiftkv:engine_up", "1 while the model's engine serves")
        self.engine_starts = self._counter("swiftkv:engine_starts", "Times that the model's engine came up")
        self.engine_restarts = self._counter(
            "swiftkv:engine_restarts", "Times that the model's engine ended and was started again", ("reason",)
        )
        self.engines = _EngineStates()
        self.registry.register(self.engines)
        self.preemptions = self._counter("vllm:num_preemptions", "Requests preempted and recomputed")
        self.displaced = self._counter(
            "swiftkv:requests_displaced",
            "Requests preempted so that one of a higher service tier could begin, by their own tier",
            ("service_tier",),
        )
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.window_missed = self._counter(
            "swiftkv:window_missed_tokens",
            "Prompt tokens behind a hit that were known, but the sliding-window KV before their end was gone",
        )
        self.prefix_tier_hits = self._counter(
            "swiftkv:prefix_hit_tokens", "Prompt tokens found in the prefix cache, by where their KV lay", ("tier",)
        )
        self.kv_tier_tokens = self._gauge(
            "swiftkv:kv_tier_tokens", "Tokens whose KV is held, in use or cached, by where it lies", ("tier",)
        )
        self.graph_hits = self._counter("swiftkv:cuda_graph_hits", "Decode steps that a CUDA graph held")
        self.graph_misses = self._counter("swiftkv:cuda_graph_misses", "Decode steps on a GPU that no CUDA graph held")
        self.expert_load = self._gauge(
            "swiftkv:expert_load_factor",
            "Mean over maximum of tokens per expert, as last reported; 1 is even. Not counted on GPUs",
            ("layer",),
        )
        self.step_time_error = self._gauge(
            "swiftkv:step_time_error_ratio",
            "Mean of |predicted - measured| / measured time over recent steps; 0 before any was predicted",
        )
        self.prefill_rate = self._gauge(
            "swiftkv:prefill_tokens_per_second", "How fast the engine expects to compute prompts beside what runs now"
        )
        self.requests_refused = self._counter(
            "swiftkv:requests_refused", "Requests that the model had no room for, by the limit they met", ("limit",)
        )
        self.step_time = self._gauge(
            "swiftkv:step_time_seconds", "Seconds of a step for each of what it depends on, as fitted", ("term",)
        )
        self.batch_lines = self._counter(
            "swiftkv:batch_lines", "Lines of batches that have run, by what became of them", ("outcome",)
        )
        self.batch_sequences = self._gauge("swiftkv:batch_sequences_running", "Sequences of batches in the engine")
        self.layer_stream, self.cache_configs = _LayerStream(), _CacheConfigs()
        self.blocks, self.tiers = BlockMetrics(), TierMetrics()
        self.compute, self.lending = ComputeMetrics(), LendingMetrics()
        of_engines = (self.layer_stream, self.cache_configs, self.blocks, self.tiers, self.compute, self.lending)
        for collector in of_engines:
            self.registry.register(collector)
        self.tenants = TenantMetrics(_FIRST_TOKEN_S)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self.request_success = self._counter("vllm:request_success", "Requests finished", ("finished_reason",))
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S
        )
        self.forecast_ratio = self._histogram(
            "swiftkv:time_to_first_token_forecast_ratio",
            "Time to the first token as forecast on arrival, in relation to what it was",
            _RATIOS,
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request", _SHORT_S
        )
        # vLLM's older name for the same, which dashboards still use.
        self.time_per_output_token = self._histogram(
            "vllm:time_per_output_token_seconds", "Between two tokens of a request", _SHORT_S
        )
        self.request_time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first", _SHORT_S
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token", _REQUEST_S
        )
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "From arrival to admission", _REQUEST_S)
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From admission to the first token", _REQUEST_S
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", _REQUEST_S
        )
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt length", _TOKENS)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", "Tokens generated", _TOKENS)
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens asked for", _TOKENS)
        self.request_n = self._histogram("vllm:request_params_n", "n asked for", (1, 2, 5, 10, 20, 50, 100))

    def watch(self, limits: NodeLimits) -> None:
        """Tell also how much of these limits is in use."""
        self.registry.register(LimitMetrics(limits))

    def for_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(self, name)

    def render(self, only_model: str | None = None) -> bytes:
        """Return the text that Prometheus scrapes, for every model or for one; nothing in it is about tenants."""
        return self._render(self.registry, only_model)

    def render_tenants(self, only_model: str | None = None) -> bytes:
        """Return the rest of that text, which names the node's tenants."""
        return self._render(self.tenants.registry, only_model)

    def hide_model(self, name: str) -> None:
        """Leave out a model that was removed. Its counters go on if one of the same name is added."""
        self._hidden.add(name)

    def show_model(self, name: str) -> None:
        self._hidden.discard(name)

    def _render(self, registry: CollectorRegistry, only_model: str | None) -> bytes:
        if only_model is None and not self._hidden:
            return generate_latest(registry)
        some = CollectorRegistry()
        hidden = self._hidden
        some.register(SomeModels(registry, lambda m: m not in hidden if only_model is None else m == only_model))
        return generate_latest(some)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, ("model_name", *labels), registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)


class ModelMetrics:
    """The metrics of one model. Only the model's engine client calls its methods."""

    def __init__(self, metrics: GatewayMetrics, name: str) -> None:
        self.num_requests_running = metrics.num_requests_running.labels(name)
        self.num_requests_waiting = metrics.num_requests_waiting.labels(name)
        self.kv_cache_usage = metrics.kv_cache_usage.labels(name)
        self.engine_up = metrics.engine_up.labels(name)
        self.engine_starts = metrics.engine_starts.labels(name)
        self.prompt_tokens = metrics.prompt_tokens.labels(name)
        self.generation_tokens = metrics.generation_tokens.labels(name)
        self.first_token = Latency()
        self.between_tokens = Latency()
        self._time_to_first_token = metrics.time_to_first_token.labels(name)
        self._forecast_ratio = metrics.forecast_ratio.labels(name)
        self._inter_token_latency = metrics.inter_token_latency.labels(name)
        self.request_n = metrics.request_n.labels(name)
        self._time_per_output_token = metrics.time_per_output_token.labels(name)
        self._request_time_per_output_token = metrics.request_time_per_output_token.labels(name)
        self._e2e_latency = metrics.e2e_latency.labels(name)
        self._queue_time = metrics.queue_time.labels(name)
        self._prefill_time = metrics.prefill_time.labels(name)
        self._decode_time = metrics.decode_time.labels(name)
        self._request_prompt_tokens = metrics.request_prompt_tokens.labels(name)
        self._request_generation_tokens = metrics.request_generation_tokens.labels(name)
        self._request_max_tokens = metrics.request_max_tokens.labels(name)
        self._success = {reason: metrics.request_success.labels(name, reason) for reason in FINISHED_REASONS}
        self._kv_tokens = {tier: metrics.kv_tier_tokens.labels(name, tier) for tier in (LOCAL_TIER, PEER_TIER)}
        self._name = name
        self._expert_load = metrics.expert_load
        self._step_time = metrics.step_time
        self._step_time_error = metrics.step_time_error.labels(name)
        self._prefill_rate = metrics.prefill_rate.labels(name)
        self._refused = metrics.requests_refused
        self._layer_stream = metrics.layer_stream
        self._cache_configs = metrics.cache_configs
        self._blocks = metrics.blocks
        self._tiers = metrics.tiers
        self._tenants = metrics.tenants
        self._compute = metrics.compute
        self._restarts = metrics.engine_restarts
        # The engine reports totals since it started; a restarted engine counts from zero again.
        self._engine_totals = dict.fromkeys(
            (
                metrics.preemptions.labels(name),
                *(metrics.displaced.labels(name, tier) for tier in _SERVICE_TIERS),
                metrics.prefix_queries.labels(name),
                metrics.prefix_hits.labels(name),
                *(metrics.prefix_tier_hits.labels(name, tier) for tier in HIT_TIERS),
                metrics.window_missed.labels(name),
                metrics.graph_hits.labels(name),
                metrics.graph_misses.labels(name),
            ),
            0,
        )

    def observe_engine(self, stats: EngineStats) -> None:
        """Take over the figures that the engine reports about itself."""
        self.num_requests_running.set(stats.num_running)
        self.num_requests_waiting.set(stats.num_waiting)
        self.kv_cache_usage.set(stats.num_used_blocks / max(1, stats.num_blocks))
        self._kv_tokens[LOCAL_TIER].set(stats.kv_tokens_local)
        self._kv_tokens[PEER_TIER].set(stats.kv_tokens_peer)
        for layer, factor in stats.expert_load_factors.items():
            self._expert_load.labels(self._name, str(layer)).set(factor)
        self._step_time_error.set(stats.step_time_error_ratio)
        for term, seconds in zip(STEP_TIME_TERMS, stats.step_time_s, strict=False):
            self._step_time.labels(self._name, term).set(seconds)
        self._prefill_rate.set(stats.prefill_tokens_per_s or 0.0)
        self._layer_stream.observe(self._name, stats)
        self._blocks.observe(self._name, stats.groups)
        self._tiers.observe(self._name, stats.tier)
        self._compute.observe(self._name, stats.compute)
        hits = stats.hit_tokens_by_tier()
        totals = (
            stats.num_preemptions_total,
            *(stats.num_displaced_total or [0] * len(_SERVICE_TIERS)),
            stats.prefix_query_tokens_total,
            stats.prefix_hit_tokens_total,
            *(hits[tier] for tier in HIT_TIERS),
            stats.window_missed_tokens_total,
            stats.cuda_graph_hits_total or 0,
            stats.cuda_graph_misses_total or 0,
        )
        for (counter, seen), total in zip(self._engine_totals.items(), totals, strict=True):
            if total != seen:
                counter.inc(max(0, total - seen))
                self._engine_totals[counter] = total

    def observe_first_token(self, latency_s: float) -> None:
        self.first_token.add(latency_s)
        self._time_to_first_token.observe(latency_s)

    def observe_forecast(self, foretold_s: float, latency_s: float) -> None:
        """Note when a first token came that was foretold."""
        self._forecast_ratio.observe(foretold_s / max(latency_s, 1e-6))

    def observe_inter_token_latency(self, latency_s: float) -> None:
        self.between_tokens.add(latency_s)
        self._inter_token_latency.observe(latency_s)
        self._time_per_output_token.observe(latency_s)

    def engine_came_up(self, ready: Ready) -> None:
        self.engine_up.set(1)
        self._cache_configs.observe(self._name, ready)
        self.engine_starts.inc()
        self._engine_totals = dict.fromkeys(self._engine_totals, 0)

    def count_refused(self, limit: str) -> None:
        self._refused.labels(self._name, limit).inc()

    def engine_restarts(self, reason: str) -> None:
        self._restarts.labels(self._name, reason).inc()

    def engine_went_down(self) -> None:
        running = (self.engine_up, self.num_requests_running, self.num_requests_waiting, self.kv_cache_usage)
        for gauge in (*running, *self._kv_tokens.values()):
            gauge.set(0)
        self._blocks.observe(self._name, ())

    def observe_finished(self, request: FinishedRequest) -> None:
        self._success[request.reason].inc()
        self._tenants.observe(self._name, request)
        self._e2e_latency.observe(request.e2e_s)
        self._request_prompt_tokens.observe(request.prompt_tokens)
        self._request_generation_tokens.observe(request.generation_tokens)
        self._request_max_tokens.observe(request.max_tokens)
        if request.queue_s is not None:
            self._queue_time.observe(request.queue_s)
        if request.first_token_s is None:
            return
        decode_s = request.e2e_s - request.first_token_s
        self._decode_time.observe(decode_s)
        self._prefill_time.observe(request.first_token_s - (request.queue_s or 0))
        if request.generation_tokens > 1:
            self._request_time_per_output_token.observe(decode_s / (request.generation_tokens - 1))


class _LayerStream(Collector):
    """Histograms that engines keep, as last reported; those of a restarted engine begin anew."""

    def __init__(self) -> None:
        self._stats: dict[str, EngineStats] = {}

    def observe(self, model: str, stats: EngineStats) -> None:
        self._stats[model] = stats

    def collect(self) -> Iterable[Metric]:
        load, store, exposed = (
            HistogramMetricFamily(f"swiftkv:layer_stream_{name}_seconds", text, labels=("model_name",))
            for name, text in (
                ("load", "Time of copies from lenders, per step that streams"),
                ("store", "Time of copies to lenders, per step that streams"),
                ("exposed", "Time of both that no computing hid, per step that streams"),
            )
        )
        for model, stats in self._stats.items():
            for family, durations in (
                (load, stats.layer_stream_load),
                (store, stats.layer_stream_store),
                (exposed, stats.layer_stream_exposed),
            ):
                if durations is not None:
                    add_histogram(family, model, durations)
        return load, store, exposed


class _CacheConfigs(Collector):
    """The block sizes and pools of engines, as vLLM shows them, for routers that count in blocks."""

    def __init__(self) -> None:
        self._ready: dict[str, Ready] = {}

    def observe(self, model: str, ready: Ready) -> None:
        self._ready[model] = ready

    def collect(self) -> Iterable[Metric]:
        labels = ("model_name", "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Tokens per block, and blocks for whole sequences, wherever they lie",
            labels=labels,
        )
        for model, ready in self._ready.items():
            info.add_metric((model, str(ready.block_size), str(ready.num_blocks)), 1)
        return [info]


class _EngineStates(Collector):
    """The state of every engine at the last scrape."""

    def __init__(self) -> None:
        self._views: dict[str, EngineView] = {}

    def observe(self, views: Mapping[str, EngineView]) -> None:
        self._views.update(views)

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "swiftkv:engine_state", "1 for the state that the model's engine is in", labels=("model_name", "state")
        )
        ages = GaugeMetricFamily(
            "swiftkv:engine_progress_age_seconds", "Time since the engine last showed progress", labels=("model_name",)
        )
        for model, view in self._views.items():
            for state in EngineState:
                states.add_metric((model, state), float(view.state == state))
            if view.progress_age_s is not None:
                ages.add_metric((model,), view.progress_age_s)
        return states, ages
