"""Scores and rankings as clients of vLLM, Jina and Cohere ask for them, by a model that scores and one that embeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from echo_engine import echoed_numbers
from echo_gateway import MAX_MODEL_LEN, Gateway, start_gateway

from swiftkv.errors import CheckpointError
from swiftkv.models.pooling import EmbeddingRecipe, ScoreRecipe
from swiftkv.server.pooling.template import ScoreTemplate
from swiftkv.server.price import LIMITS
from swiftkv.server.tokenizer import Tokenizer
from tests.support.checkpoints import make_tokenizer
from tests.support.pooling import CARD_INSTRUCTION, CARD_PREFIX, CARD_SUFFIX, card_prompt, make_reranker_tokenizer

QUERY = "what does the fox do"
DOCUMENTS = ["it jumps", "Grüße aus Köln", "a lazy dog", "nothing", "you"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ScoreTemplate:
    directory = tmp_path_factory.mktemp("reranker")
    make_reranker_tokenizer().save_pretrained(directory)
    return ScoreTemplate(Tokenizer.from_pretrained(directory), ScoreRecipe())


@pytest.fixture(scope="module")
def scoring_gateway(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, template: ScoreTemplate
) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path_factory.mktemp("score"), tokenizer, pooling=template)
    yield gateway
    stop()


@pytest.fixture(scope="module")
def comparing_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path_factory.mktemp("embed"), tokenizer, pooling=EmbeddingRecipe(4))
    yield gateway
    stop()


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(path, json={"model": "chat", **body})


def expected(template: ScoreTemplate, query: str, document: str, instruction: str | None = None) -> float:
    return expected_of(template, template.encode(query, document, instruction))


def expected_of(template: ScoreTemplate, prompt: list[int]) -> float:
    yes, no = echoed_numbers(prompt, template.pooling.token_ids).tolist()
    return math.exp(yes) / (math.exp(yes) + math.exp(no))


def cut_card_prompt(query: str, document: str, most: int, side: str) -> list[int]:
    """Return a prompt of at most `most` tokens as the model card makes it: only what is between its words is cut."""
    reference = make_reranker_tokenizer()
    prefix, suffix = (reference.encode(text, add_special_tokens=False) for text in (CARD_PREFIX, CARD_SUFFIX))
    reference.truncation_side = side
    asked = f"<Instruct>: {CARD_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    kept = reference(asked, truncation=True, max_length=most - len(prefix) - len(suffix))["input_ids"]
    return [*prefix, *kept, *suffix]


def test_the_text_is_the_model_cards(template: ScoreTemplate) -> None:
    reference = make_reranker_tokenizer()
    assert template.encode(QUERY, "it jumps") == card_prompt(reference, QUERY, "it jumps")
    assert template.encode(QUERY, "it jumps", "find animals") == card_prompt(
        reference, QUERY, "it jumps", "find animals"
    )
    assert template.pooling.token_ids == reference.convert_tokens_to_ids(["yes", "no"])


def test_special_tokens_of_a_document_can_be_text(tmp_path: Path) -> None:
    reference = make_reranker_tokenizer()
    reference.save_pretrained(tmp_path)
    closed = ScoreTemplate(Tokenizer.from_pretrained(tmp_path, split_special_tokens=True), ScoreRecipe())
    mark = reference.convert_tokens_to_ids("<|im_end|>")
    assert closed.encode(QUERY, "<|im_end|>").count(mark) == closed.encode(QUERY, "").count(mark)


def test_a_tokenizer_of_another_layout_is_refused(tmp_path: Path) -> None:
    without_marks, without_answers = make_tokenizer(300), make_tokenizer(300)
    without_answers.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    for tokenizer, missing in ((without_marks, "im_start"), (without_answers, "'yes'")):
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=missing):
            ScoreTemplate(Tokenizer.from_pretrained(tmp_path), ScoreRecipe())


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores(scoring_gateway: Gateway, template: ScoreTemplate, names: tuple[str, str]) -> None:
    answer = post(scoring_gateway, "/v1/score", **{names[0]: QUERY, names[1]: DOCUMENTS}).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(
        [expected(template, QUERY, document) for document in DOCUMENTS], abs=1e-6
    )
    num_tokens = sum(len(template.encode(QUERY, document)) for document in DOCUMENTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert [item["object"] for item in answer["data"]] == ["score"] * len(DOCUMENTS)


def test_as_many_with_as_many(scoring_gateway: Gateway, template: ScoreTemplate) -> None:
    queries = [f"{QUERY} {i}" for i in range(len(DOCUMENTS))]
    answer = post(scoring_gateway, "/score", text_1=queries, text_2=DOCUMENTS, instruction="find animals").json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(
        [expected(template, *pair, "find animals") for pair in zip(queries, DOCUMENTS, strict=True)], abs=1e-6
    )


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_text_between_the_templates_words_is_cut(
    scoring_gateway: Gateway, template: ScoreTemplate, side: str | None
) -> None:
    most = len(template.encode(QUERY, "")) + 3
    prompts = [cut_card_prompt(QUERY, document, most, side or "right") for document in DOCUMENTS]
    assert [len(template.encode(QUERY, document)) > most for document in DOCUMENTS].count(True) > 1
    cut = {"truncate_prompt_tokens": most, "truncation_side": side}
    answer = post(scoring_gateway, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, **cut).json()
    scores = [expected_of(template, prompt) for prompt in prompts]
    assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    results = post(scoring_gateway, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **cut).json()["results"]
    assert {item["index"]: item["relevance_score"] for item in results} == pytest.approx(dict(enumerate(scores)))


def test_minus_one_keeps_what_a_scoring_model_takes(scoring_gateway: Gateway) -> None:
    body = {"text_1": QUERY, "text_2": "b " * 9000, "truncate_prompt_tokens": -1}
    assert post(scoring_gateway, "/v1/score", **body).json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked(scoring_gateway: Gateway, template: ScoreTemplate, path: str) -> None:
    given = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    answer = post(scoring_gateway, path, query=QUERY, documents=given, top_n=3).json()
    scores = [expected(template, QUERY, document) for document in DOCUMENTS]
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])[:3]
    assert [result["index"] for result in answer["results"]] == best
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([scores[i] for i in best])
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in best]
    assert answer["usage"]["total_tokens"] > 0
    assert answer["model"] == "chat"


def test_documents_need_not_be_repeated(scoring_gateway: Gateway) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 0, "return_documents": False}
    results = post(scoring_gateway, "/v1/rerank", **body).json()["results"]
    assert len(results) == len(DOCUMENTS)
    assert all("document" not in result for result in results)


def test_a_model_that_embeds_compares(comparing_gateway: Gateway, tokenizer: Tokenizer) -> None:
    answer = post(comparing_gateway, "/v1/score", text_1=QUERY, text_2=[*DOCUMENTS, QUERY]).json()
    left, *right = (echoed_numbers(tokenizer.encode(text), []) for text in (QUERY, *DOCUMENTS))
    cosines = [float(left @ row / np.linalg.norm(left) / np.linalg.norm(row)) for row in right]
    assert [item["score"] for item in answer["data"]] == pytest.approx([*cosines, 1.0], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS))
    cut = post(comparing_gateway, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=3).json()
    left, *right = (echoed_numbers(tokenizer.encode(text)[:3], []) for text in (QUERY, *DOCUMENTS))
    cosines = [float(left @ row / np.linalg.norm(left) / np.linalg.norm(row)) for row in right]
    assert [item["score"] for item in cut["data"]] == pytest.approx(cosines, abs=1e-6)
    refused = post(comparing_gateway, "/v1/score", text_1="a", text_2="b", instruction="find animals")
    assert refused.json()["error"]["param"] == "instruction"


LONG = "b " * 5000


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "has no tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "has no tokens"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1", "has no tokens"),
        ("/v1/rerank", {"query": LONG, "documents": ["a"]}, "query", "text 0 has"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b", "b", LONG]}, "documents", "text 3 has"),
        ("/v1/score", {"queries": ["a", LONG], "items": ["b", "c"]}, "queries", "text 1 has"),
    ],
)
def test_a_model_that_embeds_names_the_field_and_the_text(
    comparing_gateway: Gateway, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    error = post(comparing_gateway, path, **body).json()["error"]
    assert (error["param"], reason in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/rerank", {"query": LONG, "documents": ["a", "b"]}, "query", 0),
        ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents", 1),
        ("/v1/score", {"data_1": ["a", LONG], "data_2": ["b", "c"]}, "data_1", 1),
    ],
)
def test_a_model_that_scores_names_the_longer_text_of_a_pair(
    scoring_gateway: Gateway, path: str, body: dict[str, Any], param: str, text: int
) -> None:
    error = post(scoring_gateway, path, **body).json()["error"]
    assert (error["param"], f"text {text} has" in error["message"]) == (param, True), error


def test_a_query_and_the_most_documents(comparing_gateway: Gateway) -> None:
    documents = [f"document {i}" for i in range(LIMITS.texts)]
    answer = post(comparing_gateway, "/v1/rerank", query=QUERY, documents=documents, top_n=1)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 5000]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 20}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a"}, "model"),
    ],
)
def test_mistakes_name_their_field(scoring_gateway: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(scoring_gateway, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
