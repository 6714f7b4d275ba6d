from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from echo_gateway import Gateway
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from swiftkv.engine.messages import DURATION_BOUNDS_S, STEP_TOKENS_BOUNDS, ComputeStats, EngineStats, Ready
from swiftkv.histogram import Histogram
from swiftkv.lease.messages import GroupBlocks, LendingState
from swiftkv.server.engine_state import EndCause
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.limits import SPARE_CONNECTIONS, NodeLimits
from swiftkv.server.metrics import MAX_HIDDEN, GatewayMetrics
from swiftkv.server.node_views import EngineView
from swiftkv.tier.messages import TierStats
from tests.support.node_process import wait_for

# The metrics of the dashboards that come with vLLM.
DASHBOARD = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:cache_config_info",
    "vllm:engine_sleep_state",
}
READY = Ready("m", 1, 4096, 1024, num_blocks=300, pool_bytes=1 << 20, block_size=16, eos_token_ids=[], incarnation=1)


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and model ("" for the node), other labels added up."""
    result: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("model_name", ""))
            result[key] = result.get(key, 0) + sample.value
    return result


def test_names_and_counts(slow_gateway: Gateway) -> None:
    """The gateway is the test's own: of requests that other tests have left its engines may still tell."""
    with slow_gateway.http() as http:
        before = samples(http.get("/metrics").text)
        body = {"model": "code", "prompt": [300] * 20, "max_tokens": 7, "n": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        response = http.get("/metrics")
    after = samples(response.text)
    assert response.headers["content-type"].startswith("text/plain")
    for model in ("chat", "code"):
        assert {name for name, of in after if of == model} >= DASHBOARD
    grown = {name: after[name, "code"] - before[name, "code"] for name in DASHBOARD}
    assert grown["vllm:prompt_tokens_total"] == 40
    assert grown["vllm:generation_tokens_total"] == 14
    assert grown["vllm:request_success_total"] == 2
    assert (
        after["vllm:request_generation_tokens_sum", "code"] - before["vllm:request_generation_tokens_sum", "code"] == 14
    )
    of_chat = {key for key in after if key[1] == "chat"} - {("swiftkv:engine_progress_age_seconds", "chat")}
    assert all(after[key] == before[key] for key in of_chat)


def test_the_way_through_the_gateway_is_measured(slow_gateway: Gateway) -> None:
    """Every request counts on its way to the engine, and a stream once its first token is written."""
    ways = "swiftkv:gateway_request_seconds_count", "swiftkv:gateway_first_token_seconds_count"
    with slow_gateway.http() as http:
        before = samples(http.get("/metrics").text)
        body = {"model": "code", "prompt": [300] * 20, "max_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 200
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        after = samples(http.get("/metrics").text)
    assert [after[way, "code"] - before[way, "code"] for way in ways] == [2, 1]


def test_text_that_is_held_back_is_not_written_yet(slow_gateway: Gateway) -> None:
    """It may begin a stop string, so that a client gets nothing."""
    way, tokens = ("swiftkv:gateway_first_token_seconds_count", "code"), ("vllm:generation_tokens_total", "code")
    token_id = slow_gateway.models["code"].tokenizer.token_id("a")
    body = {"model": "code", "prompt": [token_id], "max_tokens": 900, "stop": ["a" * 1000 + "!"], "stream": True}
    with slow_gateway.http() as http:
        before = samples(http.get("/metrics").text)
        with http.stream("POST", "/v1/completions", json=body):

            def computed() -> dict[tuple[str, str], float]:
                return samples(http.get("/metrics").text)

            wait_for("tokens", lambda: computed()[tokens] >= before[tokens] + 3)
            assert computed()[way] == before[way]


def test_a_models_own_port_shows_its_own(gateway: Gateway) -> None:
    with gateway.http() as http:
        shown = samples(http.get(f"{gateway.model_url}/metrics").text)
    assert {name for name, of in shown if of == "chat"} >= DASHBOARD
    assert {of for _, of in shown} == {"chat"}


def stats(preemptions: int, query_tokens: int, hit_tokens: int, peer_hit_tokens: int) -> EngineStats:
    return EngineStats(
        *[0] * 6, preemptions, query_tokens, hit_tokens, 0, 0, 0, prefix_hit_tokens_peer_total=peer_hit_tokens
    )


def test_totals_survive_a_restarted_engine() -> None:
    metrics = GatewayMetrics()
    model = metrics.for_model("m")
    model.engine_came_up(READY)
    model.observe_engine(stats(preemptions=1, query_tokens=100, hit_tokens=50, peer_hit_tokens=20))
    model.observe_engine(stats(preemptions=2, query_tokens=150, hit_tokens=60, peer_hit_tokens=25))
    model.engine_went_down()
    model.engine_came_up(READY)
    model.observe_engine(stats(preemptions=1, query_tokens=10, hit_tokens=5, peer_hit_tokens=1))
    value = metrics.registry.get_sample_value
    labels = {"model_name": "m", "engine": "0"}
    assert value("vllm:num_preemptions_total", labels) == 3
    assert value("vllm:prefix_cache_queries_total", labels) == 160
    assert value("vllm:prefix_cache_hits_total", labels) == 65
    assert value("swiftkv:engine_starts_total", {"model_name": "m"}) == 2
    tiers = [value("swiftkv:prefix_hit_tokens_total", {"model_name": "m", "tier": tier}) for tier in ("local", "peer")]
    assert tiers == [39, 26]


def test_vllms_metrics_have_the_label_and_the_bounds_of_vllm() -> None:
    """Dashboards filter by `engine`; histograms with the same bounds add up. Finer ones lie below vLLM's lowest."""
    metrics = GatewayMetrics()
    observe_everything(metrics, "m")
    bounds: dict[str, list[float]] = {}
    for metric in metrics.registry.collect():
        for sample in metric.samples:
            assert sample.labels.get("engine") == ("0" if sample.name.startswith("vllm:") else None), sample
            if "le" in sample.labels:
                bounds.setdefault(metric.name, []).append(float(sample.labels["le"]))
    of_tokens = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    of_requests = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
    first_token = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    for name, of_vllm in {
        "time_to_first_token_seconds": [*first_token, 160, 640, 2560],
        "inter_token_latency_seconds": of_tokens,
        "request_time_per_output_token_seconds": of_tokens,
        "e2e_request_latency_seconds": of_requests,
        "request_queue_time_seconds": of_requests,
        "request_inference_time_seconds": of_requests,
        "request_prefill_time_seconds": of_requests,
        "request_decode_time_seconds": of_requests,
        "request_params_n": [1, 2, 5, 10, 20],
        "iteration_tokens_total": [1, *(2**power for power in range(3, 15))],
    }.items():
        assert [bound for bound in bounds[f"vllm:{name}"] if bound >= of_vllm[0]] == [*of_vllm, float("inf")], name


def test_prompt_tokens_by_source_add_up() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("m").count_prompt_tokens(100, {"local": 32, "peer": 16, "host": 0, "storage": 8})

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    assert (value("vllm:prompt_tokens_total"), value("vllm:prompt_tokens_cached_total")) == (100, 56)
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value("vllm:prompt_tokens_by_source_total", source=source) for source in sources] == [44, 32, 24]


def test_the_first_restart_is_one_more_than_a_scrape_before_it_showed() -> None:
    metrics = GatewayMetrics()
    model = metrics.for_model("m")

    def restarts() -> dict[str, float]:
        (family,) = (metric for metric in metrics.registry.collect() if metric.name == "swiftkv:engine_restarts")
        return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}

    before = restarts()
    assert set(before) == set(get_args(EndCause))
    model.engine_restarts("hung")
    assert restarts() == {**before, "hung": before["hung"] + 1}


def test_displaced_requests_count_by_their_service_tier() -> None:
    metrics = GatewayMetrics()
    model = metrics.for_model("m")
    for total in (1, 4):
        model.observe_engine(EngineStats(*[0] * 12, num_displaced_total=[0, 0, 2, total]))
    counts = {
        tier: metrics.registry.get_sample_value(
            "swiftkv:requests_displaced_total", {"model_name": "m", "service_tier": tier}
        )
        for tier in ("priority", "default", "flex", "batch")
    }
    assert counts == {"priority": 0, "default": 0, "flex": 2, "batch": 4}


def test_routers_learn_the_sizes_of_an_engine_anew_when_it_restarts() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("m").engine_came_up(READY)
    metrics.for_model("m").engine_came_up(msgspec.structs.replace(READY, num_blocks=280))
    text = b"".join(metrics.render()).decode()
    assert 'vllm:cache_config_info{block_size="16",engine="0",model_name="m",num_gpu_blocks="280"} 1.0' in text
    assert text.count("vllm:cache_config_info{") == 1


def test_load_factors_of_experts_by_layer() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("dense").observe_engine(EngineStats(*[0] * 12))
    metrics.for_model("experts").observe_engine(EngineStats(*[0] * 12, expert_load_factors={0: 0.25, 3: 0.5}))
    text = b"".join(metrics.render()).decode()
    assert 'swiftkv:expert_load_factor{layer="3",model_name="experts"} 0.5' in text
    assert text.count("swiftkv:expert_load_factor{") == 2


def test_the_error_of_predicted_step_times_is_shown() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("timed").observe_engine(EngineStats(*[0] * 12, step_time_error_ratio=0.125))
    assert 'swiftkv:step_time_error_ratio{model_name="timed"} 0.125' in b"".join(metrics.render()).decode()


def test_graphs_are_counted_where_there_are_any() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("cpu").observe_engine(EngineStats(*[0] * 12))
    metrics.for_model("gpu").observe_engine(
        EngineStats(*[0] * 12, cuda_graph_hits_total=90, cuda_graph_misses_total=10)
    )
    for name, counted in (("cpu", (0, 0)), ("gpu", (90, 10))):
        values = (
            metrics.registry.get_sample_value(f"swiftkv:cuda_graph_{what}_total", {"model_name": name})
            for what in ("hits", "misses")
        )
        assert tuple(values) == counted


def test_where_kv_lies_and_what_streaming_it_takes() -> None:
    metrics = GatewayMetrics()
    model, other = metrics.for_model("m"), metrics.for_model("other")
    load, exposed = Histogram(DURATION_BOUNDS_S), Histogram(DURATION_BOUNDS_S)
    for duration_s in (0.001, 0.0011, 0.2, 99.0):
        load.add(duration_s)
    exposed.add(0.0)
    model.observe_engine(
        EngineStats(*[0] * 12, kv_tokens_local=300, kv_tokens_peer=700, kv_tokens_host=50,
                    layer_stream_load=load, layer_stream_exposed=exposed)
    )  # fmt: skip
    other.observe_engine(EngineStats(*[0] * 12))
    families = {
        family.name: family for family in text_string_to_metric_families(b"".join(metrics.render("m")).decode())
    }
    held = {sample.labels["tier"]: sample.value for sample in families["swiftkv:kv_tier_tokens"].samples}
    assert held == {"local": 300, "peer": 700, "host": 50}
    samples = families["swiftkv:layer_stream_load_seconds"].samples
    buckets = {float(sample.labels["le"]): sample.value for sample in samples if "le" in sample.labels}
    assert (buckets[0.0005], buckets[0.001], buckets[0.0025], buckets[0.25], buckets[10], buckets[float("inf")]) == (
        0, 1, 2, 3, 3, 4,
    )  # fmt: skip
    rest = {sample.name.rsplit("_", 1)[1]: sample.value for sample in samples if "le" not in sample.labels}
    assert rest == {"count": 4, "sum": pytest.approx(99.2021)}
    assert families["swiftkv:layer_stream_exposed_seconds"].samples[0].value == 1
    assert not families["swiftkv:layer_stream_store_seconds"].samples
    model.engine_went_down()
    assert metrics.registry.get_sample_value("swiftkv:kv_tier_tokens", {"model_name": "m", "tier": "peer"}) == 0


def test_blocks_are_told_by_group_and_state() -> None:
    metrics = GatewayMetrics()
    model = metrics.for_model("m")
    groups = [GroupBlocks(1, 2, 3, 0, 4, 0, 5, 6, 21, 0, 0, 0, 0, 0), GroupBlocks(*[0] * 7, 7, 7, 0, 0, 0, 0, 0)]
    model.observe_engine(EngineStats(*[0] * 12, groups=groups))
    families = {
        family.name: family for family in text_string_to_metric_families(b"".join(metrics.render("m")).decode())
    }
    blocks = {(s.labels["group"], s.labels["state"]): s.value for s in families["swiftkv:kv_blocks"].samples}
    assert [blocks["0", state] for state in ("free", "used", "cached", "in_flight", "loading")] == [1, 2, 3, 4, 5]
    assert [blocks[group, "elsewhere"] for group in "01"] == [6, 7]
    model.engine_went_down()
    assert "swiftkv:kv_blocks{" not in b"".join(metrics.render()).decode()


@pytest.mark.parametrize("path", ["/health", "/version", "/ready"])
def test_status(gateway: Gateway, path: str) -> None:
    with gateway.http() as http:
        assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/models/chat/ready"])
def test_a_probe_may_ask_for_the_head_alone(gateway: Gateway, path: str) -> None:
    with gateway.http() as http:
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == http.get(path).headers["content-type"]


def test_limits_are_the_nodes_and_no_models() -> None:
    limits = NodeLimits(max_connections=1, max_bodies=1 << 20)
    metrics = GatewayMetrics()
    metrics.watch(limits)
    metrics.for_model("m").engine_came_up(READY)
    for _ in range(1 + SPARE_CONNECTIONS + 2):
        limits.admit()
    with limits.body(0) as budget:
        assert budget.take(1 << 20)
        with limits.body(0) as other:
            assert not other.take(1 << 20)
        value = metrics.registry.get_sample_value
        assert value("swiftkv:http_connections") == 1 + SPARE_CONNECTIONS
        assert value("swiftkv:http_refused_total", {"limit": "max_connections"}) == 2
        assert value("swiftkv:http_body_bytes") == 1 << 20
        assert value("swiftkv:http_refused_total", {"limit": "max_bodies"}) == 1
    assert b"\nswiftkv:http_connections" not in b"".join(metrics.render("m"))


def observe_everything(metrics: GatewayMetrics, name: str) -> None:
    """Have a model leave its name wherever a model can."""
    model = metrics.for_model(name)
    model.engine_came_up(READY)
    stats = EngineStats(
        *[0] * 12,
        layer_stream_load=Histogram(DURATION_BOUNDS_S),
        step_tokens=Histogram(STEP_TOKENS_BOUNDS),
        groups=[GroupBlocks(*[0] * 14)],
        tier=TierStats(backend="file"),
        compute=ComputeStats(0.0, 0.0),
    )
    model.observe_engine(stats)
    model.count_refused("max_num_queued_reqs")
    model.engine_restarts("killed")
    model.observe_finished(FinishedRequest("stop", 3, 1, 2, 2, 0.2, 0.1, 0.1, 0.0, tenant="somebody"))
    metrics.batch_lines.labels(name, "done").inc()
    metrics.batch_sequences.labels(name).set(1)
    metrics.engines.observe_all({name: EngineView("ready", None, 0.0, 0, 0.0, 0, 1)})
    metrics.lending.observe(name, LendingState(1, name, 0, [], 0))


def named_models(registry: CollectorRegistry) -> set[str]:
    return {sample.labels["model_name"] for metric in registry.collect() for sample in metric.samples}


def test_models_that_were_removed_are_forgotten_but_for_the_last_ones() -> None:
    metrics = GatewayMetrics()
    metrics.for_model("stays")
    for number in range(3 * MAX_HIDDEN):
        observe_everything(metrics, f"guest-{number}")
        metrics.hide_model(f"guest-{number}")
    kept = {f"guest-{number}" for number in range(2 * MAX_HIDDEN, 3 * MAX_HIDDEN)}
    assert named_models(metrics.registry) == {"stays", *kept}
    assert named_models(metrics.tenants.registry) == kept
    assert b"guest" not in b"".join(metrics.render())


def test_counters_of_a_model_that_comes_and_goes_go_on() -> None:
    metrics = GatewayMetrics()
    for _ in range(3 * MAX_HIDDEN):
        metrics.for_model("guest").count_prompt_tokens(1, {})
        metrics.show_model("guest")
        metrics.hide_model("guest")
    metrics.show_model("guest")
    text = b"".join(metrics.render()).decode()
    assert samples(text)["vllm:prompt_tokens_total", "guest"] == 3 * MAX_HIDDEN
