"""A chat borrows nearly all that an embedding model beside it has, and both answer as ever; a model that ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.support.checkpoints import make_checkpoint
from tests.support.lending_node import LendingNode
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, wait_for
from tests.support.pooling import (
    card_prompt,
    card_score,
    embedding,
    make_embedding_checkpoint,
    make_reranker_checkpoint,
)

TEXTS = ["where it is", "here it is, " * 12, "nothing"]


@dataclass(frozen=True)
class Setting:
    node: NodeProcess
    embedder: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("embedding")
    make_checkpoint(directory / "chat", "llama", tokenizer=True, num_hidden_layers=6, max_position_embeddings=8192)
    embedder = make_embedding_checkpoint(directory / "search", max_position_embeddings=2048)
    models: list[dict[str, Any]] = [
        {"name": "chat", "role": "master", "kv_cache": {"memory": "400KiB"}},
        {
            "name": "search",
            "task": "embed",
            "matryoshka_dimensions": [16, 32],
            "kv_cache": {"memory": "8MiB"},
            "lending": {"budget": "90%", "window": "200ms"},
        },
    ]
    models = [{"path": str(directory / model["name"]), "dtype": "float32", "threads": 1, **model} for model in models]
    tokenizer = AutoTokenizer.from_pretrained(directory / "search")
    with NodeProcess({"node": {"port": 0}, "models": models}, directory, short_temporary_directory()) as node:
        yield Setting(node, embedder, tokenizer)
    remove(node.temporary)


def test_a_chat_borrows_from_a_model_that_embeds(setting: Setting) -> None:
    """A conversation of several times the chat's own pool, while the lender embeds; both as if they were alone."""
    node = LendingNode(setting.node)
    client = openai.OpenAI(base_url=f"{setting.node.url}/v1", api_key="none", max_retries=0)
    try:
        wait_for("most of the pool to be lent", lambda: (node.model("search")["lent_bytes"] or 0) > 4 << 20)
        length = node.max_model_len("chat")
        prompt = [3 + i % 290 for i in range(length // 2)]
        body = {"model": "chat", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        first = node.complete({**body, "temperature": 0}).json()["choices"][0]["token_ids"]
        answer = client.embeddings.create(model="search", input=TEXTS)
        again = node.complete({**body, "temperature": 0}).json()["choices"][0]["token_ids"]
        assert node.blocks("chat")["borrowed_cached"] > 0
    finally:
        node.close()
    assert len(first) == 4
    assert first == again
    for item, text in zip(answer.data, TEXTS, strict=True):
        expected = embedding(setting.embedder, setting.tokenizer(text)["input_ids"])
        assert item.embedding == pytest.approx(expected.tolist(), abs=1e-4)


def test_embeddings_that_are_cut(setting: Setting) -> None:
    client = openai.OpenAI(base_url=f"{setting.node.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="search", input=TEXTS[0], dimensions=16)
    expected = embedding(setting.embedder, setting.tokenizer(TEXTS[0])["input_ids"], 16)
    assert answer.data[0].embedding == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_node_says_how_to_ask_each_model(setting: Setting) -> None:
    said = "\n".join(setting.node.lines)
    for route in ("/models/chat/v1/chat/completions", "/models/search/v1/embeddings"):
        assert route in said


@pytest.mark.slow
def test_a_ranking(tmp_path: Path) -> None:
    reranker = make_reranker_checkpoint(tmp_path, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = {"name": "rank", "path": str(tmp_path), "task": "score", "dtype": "float32", "threads": 1}
    temporary = short_temporary_directory()
    body = {"query": "where is it", "documents": TEXTS}
    with NodeProcess({"node": {"port": 0}, "models": [model]}, tmp_path, temporary) as node:
        results = httpx.post(f"{node.url}/v1/rerank", json=body, timeout=DEADLINE_S).json()["results"]
    remove(temporary)
    scores = [card_score(reranker, tokenizer, card_prompt(tokenizer, "where is it", text)) for text in TEXTS]
    found = {result["index"]: result["relevance_score"] for result in results}
    assert [found[index] for index in range(len(TEXTS))] == pytest.approx(scores, abs=1e-4)
    assert list(found.values()) == sorted(found.values(), reverse=True)
