"""Cases after vLLM's own tests of its server (`tests/entrypoints` there): completions, tokens, errors and metrics.

docs/from-vllm.md says which of its tests have their like here or elsewhere, and where swiftkv answers otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from echo_gateway import MAX_MODEL_LEN, VOCAB_SIZE, Gateway
from prometheus_client.parser import text_string_to_metric_families

from swiftkv import __version__
from swiftkv.server.tokenizer import Tokenizer

IDS = [300, 301, 302, 303, 304]
COMPLETION: dict[str, Any] = {"model": "chat", "prompt": IDS, "max_tokens": 5}
USER: Any = [{"role": "user", "content": "what is 1+1?"}]
CHAT: dict[str, Any] = {"model": "chat", "messages": USER, "max_tokens": 5}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
PATHS = list(BODIES)
INT64_MAX = 2**63 - 1


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.http() as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, json=body)


def answer(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = post(http, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(http, path, body)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = post(http, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(("asked", "least", "most"), [(0, 1, 1), (5, 5, 6)])
def test_a_token_names_as_many_others_as_were_asked_for(http: httpx.Client, asked: int, least: int, most: int) -> None:
    """After test_completion's `test_zero_logprobs` and `test_some_logprobs`."""
    [choice] = answer(http, "/v1/completions", {**COMPLETION, "logprobs": asked})["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert all(least <= len(top) <= most for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_that_nobody_asked_for_are_null(http: httpx.Client, path: str) -> None:
    """After `test_no_logprobs` and `test_no_logprobs_chat`."""
    fields: dict[str, Any] = {"logprobs": False} if "chat" in path else {"logprobs": None}
    whole = answer(http, path, {**BODIES[path], **fields})
    assert whole["choices"][0]["logprobs"] is None
    assert whole.get("prompt_logprobs", whole["choices"][0].get("prompt_logprobs")) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs_are_refused_and_the_next_request_is_answered(
    http: httpx.Client, path: str, stream: bool
) -> None:
    """After `test_too_many_completion_logprobs` and `test_too_many_chat_logprobs`."""
    for number in (21, 30, -1):
        fields = {"logprobs": True, "top_logprobs": number} if "chat" in path else {"logprobs": number}
        assert "logprobs" in refusal(http, path, {**BODIES[path], **fields, "stream": stream})["param"]
    assert answer(http, path, BODIES[path])["choices"]


def test_every_prompt_has_its_logprobs(http: httpx.Client) -> None:
    """After `test_prompt_logprobs_completion`."""
    asked = {**COMPLETION, "prompt": ["A robot may not", "My name is"]}
    for number in (0, 1):
        choices = answer(http, "/v1/completions", {**asked, "prompt_logprobs": number})["choices"]
        assert all(choice["prompt_logprobs"][0] is None for choice in choices)
        assert all(len(entry) >= 1 for choice in choices for entry in choice["prompt_logprobs"][1:])
    assert refusal(http, "/v1/completions", {**asked, "prompt_logprobs": -1})["param"] == "prompt_logprobs"


@pytest.mark.parametrize("prompt", ["Hello, my name is", IDS], ids=["text", "ids"])
@pytest.mark.parametrize("asked", [0, 1])
def test_an_echo_has_the_logprobs_of_its_prompt(
    http: httpx.Client, tokenizer: Tokenizer, prompt: str | list[int], asked: int
) -> None:
    """After `test_echo_logprob_completion`."""
    body = {**COMPLETION, "prompt": prompt, "echo": True, "logprobs": asked}
    [choice] = answer(http, "/v1/completions", body)["choices"]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    shown = choice["logprobs"]
    assert choice["text"].startswith(prompt if isinstance(prompt, str) else tokenizer.decode(ids))
    assert {len(values) for values in shown.values()} == {len(ids) + 5}
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert all(max(asked, 1) <= len(top) <= asked + 1 for top in shown["top_logprobs"][1:])


def test_token_ids_stand_beside_an_echo(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """After `test_comparison_with_prompt_logprobs_and_logprobs` and `test_token_in_token_out_and_logprobs`."""
    body = {**COMPLETION, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True}
    [choice] = answer(http, "/v1/completions", body)["choices"]
    assert choice["prompt_token_ids"] == IDS
    assert tokenizer.decode(choice["prompt_token_ids"] + choice["token_ids"]) == choice["text"]
    assert [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]] == [str(token) for token in IDS[1:]]


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_are_told_once_and_only_if_asked_for(http: httpx.Client, path: str) -> None:
    """After `test_basic_completion_with_emoji` and `test_chat_completion_with_emoji_and_token_ids`."""
    told = chunks(http, path, {**BODIES[path], "return_token_ids": True, "logprobs": "chat" in path or 1})
    with_prompt = ["prompt_token_ids" in chunk or "prompt_token_ids" in chunk["choices"][0] for chunk in told]
    assert with_prompt == [True] + [False] * (len(told) - 1)
    ids = [token for chunk in told for token in chunk["choices"][0].get("token_ids", [])]
    assert len(ids) == 5
    for without in (BODIES[path], {**BODIES[path], "return_token_ids": False}):
        assert "token_ids" not in json.dumps(answer(http, path, without))


def test_offsets_do_not_depend_on_text_that_is_held_back(http: httpx.Client) -> None:
    """After `test_stream_text_offset_matches_non_stream_with_stop_holdback`."""
    body = {**COMPLETION, "prompt": "abc de!\n\t", "max_tokens": 30, "logprobs": 0, "stop": ["\n\n"]}
    [whole] = answer(http, "/v1/completions", body)["choices"]
    told = [choice for chunk in chunks(http, "/v1/completions", body) for choice in chunk["choices"]]
    assert [offset for choice in told for offset in choice["logprobs"]["text_offset"]] == (
        whole["logprobs"]["text_offset"]
    )
    assert "".join(choice["text"] for choice in told) == whole["text"]


@pytest.mark.parametrize("path", PATHS)
def test_the_last_chunk_alone_has_a_reason_and_has_text(http: httpx.Client, path: str) -> None:
    """After `test_completion_streaming` and `test_chat_streaming`."""
    whole = answer(http, path, BODIES[path])["choices"][0]
    told = [chunk["choices"][0] for chunk in chunks(http, path, BODIES[path])]
    assert [choice["finish_reason"] for choice in told] == [None] * (len(told) - 1) + [whole["finish_reason"]]
    if "chat" in path:
        assert [choice["delta"].get("role") for choice in told] == ["assistant"] + [None] * (len(told) - 1)
        assert "".join(choice["delta"].get("content", "") for choice in told) == whole["message"]["content"]
        assert told[-1]["delta"]["content"]
    else:
        assert "".join(choice["text"] for choice in told) == whole["text"]
        assert told[-1]["text"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": False},
        {"include_usage": False, "continuous_usage_stats": True},
        {"include_usage": True, "continuous_usage_stats": False},
    ],
)
def test_usage_comes_last_and_only_if_asked_for(http: httpx.Client, path: str, options: Any) -> None:
    """After `test_completion_stream_options`, `test_chat_completion_stream_options` and `TestUsagePolicyDefault`."""
    *told, last = chunks(http, path, {**BODIES[path], "stream_options": options})
    assert all(chunk.get("usage") is None for chunk in told)
    if not (options or {}).get("include_usage"):
        assert last.get("usage") is None
        assert last["choices"]
        return
    usage = last["usage"]
    assert last["choices"] == []
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_usage_on_the_way_is_in_every_chunk_and_grows(http: httpx.Client, path: str) -> None:
    """After `test_chat_completion_stream_options` and `test_completion_stream_options`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = chunks(http, path, {**BODIES[path], "stream_options": options})
    usages = [chunk["usage"] for chunk in told]
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts[:-1] == sorted(set(counts[:-1]))
    assert counts[-2:] == [5, 5]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
@pytest.mark.parametrize("value", [None, True])
def test_stream_options_are_for_streams(http: httpx.Client, path: str, name: str, value: bool | None) -> None:
    """After `test_completion_stream_options` and `test_chat_completion_stream_options`."""
    error = refusal(http, path, {**BODIES[path], "stream": False, "stream_options": {name: value}})
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}},
        {"regex": "[.*"},
        {"regex": {"1": "Python"}},
        {"grammar": 'root ::= select_nothing\n\ncolumn ::= "col_1 " | "col_2 "'},
        {"grammar": ""},
        {"json": {"type": "object"}, "regex": ".*"},
        3,
    ],
    ids=["schema", "regex", "type of regex", "grammar", "empty grammar", "two", "number"],
)
def test_what_is_no_grammar_is_refused(http: httpx.Client, path: str, wanted: Any) -> None:
    """After `test_invalid_json_schema`, `test_invalid_regex`, `test_invalid_grammar`, `test_empty_grammar`,
    `test_structured_outputs_type_error`, `test_multiple_structured_outputs_rejected` and
    `test_invalid_structured_outputs_type_rejected`."""
    error = refusal(http, path, {**BODIES[path], "structured_outputs": wanted})
    assert error["param"].startswith("structured_outputs")


@pytest.mark.parametrize("path", PATHS)
def test_seeds_have_64_bits(http: httpx.Client, path: str) -> None:
    """After `test_long_seed` and `test_seed_bounds_validation`."""
    for seed in (-INT64_MAX - 2, INT64_MAX + 1):
        assert refusal(http, path, {**BODIES[path], "seed": seed})["param"] == "seed"
    for seed in (-INT64_MAX - 1, INT64_MAX):
        assert len(answer(http, path, {**BODIES[path], "seed": seed, "n": 2})["choices"]) == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {str(VOCAB_SIZE + 1): 1.0}}, [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
        ({"logit_bias": {"not_a_token_id": 50}}, ["logit_bias"]),
        ({"logit_bias": {"1": "not_a_number"}}, ["logit_bias"]),
        ({"stop_token_ids": [VOCAB_SIZE + 1]}, [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids"]),
        ({"allowed_token_ids": [3, VOCAB_SIZE]}, [str(VOCAB_SIZE), "allowed_token_ids"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids"]),
        ({"bad_words": ["a", " \n"]}, ["bad_words"]),
    ],
    ids=["bias", "key", "value", "stop", "negative stop", "allowed", "nothing allowed", "a blank word"],
)
def test_tokens_that_are_none_are_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], named: list[str]
) -> None:
    """After test_chat_logit_bias_validation and test_chat_stop_token_ids_validation."""
    error = refusal(http, path, {**BODIES[path], **fields})
    assert error["param"].startswith(next(iter(fields)))
    assert all(text in error["message"] for text in named)


@pytest.mark.parametrize("path", PATHS)
def test_the_last_token_of_the_vocabulary_is_one(http: httpx.Client, path: str) -> None:
    """After `test_chat_logit_bias_valid` and `test_chat_stop_token_ids_valid`."""
    last = VOCAB_SIZE - 1
    assert answer(http, path, {**BODIES[path], "logit_bias": {str(last): 1.0}, "stop_token_ids": [last]})["choices"]


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_vllm_that_ask_for_nothing_are_taken(http: httpx.Client, path: str) -> None:
    """After vLLM's requests: its clients send them with their defaults. Any other value is refused by name."""
    harmless: dict[str, Any] = {
        "allowed_token_ids": None, "bad_words": [], "early_stopping": False, "include_stop_str_in_output": False,
        "length_penalty": 1.0, "return_tokens_as_token_ids": False, "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None, "use_beam_search": False, "vllm_xargs": {}, "kv_transfer_params": None,
    }  # fmt: skip
    if "chat" in path:
        harmless |= {"echo": False, "add_special_tokens": False, "include_reasoning": True, "documents": None}
    assert answer(http, path, {**BODIES[path], **harmless})["choices"]
    other = {"length_penalty": 2.0, "use_beam_search": True}
    for name, value in other.items():
        error = refusal(http, path, {**BODIES[path], name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_field")


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_is_tokenized_as_it_is_asked_for(
    http: httpx.Client, tokenizer: Tokenizer, add_generation_prompt: bool, continues: bool
) -> None:
    """After `test_tokenize_chat`."""
    body = {"model": "chat", "messages": USER, "add_generation_prompt": add_generation_prompt}
    if continues and add_generation_prompt:
        assert refusal(http, "/tokenize", {**body, "continue_final_message": True})["param"]
        return
    text = "<|im_start|>user\nwhat is 1+1?" + ("" if continues else "<|im_end|>\n")
    ids = tokenizer.encode(text + ("<|im_start|>assistant\n" if add_generation_prompt else ""))
    told = answer(http, "/tokenize", {**body, "continue_final_message": continues})
    assert told == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}


def test_tokens_have_the_names_of_the_vocabulary(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """After `test_tokenize_completions` and `test_tokenize_with_return_token_strs`."""
    body = {"model": "chat", "prompt": "This is a token_strs test prompt! vllm1"}
    for add_special_tokens in (False, True):
        told = answer(http, "/tokenize", {**body, "add_special_tokens": add_special_tokens})
        assert (told["count"], told["token_strs"]) == (len(told["tokens"]), None)
    named = answer(http, "/tokenize", {**body, "return_token_strs": True})
    assert named["token_strs"] == [tokenizer.backend.id_to_token(token) for token in named["tokens"]]
    text = answer(http, "/detokenize", {"model": "chat", "tokens": named["tokens"]})
    assert text == {"prompt": body["prompt"]}


def test_special_tokens_are_added_to_prompts_only(http: httpx.Client) -> None:
    """Unlike `test_tokenize_chat`, which gets a second one in front of what the template has written."""
    body = {"model": "chat", "messages": USER}
    assert answer(http, "/tokenize", {**body, "add_special_tokens": False})["tokens"]
    assert refusal(http, "/tokenize", {**body, "add_special_tokens": True})["param"] == "add_special_tokens"


def test_version_and_health(http: httpx.Client) -> None:
    """After `test_show_version` and `test_check_health`."""
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/health").status_code == 200


def test_a_model_is_retrieved_by_its_name(gateway: Gateway) -> None:
    """After `test_check_models`, `test_retrieve_base_model` and `test_retrieve_unknown_model`."""
    client = gateway.openai()
    cards = [*client.models.list(), client.models.retrieve("chat")]
    assert [card.id for card in cards] == ["chat", "code", "chat"]
    assert all(card.model_extra is not None and card.model_extra["root"] for card in cards)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_ten_requests_are_counted(http: httpx.Client) -> None:
    """After `test_metrics_counts`."""

    def counts() -> dict[str, float]:
        families = text_string_to_metric_families(http.get("/models/code/metrics").text)
        found = [sample for family in families for sample in family.samples]
        return {sample.name: sum(each.value for each in found if each.name == sample.name) for sample in found}

    before = counts()
    for _ in range(10):
        answer(http, "/v1/completions", {**COMPLETION, "model": "code", "max_tokens": 10})
    after = counts()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    of_each = ["time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"]
    of_each += ["request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"]
    of_each += ["request_generation_tokens", "request_params_n", "request_params_max_tokens"]
    assert {name: grown[f"vllm:{name}_count"] for name in of_each} == dict.fromkeys(of_each, 10)
    assert grown["vllm:inter_token_latency_seconds_count"] == 90
    assert grown["vllm:request_prompt_tokens_sum"] == grown["vllm:prompt_tokens_total"] == 50
    assert grown["vllm:request_generation_tokens_sum"] == grown["vllm:generation_tokens_total"] == 100
    assert grown["vllm:request_params_max_tokens_sum"] == 100
    assert grown["vllm:request_success_total"] == 10


def test_a_rendered_prompt_is_no_stream(http: httpx.Client) -> None:
    """After `test_chat_completion_render_with_stream_true` and `test_completion_render_error_invalid_model`."""
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = post(http, "/v1/chat/completions/render", asked)
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["token_ids"]
    for path in PATHS:
        assert post(http, f"{path}/render", {**BODIES[path], "model": "nobody"}).status_code == 404
