"""Tenants: each has its key, its tiers, its cache, its part of the queue and its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_gateway import Gateway, start_gateway, wait_until

from swiftkv.server.app import ServerSettings
from swiftkv.server.models import ClientPolicy
from swiftkv.server.request_log import RequestLog
from swiftkv.server.tenants import ANYBODY, Sender, named_flow, senders_by_key
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.tenant_config import TenantConfig

TENANTS = {
    "key of alice": TenantConfig(name="alice", api_key_env="A", weight=60, max_service_tier="priority"),
    "key of bob": TenantConfig(name="bob", api_key_env="B", weight=38, max_service_tier="flex", cache="shared"),
    "key of carol": TenantConfig(name="carol", api_key_env="C", weight=1, cache="shared"),
    "key of dave": TenantConfig(name="dave", api_key_env="D", weight=1),
}
ADMIN_KEY = "key of the node"
LONG = "one two three four five six seven eight nine ten " * 20
COMPLETION: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def tenants_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    log = RequestLog(directory / "requests.jsonl")
    settings = ServerSettings(tenants=senders_by_key(TENANTS), request_log=log, admin_key=ADMIN_KEY)
    gateway, stop = start_gateway(directory, tokenizer, settings=settings)
    yield gateway
    stop()
    log.close()
    lines = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    answered = [line for line in lines if line["path"] == "/v1/completions" and line["status"] == 200]
    assert {line.get("tenant") for line in answered} == {"alice", "bob", "carol", "dave"}


def post(gateway: Gateway, name: str, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        headers = {"Authorization": f"Bearer key of {name}"}
        return http.post("/v1/completions", json={**COMPLETION, **fields}, headers=headers)


def test_each_key_lets_in(tenants_gateway: Gateway) -> None:
    for key in TENANTS:
        client = tenants_gateway.openai().with_options(api_key=key)
        assert client.completions.create(model="chat", prompt="a", max_tokens=1).choices
        with tenants_gateway.http() as http:
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        tenants_gateway.openai().with_options(api_key="key of eve").models.list()
    with tenants_gateway.http() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").status_code == 200
        assert "bearer" in http.get("/openapi.json").json()["components"]["securitySchemes"]


@pytest.mark.parametrize(
    ("name", "wanted", "served"),
    [
        ("alice", "priority", "priority"),
        ("alice", "flex", "flex"),
        ("bob", "priority", "flex"),
        ("bob", "default", "flex"),
        ("bob", "batch", "batch"),
        ("carol", "priority", "default"),
    ],
)
def test_nobody_is_served_above_their_highest_tier(
    tenants_gateway: Gateway, name: str, wanted: str, served: str
) -> None:
    assert post(tenants_gateway, name, service_tier=wanted).json()["service_tier"] == served


def test_priority_is_for_those_who_may_go_before_others(tenants_gateway: Gateway) -> None:
    assert post(tenants_gateway, "alice", priority=-1).status_code == 200
    refused = post(tenants_gateway, "carol", priority=-1)
    assert refused.status_code == 400
    assert "max_service_tier" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("first", "then", "is_shared"), [
    ("alice", "alice", True), ("alice", "dave", False), ("dave", "carol", False), ("bob", "carol", True),
])  # fmt: skip
def test_who_finds_whose_prompts_in_the_cache(tenants_gateway: Gateway, first: str, then: str, is_shared: bool) -> None:
    for salt in (None, "a", "tenant alice"):
        prompt = f"{first} {then} {salt} {LONG}"
        post(tenants_gateway, first, prompt=prompt, cache_salt=salt)
        usage = post(tenants_gateway, then, prompt=prompt, cache_salt=salt).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is is_shared


def test_no_salt_has_a_nul(tenants_gateway: Gateway) -> None:
    """It ends the part that the node writes, also in storage that a node without tenants uses, too."""
    refused = post(tenants_gateway, "alice", prompt=LONG, cache_salt="tenant dave\0")
    assert (refused.status_code, "cache_salt" in refused.text) == (400, True)


def test_no_salt_leads_to_another_tenant() -> None:
    alice, bob, *_ = senders_by_key(TENANTS).values()
    salts = [None, "", "a", "tenant alice\0", "tenant alice\0a", "shared\0a", "\0"]
    own = {alice.salt(salt) for salt in salts}
    assert not own & {bob.salt(salt) for salt in salts}
    assert len(own) == len({salt or "" for salt in salts})
    assert [bob.salt(None), ANYBODY.salt(None), ANYBODY.salt("a")] == ["", "", "a"]


def test_each_has_its_part_of_the_queue(tenants_gateway: Gateway) -> None:
    """The gateway has 600, of which carol has 6."""
    assert post(tenants_gateway, "carol", n=6).status_code == 200
    never = post(tenants_gateway, "carol", n=7)
    assert (never.status_code, never.json()["error"]["code"]) == (400, "limit_exceeded")
    with ThreadPoolExecutor(1) as others:
        with tenants_gateway.engines["chat"].standing_still():
            running = others.submit(post, tenants_gateway, "carol", n=6)
            wait_until(lambda: tenants_gateway.clients["chat"].num_in_flight == 6)
            refused = post(tenants_gateway, "carol")
        assert running.result().status_code == 200
    assert refused.status_code == 429
    assert "max_num_queued_reqs" in refused.json()["error"]["message"]
    assert "'carol'" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert post(tenants_gateway, "alice", n=20).status_code == 200


def test_metrics_name_tenants_and_nobody_else(tenants_gateway: Gateway) -> None:
    before = b"".join(tenants_gateway.metrics.render_tenants()).decode()

    def value(text: str, metric: str) -> float:
        return float(next((line.split()[-1] for line in text.splitlines() if line.startswith(metric)), 0))

    with tenants_gateway.http() as http:
        headers = {"x-api-key": "key of dave", "x-llm-d-inference-fairness-id": "a stranger"}
        assert http.post("/v1/completions", json={**COMPLETION, "max_tokens": 3}, headers=headers).status_code == 200
        text = http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
    generated = 'swiftkv:tenant_tokens_total{kind="generated",model_name="chat",tenant="dave"}'
    assert value(text, generated) - value(before, generated) == 3
    ended = 'swiftkv:tenant_requests_total{finished_reason="length",model_name="chat",tenant="dave"}'
    assert value(text, ended) - value(before, ended) == 1
    first = 'swiftkv:tenant_time_to_first_token_seconds_count{model_name="chat",tenant="dave"}'
    assert value(text, first) - value(before, first) == 1
    assert "stranger" not in text


@pytest.mark.parametrize("path", ["/metrics", "/models/chat/metrics"])
def test_only_the_admin_key_is_told_who_the_tenants_are(tenants_gateway: Gateway, path: str) -> None:
    assert post(tenants_gateway, "alice").status_code == 200
    with tenants_gateway.http() as http:
        texts = [
            http.get(path, headers=headers).text
            for headers in ({}, {"Authorization": "Bearer key of alice"}, {"x-api-key": ADMIN_KEY})
        ]
        told = http.get(path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
    finished = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="chat"}'
    assert all(finished in text for text in texts)
    assert not any("alice" in text or "tenant" in text for text in texts)
    names, names_for_all = (
        {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} for text in (told, texts[0])
    )
    assert names_for_all < names
    assert all(name.startswith("swiftkv:tenant_") for name in names - names_for_all)
    assert 'tenant="alice"' in told


def test_without_tenants_nothing_is_said_of_them(gateway: Gateway) -> None:
    with gateway.http() as http:
        headers = {"x-llm-d-inference-fairness-id": "somebody"}
        assert http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
        text = http.get("/metrics").text
    assert "tenant=" not in text
    assert "somebody" not in text


def test_a_fairness_id_names_one_of_a_fixed_number_of_flows() -> None:
    new, old = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
    flows = {named_flow({new: f"client {i}"}).flow for i in range(5000)}
    assert flows == set(range(1, 65))
    assert named_flow({new: "a"}) == named_flow({old: "a"}) == named_flow({new: "a", old: "b"})
    assert named_flow({}) == named_flow({new: ""}) == ANYBODY
    assert named_flow({new: "é" * 100}).name is None


def test_a_tenants_limit_stands_in_place_of_the_nodes() -> None:
    open_node, closed_node = ClientPolicy(allow_priority=True), ClientPolicy()
    assert (open_node.max_tier, closed_node.max_tier) == ("priority", "default")
    assert open_node.towards(Sender(max_tier="default")).allow_priority is False
    assert open_node.towards(Sender()).max_tier == "priority"
    assert closed_node.towards(Sender(max_tier="priority")).allow_priority is True
    assert closed_node.towards(Sender(max_tier="batch")).max_tier == "batch"
