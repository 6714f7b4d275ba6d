from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from echo_gateway import MAX_MODEL_LEN, TEXT, Gateway
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.truncation import Truncation, TruncationSide

IDS = list(range(300, 340))
USER = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 3}]
COMPLETION: dict[str, Any] = {"model": "chat", "prompt": IDS, "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "chat", "messages": USER, "max_tokens": 3}


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.http() as client:
        yield client


@pytest.fixture(scope="module")
def framed(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that puts special tokens at both ends of a text."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    ends = [(name, backend.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def answer(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def rendered(http: httpx.Client, body: dict[str, Any]) -> list[int]:
    is_chat = "messages" in body
    told = answer(http, f"/v1/{'chat/' if is_chat else ''}completions/render", body)
    return list((told if is_chat else told[0])["token_ids"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("most", [3, 4, 11, 1000])
def test_a_text_is_cut_as_transformers_cuts_it(
    framed: PreTrainedTokenizerFast, most: int, add_special_tokens: bool, side: TruncationSide
) -> None:
    ours = Tokenizer(framed).encode(TEXT, cut=Truncation(most, side), add_special_tokens=add_special_tokens)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(framed.backend_tokenizer.to_str()), truncation_side=side
    )
    options: dict[str, Any] = {"truncation": True, "max_length": most, "add_special_tokens": add_special_tokens}
    assert ours == theirs(TEXT, **options)["input_ids"]
    assert len(ours) <= most


def test_no_more_is_kept_than_asked_for_where_special_tokens_alone_are_more(framed: PreTrainedTokenizerFast) -> None:
    ids = Tokenizer(framed).encode(TEXT, cut=Truncation(1))
    assert ids == [framed.backend_tokenizer.token_to_id("<|im_end|>")]


@pytest.mark.parametrize(("side", "kept"), [(None, IDS[-7:]), ("left", IDS[-7:]), ("right", IDS[:7])])
@pytest.mark.parametrize("prompt", ["ids", "text"])
def test_a_prompt_is_cut_on_the_side_that_is_asked_for(
    http: httpx.Client, tokenizer: Tokenizer, prompt: str, side: str | None, kept: list[int]
) -> None:
    text = tokenizer.decode(IDS)
    cut = {"truncate_prompt_tokens": 7, "truncation_side": side}
    if prompt == "text":
        ids = tokenizer.encode(text)
        kept = ids[:7] if side == "right" else ids[-7:]
    asked = IDS if prompt == "ids" else text
    body = {**COMPLETION, **cut, "prompt": asked, "return_token_ids": True, "echo": True}
    told = answer(http, "/v1/completions", body)
    [choice] = told["choices"]
    assert choice["prompt_token_ids"] == kept
    assert told["usage"]["prompt_tokens"] == 7
    # The echo engine repeats what it was sent, so it was sent the cut prompt.
    assert choice["token_ids"] == kept[:3]
    assert choice["text"] == tokenizer.decode(kept + kept[:3])


def test_of_several_prompts_those_that_are_too_long_are_cut(http: httpx.Client) -> None:
    prompts = [IDS, IDS[:5], IDS[:8]]
    told = answer(http, "/v1/completions/render", {**COMPLETION, "prompt": prompts, "truncate_prompt_tokens": 5})
    assert [prompt["token_ids"] for prompt in told] == [IDS[-5:], IDS[:5], IDS[3:8]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_chat_is_cut_behind_its_template(http: httpx.Client, side: str) -> None:
    whole = rendered(http, CHAT)
    cut = rendered(http, {**CHAT, "truncate_prompt_tokens": 10, "truncation_side": side})
    assert cut == (whole[-10:] if side == "left" else whole[:10])


def test_a_stream_begins_behind_the_cut_prompt(http: httpx.Client, gateway: Gateway) -> None:
    kept = rendered(http, CHAT)[-10:]
    chunks = list(
        gateway.openai().chat.completions.create(
            model="chat",
            messages=CHAT["messages"],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"truncate_prompt_tokens": 10, "return_token_ids": True},
        )
    )
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["prompt_token_ids"] == kept
    ids = [token for chunk in chunks[1:-1] for token in (chunk.choices[0].model_extra or {})["token_ids"]]
    assert ids == kept[:3]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 10


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [
        ({"max_tokens": 100}, MAX_MODEL_LEN - 100),
        ({"max_tokens": None}, MAX_MODEL_LEN - 16),  # the tokens of a completion that does not say how many
        ({"max_tokens": 0, "echo": True}, MAX_MODEL_LEN - 1),  # the engine generates one all the same
    ],
)
def test_minus_one_keeps_what_the_model_takes_of_a_completion(
    http: httpx.Client, fields: dict[str, Any], num_kept: int
) -> None:
    prompt = (IDS * (MAX_MODEL_LEN // len(IDS) + 1))[: MAX_MODEL_LEN + 7]
    body = {**COMPLETION, "prompt": prompt, "truncate_prompt_tokens": -1, **fields}
    assert rendered(http, body) == prompt[-num_kept:]


@pytest.mark.parametrize(("fields", "num_new"), [({"max_completion_tokens": 9}, 9), ({}, 1)])
def test_minus_one_keeps_what_the_model_takes_of_a_chat(
    http: httpx.Client, fields: dict[str, Any], num_new: int
) -> None:
    messages = [{"role": "user", "content": TEXT * 200}]
    asked = {"model": "chat", "messages": messages, **fields}
    refused = http.post("/v1/chat/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    told = answer(http, "/v1/chat/completions", {**asked, "truncate_prompt_tokens": -1})
    counts = told["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (MAX_MODEL_LEN - num_new, num_new)


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("most", [0, -2, MAX_MODEL_LEN - 2, 2**40])
def test_what_cannot_be_kept_is_refused(http: httpx.Client, body: dict[str, Any], most: int) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = http.post(path, json={**body, "truncate_prompt_tokens": most})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_prompt_that_would_take_long_to_cut_is_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={**COMPLETION, "prompt": "a" * 1_100_000, "truncate_prompt_tokens": 5})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "limit_exceeded")
