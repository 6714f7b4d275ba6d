"""Embeddings through the real `openai` client; the echo engine's "hidden states" are known beforehand."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from echo_engine import echoed_numbers
from echo_gateway import MAX_MODEL_LEN, PATIENCE_S, TEXT, Gateway, start_gateway

from swiftkv.models.pooling import EmbeddingRecipe
from swiftkv.server.engine_state import EngineState
from swiftkv.server.models import ClientPolicy
from swiftkv.server.price import LIMITS
from swiftkv.server.tokenizer import Tokenizer
from tests.support.node_process import wait_for

RECIPE = EmbeddingRecipe(4, prompts={"query": "Query: ", "document": ""}, dimensions=(2, 3))
LONG = list(range(3, 100))


@pytest.fixture(scope="module")
def embedding_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path_factory.mktemp("embed"), tokenizer, pooling=RECIPE)
    yield gateway
    stop()


def unit(numbers: np.ndarray[Any, Any]) -> list[float]:
    return (numbers / np.linalg.norm(numbers)).tolist()


def post(gateway: Gateway, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(path, json={"model": "chat", **body})


def error(answer: httpx.Response) -> tuple[int, str, str]:
    detail = answer.json()["error"]
    return answer.status_code, detail["param"], detail["message"]


def test_texts(embedding_gateway: Gateway, tokenizer: Tokenizer) -> None:
    texts = [TEXT, "a b c", TEXT[:40]]
    answer = embedding_gateway.openai().embeddings.create(model="chat", input=texts)  # asks for base64
    ids = [tokenizer.encode(text) for text in texts]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, prompt in zip(answer.data, ids, strict=True):
        assert item.embedding == pytest.approx(unit(echoed_numbers(prompt, [])), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert (answer.object, answer.model) == ("list", "chat")


@pytest.mark.parametrize("given", ["a b c", [11, 12, 13], [[11, 12, 13], [14]], ["one", "two"]])
def test_every_form_of_input_and_of_numbers(embedding_gateway: Gateway, given: Any) -> None:
    floats, packed = (post(embedding_gateway, input=given, encoding_format=form).json() for form in ("float", "base64"))
    unpacked = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in packed["data"]]
    assert [item["embedding"] for item in floats["data"]] == unpacked
    assert all(np.linalg.norm(vector) == pytest.approx(1) for vector in unpacked)


def test_dimensions_are_cut_before_the_length_is_made_one(embedding_gateway: Gateway) -> None:
    cut = post(embedding_gateway, input=[LONG], dimensions=2).json()["data"][0]["embedding"]
    assert cut == pytest.approx(unit(echoed_numbers(LONG, [])[:2]))
    whole = post(embedding_gateway, input=[LONG], dimensions=4).json()["data"][0]["embedding"]
    assert whole == pytest.approx(unit(echoed_numbers(LONG, [])))
    status, param, message = error(post(embedding_gateway, input=[LONG], dimensions=1))
    assert (status, param) == (400, "dimensions")
    assert "supports 2, 3" in message


def test_the_length_may_be_kept(embedding_gateway: Gateway) -> None:
    answer = post(embedding_gateway, input=[LONG], use_activation=False).json()
    assert answer["data"][0]["embedding"] == echoed_numbers(LONG, []).tolist()


def test_prompts_of_the_checkpoint(embedding_gateway: Gateway, tokenizer: Tokenizer) -> None:
    behind = post(embedding_gateway, input="fox", prompt_name="query").json()
    alone = post(embedding_gateway, input="Query: fox").json()
    assert behind["data"] == alone["data"]
    assert "it has: query, document" in error(post(embedding_gateway, input="fox", prompt_name="quest"))[2]
    assert error(post(embedding_gateway, input=[5], prompt_name="query"))[1] == "prompt_name"


def test_usage_tells_what_was_cached_where_it_may(embedding_gateway: Gateway, tokenizer: Tokenizer) -> None:
    """The echo engine has 16 tokens to a block."""
    prompt = [17, *LONG]
    first, second = (post(embedding_gateway, input=[prompt]).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"] == {"cached_tokens": len(prompt) // 16 * 16}
    third = post(embedding_gateway, input=[prompt, prompt], return_cached_tokens_details=True).json()["usage"]
    local = 2 * (len(prompt) // 16 * 16 - 16)
    by_tier = {"local": local, "peer": 0, "host": 32, "storage": 0}
    assert third["prompt_tokens_details"] == {"cached_tokens": local + 32, "cached_tokens_details": by_tier}


def test_more_texts_than_a_request_may_have_in_the_engine_at_once(embedding_gateway: Gateway) -> None:
    prompts = [[3 + i % 500, 5] for i in range(700)]
    assert len(prompts) > embedding_gateway.clients["chat"].max_sequences
    vectors = [item["embedding"] for item in post(embedding_gateway, input=prompts).json()["data"]]
    expected = [unit(echoed_numbers(prompt, [])) for prompt in prompts]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_texts_that_are_too_long_are_cut_where_that_is_asked_for(
    embedding_gateway: Gateway, tokenizer: Tokenizer, side: str | None
) -> None:
    texts = ["one two three four five six seven eight", "one"]
    ids = [tokenizer.encode(text) for text in texts]
    assert len(ids[0]) > 4 >= len(ids[1])
    kept = [each[-4:] if side == "left" else each[:4] for each in ids]
    for asked in (texts, ids):
        answer = post(embedding_gateway, input=asked, truncate_prompt_tokens=4, truncation_side=side).json()
        vectors = [item["embedding"] for item in answer["data"]]
        np.testing.assert_allclose(vectors, [unit(echoed_numbers(each, [])) for each in kept], atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, kept))


def test_minus_one_keeps_what_an_embedding_model_takes(embedding_gateway: Gateway) -> None:
    prompt = [3 + i % 500 for i in range(MAX_MODEL_LEN + 5)]
    answer = post(embedding_gateway, input=prompt, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1
    expected = unit(echoed_numbers(prompt[: MAX_MODEL_LEN - 1], []))
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input.0"),
        ({"input": ""}, "input"),
        ({"input": [1024]}, "input"),
        ({"input": [5] * MAX_MODEL_LEN}, "input"),
        ({"input": ["a"] * (LIMITS.texts + 1)}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "priority": 3}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_mistakes_name_their_field(embedding_gateway: Gateway, body: dict[str, Any], param: str) -> None:
    assert error(post(embedding_gateway, **body))[:2] == (400, param)


def test_an_engine_that_refuses(embedding_gateway: Gateway) -> None:
    assert error(post(embedding_gateway, input="a", cache_salt="refuse"))[0] == 400


def test_models_of_another_task_refuse(gateway: Gateway, embedding_gateway: Gateway) -> None:
    routes = {
        "/v1/embeddings": {"input": "a"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
    }
    for path, body in routes.items():
        status, param, message = error(post(gateway, path, **body))
        assert (status, param) == (400, "model")
        assert "has the task generate" in message
    client = embedding_gateway.openai()
    with pytest.raises(openai.BadRequestError, match="has the task embed"):
        client.completions.create(model="chat", prompt="a")
    with pytest.raises(openai.BadRequestError, match="has the task embed"):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "a"}], stream=True)


def test_models_say_their_task(gateway: Gateway, embedding_gateway: Gateway) -> None:
    for one, task in ((gateway, "generate"), (embedding_gateway, "embed")):
        with one.http() as http:
            assert {card["task"] for card in http.get("/v1/models").json()["data"]} == {task}


def test_metrics_count_prompts_and_no_tokens(embedding_gateway: Gateway) -> None:
    def value(name: str, **labels: str) -> float:
        labels = {"model_name": "code", "engine": "0", **labels}
        return embedding_gateway.metrics.registry.get_sample_value(name, labels) or 0

    finished = {"finished_reason": "stop"}
    before = value("vllm:request_success_total", **finished), value("vllm:prompt_tokens_total")
    assert post(embedding_gateway, model="code", input=[LONG, LONG]).status_code == 200
    after = value("vllm:request_success_total", **finished), value("vllm:prompt_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 2 * len(LONG))
    assert value("vllm:generation_tokens_total") == 0
    assert embedding_gateway.clients["code"].outlook.queued.num_tokens == 0


def test_a_model_of_its_own_port_need_not_be_named(embedding_gateway: Gateway) -> None:
    answer = httpx.post(f"{embedding_gateway.model_url}/v1/embeddings", json={"input": "a"}, timeout=PATIENCE_S)
    assert answer.json()["model"] == "chat"
    path = "/models/code/v1/embeddings"
    with embedding_gateway.http() as http:
        assert http.post(path, json={"input": "a"}).json()["model"] == "code"


def test_cached_tokens_may_be_kept_secret(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, pooling=RECIPE, policy=ClientPolicy("salted"))
    try:
        plain, salted = (post(gateway, input="a", **more).json()["usage"] for more in ({}, {"cache_salt": "mine"}))
    finally:
        stop()
    assert "prompt_tokens_details" not in plain
    assert salted["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_request_wakes_a_model_that_is_asleep(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """`chat` wakes for requests, `code` does not; one of another task wakes nobody."""
    gateway, stop = start_gateway(tmp_path, tokenizer, pooling=RECIPE)
    try:
        with gateway.admin() as admin:
            for name in ("chat", "code"):
                assert admin.post(f"/admin/models/{name}/sleep").status_code == 200
            assert error(post(gateway, "/v1/completions", prompt="a"))[1] == "model"
            assert gateway.clients["chat"].state is EngineState.ASLEEP
        assert post(gateway, input="a").status_code == 200
        assert post(gateway, model="code", input="a").status_code == 503
        with ThreadPoolExecutor(1) as clients:
            with gateway.preparing_nothing("chat") as threads, gateway.admin() as admin:
                answer = clients.submit(post, gateway, input="a")
                wait_for("the request to be prepared", lambda: threads.num_waiting)
                assert admin.post("/admin/models/chat/sleep").status_code == 200
            assert answer.result().status_code == 200
    finally:
        stop()


def test_a_request_does_not_go_on_with_other_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, pooling=RECIPE)
    client = gateway.clients["chat"]
    try:
        with ThreadPoolExecutor(1) as clients:
            with gateway.engines["chat"].standing_still():
                answer = clients.submit(post, gateway, input=[[3 + i] for i in range(client.max_sequences + 1)])
                wait_for("its first sequences to begin", lambda: client.num_in_flight)
                gateway.call(gateway.models["chat"].threads.close)  # as when it is reloaded
            assert answer.result().status_code == 503
            assert "reloaded or removed meanwhile" in answer.result().json()["error"]["message"]
    finally:
        stop()


def test_nothing_is_left_of_a_client_that_hangs_up(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, pooling=RECIPE)
    client = gateway.clients["chat"]
    try:
        with gateway.engines["chat"].standing_still():
            with gateway.asking("/v1/embeddings", {"model": "chat", "input": [[i] for i in range(3, 600)]}):
                wait_for("its sequences to begin", lambda: client.num_in_flight)
            wait_for("its sequences to end", lambda: client.num_in_flight == 0)
        assert client.outlook.queued.num_tokens == 0
    finally:
        stop()
