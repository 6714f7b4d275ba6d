"""Prometheus metrics under vLLM's names, one label set per model, so that dashboards made for vLLM work.

It is one file of more than 400 lines, for it is one list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftkv.engine.messages import HIT_TIERS, STEP_TIME_TERMS, TOKEN_POINTS, EngineStats, Ready
from swiftkv.policies import ServiceTier
from swiftkv.server.block_metrics import BlockMetrics
from swiftkv.server.compute_metrics import ComputeMetrics
from swiftkv.server.engine_state import EndCause, EngineState
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.lending_metrics import LendingMetrics, add_histogram
from swiftkv.server.limit_metrics import LimitMetrics
from swiftkv.server.limits import NodeLimits
from swiftkv.server.metric_filters import OneMetric, SomeModels
from swiftkv.server.metric_tables import (
    COUNTERS,
    FIRST_TOKEN_S,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    label_names,
    label_values,
)
from swiftkv.server.model_collector import ModelCollector
from swiftkv.server.node_views import EngineView, Latency
from swiftkv.server.scrape import ScrapePace
from swiftkv.server.tenant_metrics import TenantMetrics
from swiftkv.server.tier_metrics import TierMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISHED_REASONS = ("stop", "length", "abort", "error")
LOCAL_TIER, PEER_TIER, HOST_TIER = "local", "peer", "host"
MAX_HIDDEN = 16
"""The most removed models whose counters are kept: few models come and go."""
M = TypeVar("M", Gauge, Counter)

_ZERO_WHILE_DOWN = (
    "swiftkv:engine_up",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names for a model that is awake, or asleep at level 1 or 2."""
_COMPUTED = "local_compute"
_SOURCES = {tier: "local_cache_hit" if tier == LOCAL_TIER else "external_kv_transfer" for tier in HIT_TIERS}
"""vLLM's names for where a prompt token came from if it was not computed, by tier."""
_SERVICE_TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)
_END_CAUSES: tuple[EndCause, ...] = get_args(EndCause)


class GatewayMetrics:
    """The metrics of every model behind one gateway, in a registry of their own; those in tables by their names."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.scrape_pace = ScrapePace()
        self._hidden: dict[str, None] = {}  # the models that were removed, in order
        self.gauges = {name: Gauge(name, text, label_names(name), registry=registry) for name, text in GAUGES.items()}
        self.labelled_gauges = {
            name: Gauge(name, text, label_names(name, label), registry=registry)
            for name, (label, text) in LABELLED_GAUGES.items()
        }
        self.counters = {
            name: Counter(name, text, label_names(name), registry=registry) for name, text in COUNTERS.items()
        }
        self.labelled_counters = {
            name: Counter(name, text, label_names(name, label), registry=registry)
            for name, (label, text) in LABELLED_COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(name, text, label_names(name), buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.batch_lines = Counter(
            "swiftkv:batch_lines",
            "Lines of batches that have run, by outcome",
            ("model_name", "outcome"),
            registry=registry,
        )
        self.batch_sequences = Gauge(
            "swiftkv:batch_sequences_running", "Sequences of batches in the engine", ("model_name",), registry=registry
        )
        self.tenants = TenantMetrics(FIRST_TOKEN_S)
        self.engines = _EngineStates()
        self.engine_histograms, self.cache_configs = _EngineHistograms(), _CacheConfigs()
        self.blocks, self.tiers = BlockMetrics(), TierMetrics()
        self.compute, self.lending = ComputeMetrics(), LendingMetrics()
        of_engines = (self.engine_histograms, self.cache_configs, self.blocks, self.tiers, self.compute, self.lending)
        self._collectors = (self.engines, *of_engines)
        for collector in self._collectors:
            registry.register(collector)
        self._labelled = (
            *self.gauges.values(),
            *self.labelled_gauges.values(),
            *self.counters.values(),
            *self.labelled_counters.values(),
            *self.histograms.values(),
            self.batch_lines,
            self.batch_sequences,
        )

    def watch(self, limits: NodeLimits) -> None:
        """Add metrics of how much of these limits is in use."""
        self.registry.register(LimitMetrics(limits))

    def for_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(self, name)

    def render(self, only_model: str | None = None) -> Iterator[bytes]:
        """Yield the text that Prometheus scrapes, for every model or for one; nothing in it is about tenants.

        Each piece is one metric.
        """
        return self._render(self.registry, only_model)

    def render_tenants(self, only_model: str | None = None) -> Iterator[bytes]:
        """Yield the text of the metrics that name the node's tenants, as `render` does."""
        return self._render(self.tenants.registry, only_model)

    def hide_model(self, name: str) -> None:
        """Leave out a model that was removed.

        Its counters go on if a model of the same name is added before `MAX_HIDDEN` others are removed.
        """
        self._hidden.pop(name, None)
        self._hidden[name] = None
        if len(self._hidden) > MAX_HIDDEN:
            self._forget(next(iter(self._hidden)))

    def show_model(self, name: str) -> None:
        self._hidden.pop(name, None)

    def _forget(self, name: str) -> None:
        """Keep nothing of a model that was removed."""
        del self._hidden[name]
        for metric in self._labelled:
            metric.remove_by_labels({"model_name": name})
        for collector in self._collectors:
            collector.forget(name)
        self.tenants.forget(name)

    def _render(self, registry: CollectorRegistry, only_model: str | None) -> Iterator[bytes]:
        source: Collector = registry
        if only_model is not None or self._hidden:
            hidden = self._hidden
            source = SomeModels(registry, lambda m: m not in hidden if only_model is None else m == only_model)
        for metric in source.collect():
            yield generate_latest(OneMetric(metric))


class ModelMetrics:
    """The metrics of one model. Only the model's engine client calls its methods."""

    def __init__(self, metrics: GatewayMetrics, name: str) -> None:
        self.first_token = Latency()
        self.between_tokens = Latency()
        self._name = name
        self._metrics = metrics
        self._gauges = {key: gauge.labels(*label_values(key, name)) for key, gauge in metrics.gauges.items()}
        self._counters = {key: counter.labels(*label_values(key, name)) for key, counter in metrics.counters.items()}
        self._histograms = {
            key: histogram.labels(*label_values(key, name)) for key, histogram in metrics.histograms.items()
        }
        gauges, counters = metrics.labelled_gauges, metrics.labelled_counters
        self._kv_tokens = self._by_label(gauges, "swiftkv:kv_tier_tokens", (LOCAL_TIER, PEER_TIER, HOST_TIER))
        self._prompt_tokens = self._by_label(counters, "vllm:prompt_tokens_by_source", (_COMPUTED, *_SOURCES.values()))
        self._success = self._by_label(counters, "vllm:request_success", FINISHED_REASONS)
        self._displaced = self._by_label(counters, "swiftkv:requests_displaced", _SERVICE_TIERS)
        self._prefix_hits = self._by_label(counters, "swiftkv:prefix_hit_tokens", HIT_TIERS)
        # At zero from the start: `increase` does not see a counter that begins with one.
        self._restarts = self._by_label(counters, "swiftkv:engine_restarts", _END_CAUSES)
        self._engine_totals: dict[Counter, int] = {}
        """The counts of the engine that runs now, as last reported: a restarted engine counts from zero again."""

    @cached_property
    def _step_times(self) -> dict[str, Gauge]:
        """The costs of steps; shown once the engine knows them."""
        return self._by_label(self._metrics.labelled_gauges, "swiftkv:step_time_seconds", STEP_TIME_TERMS)

    @cached_property
    def _token_ratios(self) -> dict[str, Gauge]:
        return self._by_label(self._metrics.labelled_gauges, "swiftkv:step_time_token_ratio", TOKEN_POINTS)

    def _by_label(self, metrics: Mapping[str, M], key: str, values: Iterable[str]) -> dict[str, M]:
        return {value: metrics[key].labels(*label_values(key, self._name, value)) for value in values}

    def observe_engine(self, stats: EngineStats) -> None:
        """Take over the figures that the engine reports about itself."""
        self._gauges["vllm:num_requests_running"].set(stats.num_running)
        self._gauges["vllm:num_requests_waiting"].set(stats.num_waiting)
        self._gauges["vllm:kv_cache_usage_perc"].set(stats.num_used_blocks / max(1, stats.num_blocks))
        self._gauges["swiftkv:step_time_error_ratio"].set(stats.step_time_error_ratio)
        self._gauges["swiftkv:prefill_tokens_per_second"].set(stats.prefill_tokens_per_s or 0.0)
        self._kv_tokens[LOCAL_TIER].set(stats.kv_tokens_local)
        self._kv_tokens[PEER_TIER].set(stats.kv_tokens_peer)
        self._kv_tokens[HOST_TIER].set(stats.kv_tokens_host)
        expert_load = self._metrics.labelled_gauges["swiftkv:expert_load_factor"]
        for layer, factor in stats.expert_load_factors.items():
            expert_load.labels(self._name, str(layer)).set(factor)
        if stats.usual_step_time_s:
            for gauge, seconds in zip(self._step_times.values(), stats.usual_step_time_s, strict=True):
                gauge.set(seconds)
            for gauge, ratio in zip(self._token_ratios.values(), stats.usual_token_ratios, strict=True):
                gauge.set(ratio)
        self._metrics.engine_histograms.observe(self._name, stats)
        self._metrics.blocks.observe(self._name, stats.groups)
        self._metrics.tiers.observe(self._name, stats.tier)
        self._metrics.compute.observe(self._name, stats.compute)
        self._observe_totals(stats)

    def _observe_totals(self, stats: EngineStats) -> None:
        totals = {
            "vllm:num_preemptions": stats.num_preemptions_total,
            "vllm:prefix_cache_queries": stats.prefix_query_tokens_total,
            "vllm:prefix_cache_hits": stats.prefix_hit_tokens_total,
            "vllm:spec_decode_num_drafts": stats.drafts_total,
            "vllm:spec_decode_num_draft_tokens": stats.draft_tokens_total,
            "vllm:spec_decode_num_accepted_tokens": stats.accepted_draft_tokens_total,
            "swiftkv:window_missed_tokens": stats.window_missed_tokens_total,
            "swiftkv:cuda_graph_hits": stats.cuda_graph_hits_total or 0,
            "swiftkv:cuda_graph_misses": stats.cuda_graph_misses_total or 0,
        }
        for name, total in totals.items():
            self._count_up_to(total, self._counters[name])
        displaced = stats.num_displaced_total or [0] * len(_SERVICE_TIERS)
        for service_tier, total in zip(_SERVICE_TIERS, displaced, strict=True):
            self._count_up_to(total, self._displaced[service_tier])
        for tier, total in stats.hit_tokens_by_tier().items():
            self._count_up_to(total, self._prefix_hits[tier])

    def _count_up_to(self, total: int, counter: Counter) -> None:
        seen = self._engine_totals.get(counter, 0)
        if total != seen:
            counter.inc(max(0, total - seen))
            self._engine_totals[counter] = total

    def count_prompt_tokens(self, count: int, cached_by_tier: Mapping[str, int]) -> None:
        """Count the tokens of a prompt that is through, and those of them that were cached."""
        cached = sum(cached_by_tier.values())
        self._counters["vllm:prompt_tokens"].inc(count)
        self._counters["vllm:prompt_tokens_cached"].inc(cached)
        self._prompt_tokens[_COMPUTED].inc(count - cached)
        for tier, num_tokens in cached_by_tier.items():
            self._prompt_tokens[_SOURCES[tier]].inc(num_tokens)

    def count_generated_tokens(self, count: int) -> None:
        self._counters["vllm:generation_tokens"].inc(count)

    def observe_n(self, n: int) -> None:
        """Note how many answers a request asked for."""
        self._histograms["vllm:request_params_n"].observe(n)

    def observe_first_token(self, latency_s: float) -> None:
        self.first_token.add(latency_s)
        self._histograms["vllm:time_to_first_token_seconds"].observe(latency_s)

    def observe_forecast(self, forecast_s: float, latency_s: float) -> None:
        """Note the forecast time of a first token, and the actual one."""
        self._histograms["swiftkv:time_to_first_token_forecast_ratio"].observe(forecast_s / max(latency_s, 1e-6))

    def observe_handed_over(self, preparing_s: float) -> None:
        """Note how long a request took from the end of its body until it was sent to its engine."""
        self._histograms["swiftkv:gateway_request_seconds"].observe(preparing_s)

    def observe_first_written(self, way_s: float) -> None:
        """Note how long a stream's first token took from the engine until it was written."""
        self._histograms["swiftkv:gateway_first_token_seconds"].observe(way_s)

    def observe_inter_token_latency(self, latency_s: float) -> None:
        self.between_tokens.add(latency_s)
        self._histograms["vllm:inter_token_latency_seconds"].observe(latency_s)
        self._histograms["vllm:time_per_output_token_seconds"].observe(latency_s)

    def engine_came_up(self, ready: Ready) -> None:
        self._gauges["swiftkv:engine_up"].set(1)
        self._metrics.cache_configs.observe(self._name, ready)
        self._counters["swiftkv:engine_starts"].inc()
        self._engine_totals.clear()

    def count_refused(self, limit: str) -> None:
        self._metrics.labelled_counters["swiftkv:requests_refused"].labels(self._name, limit).inc()

    def engine_restarts(self, cause: EndCause) -> None:
        self._restarts[cause].inc()

    def engine_went_down(self) -> None:
        for name in _ZERO_WHILE_DOWN:
            self._gauges[name].set(0)
        for gauge in self._kv_tokens.values():
            gauge.set(0)
        self._metrics.blocks.observe(self._name, ())

    def observe_finished(self, request: FinishedRequest) -> None:
        self._success[request.reason].inc()
        self._metrics.tenants.observe(self._name, request)
        self._histograms["vllm:e2e_request_latency_seconds"].observe(request.e2e_s)
        self._histograms["vllm:request_prompt_tokens"].observe(request.prompt_tokens)
        self._histograms["vllm:request_generation_tokens"].observe(request.generation_tokens)
        self._histograms["vllm:request_params_max_tokens"].observe(request.max_tokens)
        if request.queue_s is not None:
            self._histograms["vllm:request_queue_time_seconds"].observe(request.queue_s)
            self._histograms["vllm:request_inference_time_seconds"].observe(request.e2e_s - request.queue_s)
        if request.first_token_s is None:
            return
        computed = request.prompt_tokens - request.cached_tokens
        self._histograms["vllm:request_prefill_kv_computed_tokens"].observe(computed)
        decode_s = request.e2e_s - request.first_token_s
        self._histograms["vllm:request_decode_time_seconds"].observe(decode_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(request.first_token_s - (request.queue_s or 0))
        if request.generation_tokens > 1:
            mean_s = decode_s / (request.generation_tokens - 1)
            self._histograms["vllm:request_time_per_output_token_seconds"].observe(mean_s)


class _EngineHistograms(ModelCollector[EngineStats]):
    """Histograms that engines keep, as last reported; those of a restarted engine begin anew."""

    def collect(self) -> Iterable[Metric]:
        load, store, exposed = (
            HistogramMetricFamily(f"swiftkv:layer_stream_{name}_seconds", text, labels=("model_name",))
            for name, text in (
                ("load", "Time of copies from lenders and host memory, per step that copies"),
                ("store", "Time of copies to lenders, per step that copies"),
                ("exposed", "Time of these copies for which computing waited, per step that copies"),
            )
        )
        for model, stats in self._by_model.items():
            for family, durations in (
                (load, stats.layer_stream_load),
                (store, stats.layer_stream_store),
                (exposed, stats.layer_stream_exposed),
            ):
                if durations is not None:
                    add_histogram(family, (model,), durations)
        name = "vllm:iteration_tokens_total"
        step_tokens = HistogramMetricFamily(name, "Tokens of prompts and answers per step", labels=label_names(name))
        for model, stats in self._by_model.items():
            if stats.step_tokens is not None:
                add_histogram(step_tokens, label_values(name, model), stats.step_tokens)
        return load, store, exposed, step_tokens


class _CacheConfigs(ModelCollector[Ready]):
    """The block sizes and pools of engines, as vLLM shows them, for routers that count in blocks."""

    def collect(self) -> Iterable[Metric]:
        name = "vllm:cache_config_info"
        text = "Tokens per block, and the number of blocks for whole sequences"
        info = GaugeMetricFamily(name, text, labels=label_names(name, "block_size", "num_gpu_blocks"))
        for model, ready in self._by_model.items():
            info.add_metric(label_values(name, model, str(ready.block_size), str(ready.num_blocks)), 1)
        return [info]


class _EngineStates(ModelCollector[EngineView]):
    """The state of every engine at the last scrape."""

    def observe_all(self, views: Mapping[str, EngineView]) -> None:
        self._by_model.update(views)

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "swiftkv:engine_state", "1 for the state that the model's engine is in", labels=("model_name", "state")
        )
        sleep_key = "vllm:engine_sleep_state"
        sleep_states = GaugeMetricFamily(
            sleep_key,
            "1 for awake, weights_offloaded (asleep at level 1) or discard_all (2); none while the engine is away",
            labels=label_names(sleep_key, "sleep_state"),
        )
        ages = GaugeMetricFamily(
            "swiftkv:engine_progress_age_seconds", "Time since the engine last showed progress", labels=("model_name",)
        )
        for model, view in self._by_model.items():
            for state in EngineState:
                states.add_metric((model, state), float(view.state == state))
            if (current := _sleep_state(view)) is not None:
                for sleep_state in _SLEEP_STATES:
                    labels = label_values(sleep_key, model, sleep_state)
                    sleep_states.add_metric(labels, float(sleep_state == current))
            if view.progress_age_s is not None:
                ages.add_metric((model,), view.progress_age_s)
        return states, sleep_states, ages


def _sleep_state(view: EngineView) -> str | None:
    """Return one of `_SLEEP_STATES`; `None` while the engine is gone, unless the model was put to sleep."""
    awake, level_1, level_2 = _SLEEP_STATES
    if view.state in (EngineState.ASLEEP, EngineState.WAKING):
        return level_2 if view.pid is None else level_1
    is_away = view.state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.DOWN)
    return None if is_away else awake
