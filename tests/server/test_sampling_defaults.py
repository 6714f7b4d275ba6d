"""Requests that do not say are sampled as the checkpoint's `generation_config.json` has it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from echo_gateway import MAX_MODEL_LEN, Gateway

from swiftkv.engine.messages import SamplingParams
from swiftkv.errors import CheckpointError
from swiftkv.server.messages_api.body import MessagesBody
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.sampling import sequence_requests
from swiftkv.server.sampling_defaults import SamplingDefaults, sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": None}
MESSAGES = [{"role": "user", "content": "x"}]


def sampling(gateway: Gateway, defaults: SamplingDefaults, body: ChatBody | CompletionBody) -> SamplingParams:
    known = gateway.models["chat"]
    model = replace(known, defaults=defaults)
    return sequence_requests(model, body, [[1, 2, 3]])[0].sampling


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


def test_a_file_gives_what_requests_leave_out(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    defaults = sampling_defaults("auto", tmp_path, Path())
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert defaults.differences() == "temperature 0.6, top_p 0.95, top_k 20"
    left_out = sampling(gateway, defaults, chat(temperature=None))
    assert (left_out.temperature, left_out.top_p, left_out.top_k, left_out.min_p) == (0.6, 0.95, 20, 0.0)
    said = sampling(gateway, defaults, chat(temperature=0, top_p=1, top_k=0, repetition_penalty=1.1))
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (0.0, 1.0, 0, 1.1)


@pytest.mark.parametrize(
    "body",
    [
        CompletionBody.model_validate({"prompt": "x", "seed": -1}),
        chat(seed=-1),
        ResponsesBody.model_validate({"input": "x", "seed": -1}).chat,
        MessagesBody.model_validate({"messages": MESSAGES, "max_tokens": 1, "seed": -1}).chat,
    ],
    ids=["completion", "chat", "response", "message"],
)
def test_minus_one_is_no_seed(gateway: Gateway, body: ChatBody | CompletionBody) -> None:
    """vLLM's parameters have it so; other negative numbers are seeds there, too."""
    assert sampling(gateway, SamplingDefaults(), body).seed is None
    assert sampling(gateway, SamplingDefaults(), body.model_copy(update={"seed": -2})).seed == -2


def test_the_file_limits_every_answer(gateway: Gateway) -> None:
    defaults = SamplingDefaults(max_new_tokens=50)
    for body, expected in (
        (chat(), 50),
        (chat(max_tokens=10), 10),
        (chat(max_completion_tokens=1000), 50),
        (CompletionBody.model_validate({"prompt": "x"}), 16),
        (CompletionBody.model_validate({"prompt": "x", "max_tokens": 100}), 50),
    ):
        assert sampling(gateway, defaults, body).max_tokens == expected
    assert sampling(gateway, SamplingDefaults(), chat()).max_tokens == MAX_MODEL_LEN - 3


def test_the_file_is_found_where_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "generation_config.json").write_text('{"min_p": 0.1, "temperature": 1}')
    checkpoint = tmp_path / "checkpoint"
    assert sampling_defaults("auto", checkpoint, tmp_path) == SamplingDefaults()
    assert sampling_defaults("vllm", tmp_path / "own", tmp_path) == SamplingDefaults()
    found = sampling_defaults("own", checkpoint, tmp_path)
    assert (found, found.differences()) == (SamplingDefaults(min_p=0.1), "min_p 0.1")
    with pytest.raises(CheckpointError, match="there is no"):
        sampling_defaults("elsewhere", checkpoint, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 0}', '{"max_new_tokens": 0}'])
def test_a_wrong_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_defaults("auto", tmp_path, tmp_path)
