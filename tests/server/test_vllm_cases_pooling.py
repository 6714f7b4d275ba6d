"""Cases after vLLM's own tests of its server (`tests/entrypoints/pooling` there): embeddings, scores and rankings.

docs/from-vllm.md says which of its tests have their like here or elsewhere, and where swiftkv answers otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from echo_gateway import MAX_MODEL_LEN, start_gateway

from swiftkv.models.pooling import EmbeddingRecipe, ScoreRecipe
from swiftkv.server.pooling.template import ScoreTemplate
from swiftkv.server.tokenizer import Tokenizer
from tests.support.pooling import make_reranker_tokenizer

TEXT = "This product was excellent and exceeded my expectations"
QUERIES = ["What is the capital of France?", "What is the capital of Germany?"]
DOCUMENTS = ["The capital of France is Paris.", "The capital of Germany is Berlin."]
PAIR = {"text_1": QUERIES[0], "text_2": DOCUMENTS[0]}
RANKING = {"query": QUERIES[0], "documents": DOCUMENTS}


@contextmanager
def serving(directory: Path, tokenizer: Tokenizer, **models: Any) -> Iterator[httpx.Client]:
    gateway, stop = start_gateway(directory, tokenizer, **models)
    with gateway.http() as client:
        yield client
    stop()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    recipe = EmbeddingRecipe(4, dimensions=(2,))
    with serving(tmp_path_factory.mktemp("embed"), tokenizer, pooling=recipe) as client:
        yield client


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("reranker")
    make_reranker_tokenizer().save_pretrained(directory)
    template = ScoreTemplate(Tokenizer.from_pretrained(directory), ScoreRecipe())
    with serving(tmp_path_factory.mktemp("score"), tokenizer, pooling=template) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return http.post(path, json={"model": "chat", **body})


def vectors(http: httpx.Client, **body: Any) -> list[list[float]]:
    answer = post(http, "/v1/embeddings", encoding_format="float", **body)
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def test_text_and_its_tokens_are_the_same_alone_and_in_batches(embedder: httpx.Client) -> None:
    tokens = embedder.post("/tokenize", json={"model": "chat", "prompt": TEXT}).json()["tokens"]
    alone = post(embedder, "/v1/embeddings", input=TEXT, encoding_format="float").json()
    assert alone["id"]
    assert alone["created"] > 0
    usage = alone["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(tokens), len(tokens))
    assert usage.get("completion_tokens", 0) == 0
    (vector,) = vectors(embedder, input=tokens)
    assert vector == alone["data"][0]["embedding"]
    for batch in ([TEXT] * 10, [tokens] * 10):
        assert vectors(embedder, input=batch) == [vector] * 10


def test_use_activation_is_the_default_and_makes_the_length_one(embedder: httpx.Client) -> None:
    found = (vectors(embedder, input=TEXT, use_activation=activation) for activation in (None, True, False))
    (default,), (wanted,), (unwanted,) = found
    assert default == wanted != unwanted
    assert wanted == pytest.approx(unwanted / np.linalg.norm(unwanted), abs=1e-6)


def test_dimensions_are_those_that_the_model_was_trained_for(embedder: httpx.Client) -> None:
    assert [len(vector) for vector in vectors(embedder, input=[TEXT] * 3, dimensions=2)] == [2, 2, 2]
    for dimensions in (-1, 3):
        assert post(embedder, "/v1/embeddings", input=TEXT, dimensions=dimensions).status_code == 400


@pytest.mark.parametrize("name", ["encoding_format", "embed_dtype", "endianness"])
def test_a_value_that_is_none_is_refused(embedder: httpx.Client, name: str) -> None:
    answer = post(embedder, "/v1/embeddings", input=TEXT, **{name: f"bad_{name}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXT, "encoding_format": "bytes"}),
        ("/v1/embeddings", {"input": TEXT, "encoding_format": "bytes_only"}),
        ("/v1/embeddings", {"input": TEXT, "embed_dtype": "float16"}),
        ("/v1/embeddings", {"input": TEXT, "endianness": "big"}),
        ("/v1/embeddings", {"input": TEXT, "messages": [{"role": "user", "content": TEXT}]}),
        ("/score", {**PAIR, "use_activation": False}),
        ("/rerank", {**RANKING, "use_activation": False}),
        ("/rerank", {**RANKING, "max_tokens_per_doc": 10}),
    ],
)
def test_what_vllm_takes_and_swiftkv_does_not_is_refused_by_name(
    embedder: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = post(embedder, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(body)[-1])


@pytest.mark.parametrize("path", ["/pooling", "/classify", "/invocations", "/v2/embed"])
def test_routes_that_are_not_there_say_so(embedder: httpx.Client, path: str) -> None:
    assert post(embedder, path, input=TEXT).status_code == 404


@pytest.mark.parametrize("model", ["embedder", "scorer"])
def test_scores_and_rankings_agree(request: pytest.FixtureRequest, model: str) -> None:
    http: httpx.Client = request.getfixturevalue(model)
    scored = post(http, "/score", queries=QUERIES[0], documents=DOCUMENTS).json()
    ranked = post(http, "/rerank", **RANKING).json()
    assert scored["id"]
    assert ranked["id"]
    assert scored["usage"]["prompt_tokens"] == ranked["usage"]["prompt_tokens"]
    by_index = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert [item["score"] for item in scored["data"]] == pytest.approx([by_index[0], by_index[1]])
    best = post(http, "/rerank", **RANKING, top_n=1).json()["results"]
    assert best == ranked["results"][:1]
    in_pairs = post(http, "/score", queries=QUERIES, documents=DOCUMENTS).json()["data"]
    alone = [post(http, "/score", text_1=QUERIES[i], text_2=DOCUMENTS[i]).json()["data"][0]["score"] for i in (0, 1)]
    assert [item["score"] for item in in_pairs] == pytest.approx(alone)


@pytest.mark.parametrize("model", ["embedder", "scorer"])
@pytest.mark.parametrize("body", [{}, {"truncate_prompt_tokens": MAX_MODEL_LEN + 1}], ids=["whole", "cut too late"])
def test_what_is_longer_than_the_model_takes_is_refused(
    request: pytest.FixtureRequest, model: str, body: dict[str, Any]
) -> None:
    http: httpx.Client = request.getfixturevalue(model)
    query = QUERIES[0] * MAX_MODEL_LEN
    assert post(http, "/score", queries=query, documents=DOCUMENTS, **body).status_code == 400
    assert post(http, "/rerank", query=query, documents=DOCUMENTS, **body).status_code == 400
