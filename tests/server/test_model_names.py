"""The further names by which clients may ask for a model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from echo_gateway import Gateway, start_gateway, wait_until

from swiftkv.server.tokenizer import Tokenizer

NAME = "org/chat-7B:latest"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("names")
    gateway, stop = start_gateway(directory, tokenizer, state=directory, further_names=(NAME,))
    yield gateway
    stop()


def test_a_model_is_listed_by_all_its_names(gateway: Gateway) -> None:
    client = gateway.openai()
    assert {"chat", NAME} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(NAME).id == NAME
    assert [model.id for model in gateway.openai("/models/chat/v1").models.list()] == ["chat", NAME]


@pytest.mark.parametrize("path", ["/v1", "/models/chat/v1"])
@pytest.mark.parametrize("asked", ["chat", NAME])
def test_a_model_answers_by_its_own_name_whatever_it_was_asked_by(gateway: Gateway, path: str, asked: str) -> None:
    answer = gateway.openai(path).completions.create(model=asked, prompt="hello", max_tokens=2)
    assert answer.model == "chat"
    assert [choice.finish_reason for choice in answer.choices] == ["length"]


def test_other_names_are_refused(gateway: Gateway) -> None:
    for path in ("/v1", "/models/chat/v1"):
        with pytest.raises(openai.NotFoundError, match="org/other"):
            gateway.openai(path).completions.create(model="org/other", prompt="hello")


def test_lines_of_batches_may_have_it(gateway: Gateway) -> None:
    client = gateway.openai()
    body = {"model": NAME, "prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert json.loads(client.files.content(output).text)["response"]["body"]["model"] == "chat"
