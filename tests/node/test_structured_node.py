"""Structured output of a whole node, with OpenAI's own client: random weights, so the grammar does all the work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import psutil
import pytest

from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory
from tests.support.schemas import SCHEMAS, Solution

MESSAGES: Any = [{"role": "user", "content": "Solve 8x + 7 = -23, as JSON."}]
INVOICE = SCHEMAS["invoice"]
COMPACT = {"structured_outputs": {"json": INVOICE, "disable_any_whitespace": True}}


@pytest.fixture(scope="module")
def node(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    temporary = short_temporary_directory()
    model = {"name": "chat", "path": str(checkpoint), "dtype": "float32", "threads": 1, "max_model_len": 2048}
    config = {"node": {"port": 0}, "models": [{**model, "kv_cache": {"memory": "32MiB"}}]}
    with NodeProcess(config, tmp_path_factory.mktemp("structured"), temporary) as node:
        yield node
        children = psutil.Process(node.process.pid).children(recursive=True)  # those that check grammars among them
        node.process.terminate()
        node.process.wait(DEADLINE_S)
        assert not psutil.wait_procs(children, DEADLINE_S)[1]
    remove(temporary)


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_parse_returns_objects_of_the_class(client: openai.OpenAI, temperature: float) -> None:
    parsed = client.chat.completions.parse(
        model="chat", messages=MESSAGES, response_format=Solution, temperature=temperature, seed=1, max_tokens=1500
    )
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Solution)
    next_turn: Any = [*MESSAGES, parsed.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model="chat", messages=next_turn, max_tokens=1).choices


def test_a_stream_and_a_whole_answer_are_the_same_object(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": MESSAGES, "temperature": 1.0, "seed": 7, "extra_body": COMPACT}
    whole = client.chat.completions.create(**asked, max_tokens=500).choices[0]
    chunks = list(client.chat.completions.create(**asked, max_tokens=500, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert jsonschema_rs.is_valid(INVOICE, json.loads(streamed))


def test_every_choice_is_held_and_they_differ(client: openai.OpenAI) -> None:
    pattern = "(red|green|blue) [0-9]{3}"
    answer = client.completions.create(
        model="chat", prompt="Pick:", n=5, temperature=1.5, seed=3, max_tokens=50, logprobs=1,
        extra_body={"guided_regex": pattern},
    )  # fmt: skip
    texts = [choice.text for choice in answer.choices]
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []
    assert len(set(texts)) > 1


def test_a_stop_string_or_the_last_token_ends_an_answer_early(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": MESSAGES, "temperature": 0, "extra_body": COMPACT}
    short = client.chat.completions.create(**asked, max_tokens=5).choices[0]
    stopped = client.chat.completions.create(**asked, max_tokens=500, stop='"currency"').choices[0]
    assert short.finish_reason == "length"
    assert (stopped.finish_reason, stopped.message.content[-1:]) == ("stop", ",")
    assert str(stopped.message.content).startswith('{"number":"INV-')


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    # A bias for what ends strings and objects: else a random model never does.
    vocabulary = client.post("/../tokenize", body={"prompt": '"}'}, cast_to=object)
    bias = {str(token): 12 for token in vocabulary["tokens"]}  # type: ignore[index]
    answer = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        logit_bias=bias,
        max_tokens=1000,
        seed=3,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(str(answer.choices[0].message.content)), dict)


def test_a_wrong_schema_is_a_bad_request(client: openai.OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "("}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="chat", messages=MESSAGES, response_format=wrong)
    assert refused.value.param == "response_format.json_schema.schema"
