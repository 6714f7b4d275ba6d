"""Routes for routers: `/v1/loads`, and the tokens of prompts."""

from __future__ import annotations

from typing import Any

import pytest
from echo_gateway import Gateway

CHAT = {"messages": [{"role": "user", "content": "one two three"}]}


def answer(gateway: Gateway, method: str, path: str, body: object = None) -> Any:
    with gateway.http() as http:
        return http.request(method, path, json=body).raise_for_status().json()


@pytest.mark.parametrize("path", ["/models/code/v1", "/v1"])
def test_a_rendered_chat_has_the_tokens_that_are_computed(gateway: Gateway, path: str) -> None:
    body = {**CHAT, "model": "code", "max_tokens": 1}
    rendered = answer(gateway, "POST", f"{path}/chat/completions/render", body)
    computed = answer(gateway, "POST", "/v1/chat/completions", {**body, "return_token_ids": True})
    assert rendered["token_ids"] == computed["prompt_token_ids"]
    assert rendered["model"] == "code"
    assert rendered["request_id"].startswith("chatcmpl-")


def test_every_prompt_of_a_completion_is_rendered(gateway: Gateway) -> None:
    body = {"model": "chat", "prompt": ["one two", "three"], "max_tokens": 1}
    rendered = answer(gateway, "POST", "/v1/completions/render", body)
    tokens = [answer(gateway, "POST", "/models/chat/tokenize", {"prompt": text})["tokens"] for text in body["prompt"]]
    assert [prompt["token_ids"] for prompt in rendered] == tokens


def test_a_prompt_that_is_too_long_is_refused_as_ever(gateway: Gateway) -> None:
    with gateway.http() as http:
        refused = http.post("/v1/completions/render", json={"model": "chat", "prompt": "x " * 20_000})
    assert refused.status_code == 400


def test_loads_are_those_of_the_engines(gateway: Gateway) -> None:
    with gateway.http() as http:
        http.post("/models/code/v1/completions", json={"prompt": "one two", "max_tokens": 3}).raise_for_status()
    loads = answer(gateway, "GET", "/v1/loads")
    assert [load["model"] for load in loads["loads"]] == ["chat", "code"]
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    assert loads["dp_rank_count"] == 2
    (code,) = answer(gateway, "GET", "/models/code/v1/loads")["loads"]
    engine, stats = gateway.clients["code"].engine, gateway.clients["code"].stats
    assert engine is not None
    assert stats is not None
    assert code["max_total_num_tokens"] == engine.num_blocks * engine.block_size
    assert (code["num_running_reqs"], code["num_waiting_reqs"], code["num_waiting_uncached_tokens"]) == (0, 0, 0)
    assert code["token_usage"] == stats.num_used_blocks / stats.num_blocks
    assert code["max_running_requests"] == 64
