"""A model with drafts beside the same model without: clients get the same, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory
from tests.support.schemas import SCHEMAS

PROMPT = "one two three four one two three four one two"
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 3, "n": 3},
    "log-probabilities": {"temperature": 0.0, "logprobs": 2},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "a loop": {"temperature": 0.0, "logit_bias": {"44": 100}},
    "a grammar": {
        "temperature": 0.0,
        "extra_body": {"structured_outputs": {"json": SCHEMAS["invoice"], "disable_any_whitespace": True}},
    },
}


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    temporary = short_temporary_directory()
    model = {"path": str(checkpoint), "dtype": "float32", "threads": 1, "max_model_len": 1024}
    models = [
        {**model, "name": name, "kv_cache": {"memory": "32MiB"}, "speculative_config": drafts}
        for name, drafts in (("plain", "off"), ("drafts", {}))
    ]
    with NodeProcess({"node": {"port": 0}, "models": models}, tmp_path_factory.mktemp("drafts"), temporary) as node:
        yield node
    remove(temporary)


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def complete(client: openai.OpenAI, name: str, **asked: Any) -> dict[str, Any]:
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=100, **asked)
    return answer.model_dump(exclude={"id", "created", "model"})


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_whole_answers_are_the_same(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    assert complete(client, "drafts", **asked) == complete(client, "plain", **asked)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_streams_say_the_same(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    chunks = list(client.completions.create(model="drafts", prompt=PROMPT, max_tokens=100, stream=True, **asked))
    for choice in complete(client, "plain", **asked)["choices"]:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice["index"]]
        assert "".join(c.text for c in own) == choice["text"]
        assert own[-1].finish_reason == choice["finish_reason"]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_an_answer_ends_at_a_stop_string_within_a_draft(client: openai.OpenAI, length: int) -> None:
    text = complete(client, "plain", **ASKED["a loop"])["choices"][0]["text"]
    stop = text[30 : 30 + length]
    ended = [complete(client, name, **ASKED["a loop"], stop=stop) for name in ("plain", "drafts")]
    assert ended[0]["choices"][0]["finish_reason"] == "stop"
    assert ended[0] == ended[1]


def drafts_so_far(node: NodeProcess, model: str) -> list[float]:
    """Return the drafts, the tokens in them, and those that were right."""
    lines = httpx.get(f"{node.url}/metrics").text.splitlines()
    labels = f'{{engine="0",model_name="{model}"}}'
    names = [f"vllm:spec_decode_num_{what}_total{labels}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]


def test_metrics_count_drafts(client: openai.OpenAI, node: NodeProcess) -> None:
    for name in ("plain", "drafts"):
        complete(client, name, **ASKED["a loop"])
    drafts, guesses, right = drafts_so_far(node, "drafts")
    assert 0 < drafts <= guesses
    assert 0 <= right <= guesses
    assert drafts_so_far(node, "plain") == [0, 0, 0]
