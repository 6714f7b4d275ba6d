"""The fields of a request that become rules about single tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from echo_gateway import Gateway, train_tokenizer

from swiftkv.engine.messages import ReasoningMarks, SamplingParams
from swiftkv.server.errors import ApiError
from swiftkv.server.messages_api.body import MessagesBody
from swiftkv.server.models import ModelHandle
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.sampling import sequence_requests
from swiftkv.server.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "x"}]
TAGS = ["<think>", "</think>"]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


def sampling(
    model: ModelHandle, body: ChatBody | CompletionBody, text: str = "a", grammar: str | None = None
) -> SamplingParams:
    prompt = model.tokenizer.encode(text, add_special_tokens=False)
    return sequence_requests(model, body, [prompt], grammar)[0].sampling


def thinking(gateway: Gateway, directory: Path, tags: list[str], parser: str) -> ModelHandle:
    """Return a model with a reasoning parser."""
    train_tokenizer(directory, tags)
    tokenizer = Tokenizer.from_pretrained(directory)
    return replace(gateway.models["chat"], tokenizer=tokenizer, reasoning=choose_reasoning(parser, tokenizer))


def test_bad_words_are_spelled_with_and_without_a_space_before_them(gateway: Gateway) -> None:
    model = gateway.models["chat"]

    def spelled(*words: str) -> list[list[int]]:
        return sampling(model, chat(bad_words=list(words))).bad_words

    def ids(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False)

    for word in ("what", "what is", "1+1?", "größer"):
        first, behind_space = ids(word), ids(f" {word}")
        is_same = behind_space[-len(first) :] == first
        assert spelled(word) == spelled(f"  {word}") == [first, *([] if is_same else [behind_space])]
    assert spelled("1", "2") == [*spelled("1"), *spelled("2")]
    assert spelled() == sampling(model, CompletionBody.model_validate({"prompt": "x"})).bad_words == []


def test_allowed_tokens_and_grammars_exclude_each_other(gateway: Gateway) -> None:
    model = gateway.models["chat"]
    assert sampling(model, chat()).allowed_token_ids is None
    assert sampling(model, chat(allowed_token_ids=[5, 6])).allowed_token_ids == [5, 6]
    body = {"model": "chat", "messages": MESSAGES, "allowed_token_ids": [5], "response_format": {"type": "json_object"}}
    with gateway.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_reasoning_that_ends_with_a_tag_may_have_a_budget(gateway: Gateway, tmp_path: Path) -> None:
    model = thinking(gateway, tmp_path, TAGS, "qwen3")
    begin, end = (model.tokenizer.token_id(tag) for tag in TAGS)
    assert begin is not None
    assert end is not None
    asked = sampling(model, chat(thinking_token_budget=7))
    assert (asked.reasoning, asked.thinking_budget) == (ReasoningMarks([end], begin), 7)
    asked = sampling(model, chat(thinking_token_budget=0), "a<think>")
    assert (asked.reasoning, asked.thinking_budget) == (ReasoningMarks([end]), 0)
    for body, text in (
        (chat(thinking_token_budget=7), "a<think></think>"),
        (chat(thinking_token_budget=-1), "a"),
        (chat(), "a"),
    ):
        asked = sampling(model, body, text)
        assert (asked.reasoning, asked.thinking_budget) == (None, None)
    asked = sampling(model, chat(), grammar="a grammar")
    assert (asked.reasoning, asked.thinking_budget) == (ReasoningMarks([end], begin), None)


def test_a_budget_is_refused_where_reasoning_cannot_be_ended(gateway: Gateway, tmp_path: Path) -> None:
    """In the messages API it has no effect there: its clients send one with each request."""
    message = {"messages": MESSAGES, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for model in (gateway.models["chat"], thinking(gateway, tmp_path, HARMONY, "gpt_oss")):
        with pytest.raises(ApiError, match="needs a models") as refused:
            sampling(model, chat(thinking_token_budget=7))
        assert refused.value.param == "thinking_token_budget"
        assert sampling(model, MessagesBody.model_validate(message).chat).thinking_budget is None
    model = thinking(gateway, tmp_path, TAGS, "qwen3")
    assert sampling(model, MessagesBody.model_validate(message).chat).thinking_budget == 1024
