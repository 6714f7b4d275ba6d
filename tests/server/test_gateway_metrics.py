from __future__ import annotations

import pytest
from echo_gateway import Gateway
from prometheus_client.parser import text_string_to_metric_families

from swiftkv.server.metrics import GatewayMetrics

# What the dashboards that come with vLLM ask for.
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
}


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and model, other labels added up."""
    result: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels["model_name"])
            result[key] = result.get(key, 0) + sample.value
    return result


def test_names_and_counts(gateway: Gateway) -> None:
    with gateway.http() as http:
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
    assert all(after[key] == before[key] for key in after if key[1] == "chat")


def test_a_models_own_port_shows_its_own(gateway: Gateway) -> None:
    with gateway.http() as http:
        shown = samples(http.get(f"{gateway.model_url}/metrics").text)
    assert {name for name, of in shown if of == "chat"} >= DASHBOARD
    assert {of for _, of in shown} == {"chat"}


def test_totals_survive_a_restarted_engine() -> None:
    metrics = GatewayMetrics()
    model = metrics.for_model("m")
    model.engine_came_up()
    model.observe_engine_totals(1, 100, 50)
    model.observe_engine_totals(2, 150, 60)
    model.engine_went_down()
    model.engine_came_up()
    model.observe_engine_totals(1, 10, 5)
    value = metrics.registry.get_sample_value
    assert value("vllm:num_preemptions_total", {"model_name": "m"}) == 3
    assert value("vllm:prefix_cache_queries_total", {"model_name": "m"}) == 160
    assert value("vllm:prefix_cache_hits_total", {"model_name": "m"}) == 65
    assert value("swiftkv:engine_starts_total", {"model_name": "m"}) == 2


@pytest.mark.parametrize("path", ["/health", "/version", "/ready"])
def test_status(gateway: Gateway, path: str) -> None:
    with gateway.http() as http:
        assert http.get(path).status_code == 200
