"""Both generation APIs through the real `openai` client. The echo engine repeats the prompt, so answers are known.

It is one file, for it is one list of promises that both APIs keep.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest
from echo_gateway import MAX_MODEL_LEN, TEXT, Gateway

from swiftkv.server.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "Grüße 👋🏽"}]
CHAT_PROMPT = "<|im_start|>user\nGrüße 👋🏽<|im_end|>\n<|im_start|>assistant\n"


def echoed(tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Return the echo engine's answer, decoded at once."""
    ids = itertools.cycle(tokenizer.backend.encode(prompt).ids)
    return str(tokenizer.backend.decode(list(itertools.islice(ids, num_tokens)), skip_special_tokens=True))


def test_completion(gateway: Gateway, tokenizer: Tokenizer) -> None:
    completion = gateway.openai().completions.create(model="chat", prompt=TEXT, max_tokens=300)
    [choice] = completion.choices
    assert choice.text == echoed(tokenizer, TEXT, 300).rstrip("\ufffd")
    assert choice.finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 300
    assert completion.usage.prompt_tokens == len(tokenizer.backend.encode(TEXT).ids)


def test_the_default_is_sixteen_tokens_for_completions_and_the_rest_of_the_context_for_chat(gateway: Gateway) -> None:
    client = gateway.openai()
    completion = client.completions.create(model="chat", prompt="a b c")
    chat = client.chat.completions.create(model="chat", messages=MESSAGES)
    assert completion.usage.completion_tokens == 16
    assert chat.usage.total_tokens == MAX_MODEL_LEN


def test_chat(gateway: Gateway, tokenizer: Tokenizer) -> None:
    chat = gateway.openai().chat.completions.create(model="code", messages=MESSAGES, max_completion_tokens=50)
    [choice] = chat.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == echoed(tokenizer, CHAT_PROMPT, 50).rstrip("\ufffd")
    assert chat.model == "code"


def test_messages_may_be_lists_of_text_parts(gateway: Gateway) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Grüße"}, {"type": "text", "text": "👋🏽"}]}]
    plain: Any = [{"role": "user", "content": "Grüße\n👋🏽"}]
    create = gateway.openai().chat.completions.create
    answers = [create(model="chat", messages=messages, max_tokens=30) for messages in (parts, plain)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_an_answer_can_be_sent_back_as_a_message(gateway: Gateway) -> None:
    create = gateway.openai().chat.completions.create
    message = create(model="chat", messages=MESSAGES, max_tokens=5).choices[0].message
    assert create(model="chat", messages=[*MESSAGES, message, *MESSAGES], max_tokens=5).choices


@pytest.mark.parametrize("path", ["/v1", "/models/chat/v1"])
def test_streams_join_to_the_whole(gateway: Gateway, path: str) -> None:
    client = gateway.openai(path)
    whole = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=200, n=3)
    stream = client.chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=200, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, last = ["", "", ""], {}, None
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == dict.fromkeys(range(3), "length")
    assert last is not None
    assert last.choices == []
    assert last.usage.completion_tokens == 600
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_stream_to_the_whole(gateway: Gateway) -> None:
    client = gateway.openai()
    arguments: Any = {"model": "chat", "prompt": [TEXT, "other"], "max_tokens": 90, "logprobs": 1, "echo": True}
    whole = client.completions.create(**arguments)
    texts, offsets = ["", ""], [[], []]
    for chunk in client.completions.create(**arguments, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_the_wire_format_of_a_stream(gateway: Gateway) -> None:
    body = {"model": "chat", "prompt": TEXT, "max_tokens": 40, "stream": True}
    with gateway.http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[-1]


def test_usage_can_be_told_on_the_way(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "chat", "prompt": "a", "max_tokens": 9, "stream": True, "stream_options": options}
    with gateway.http() as http:
        events = http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    counts = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_several_prompts_and_choices_come_in_order(gateway: Gateway, tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.backend.encode(text).ids for text in ("one two", "three"))
    by_ids = gateway.openai().completions.create(model="chat", prompt=[first, second], n=2, max_tokens=4)
    by_text = gateway.openai().completions.create(model="chat", prompt=["one two", "three"], n=2, max_tokens=4)
    expected = [echoed(tokenizer, text, 4) for text in ("one two", "one two", "three", "three")]
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in by_text.choices] == expected
    assert by_ids.usage.prompt_tokens == len(first) + len(second)
    assert by_ids.usage.completion_tokens == 16


def test_what_the_cache_held_is_reported(gateway: Gateway) -> None:
    prompt = list(range(300, 350))
    create = gateway.openai().completions.create
    cached = [
        create(model="chat", prompt=prompt, max_tokens=1, n=n).usage.prompt_tokens_details.cached_tokens for n in (1, 2)
    ]
    assert cached == [0, 48]
    *_, last = create(model="chat", prompt=prompt, max_tokens=1, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 48


@pytest.mark.parametrize("n", [1, 3])
def test_cached_tokens_are_told_by_tier_to_those_who_ask(gateway: Gateway, n: int) -> None:
    """The echo engine says that the first block of what it finds was in host memory. Choices count as one prompt."""
    prompts = [list(range(600 + 50 * n, 650 + 50 * n)), list(range(500 + 50 * n, 550 + 50 * n))]
    asked = {"model": "chat", "prompt": prompts, "max_tokens": 1, "n": n}
    with gateway.http() as http:
        bodies = [asked, {**asked, "return_cached_tokens_details": True}]
        http.post("/v1/completions", json=asked)
        plain, told = (http.post("/v1/completions", json=body).json()["usage"] for body in bodies)
    assert plain["prompt_tokens_details"] == {"cached_tokens": 96}
    by_tier = {"local": 64, "peer": 0, "host": 32, "storage": 0}
    assert told["prompt_tokens_details"] == {"cached_tokens": 96, "cached_tokens_details": by_tier}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_never_shows(gateway: Gateway, tokenizer: Tokenizer, stream: bool) -> None:
    arguments: Any = {"model": "chat", "prompt": TEXT, "max_tokens": 1000, "stop": ["lazy dog", "nowhere"]}
    answer = gateway.openai().completions.create(
        **arguments, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "The quick brown fox jumps over the "
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "lazy dog"
    before_and_stop = tokenizer.backend.encode("The quick brown fox jumps over the lazy dog").ids
    assert chunks[-1].usage.completion_tokens == len(before_and_stop)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["lazy dog", "azy d", "."])
def test_a_stop_string_shows_where_it_is_asked_for(
    gateway: Gateway, tokenizer: Tokenizer, stop: str, stream: bool
) -> None:
    arguments: Any = {"model": "chat", "prompt": TEXT, "max_tokens": 1000, "stop": [stop, "nowhere"]}
    answer = gateway.openai().completions.create(
        **arguments, stream=stream, extra_body={"include_stop_str_in_output": True, "return_token_ids": True}
    )
    choices = [choice for chunk in (list(answer) if stream else [answer]) for choice in chunk.choices]
    shown = TEXT[: TEXT.index(stop) + len(stop)]
    assert "".join(choice.text for choice in choices) == shown
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
    ids = [token for choice in choices for token in choice.token_ids]
    # The token that completes it is the last; the text that this one has behind it is not shown.
    assert len(tokenizer.decode(ids[:-1])) < len(shown) <= len(tokenizer.decode(ids))
    if stream:
        pieces = [tokenizer.decode(choice.token_ids) for choice in choices]
        assert all(choice.text == piece for choice, piece in zip(choices[:-1], pieces, strict=False))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_of_a_chat_shows_where_it_is_asked_for(gateway: Gateway, stream: bool) -> None:
    answer: Any = gateway.openai().chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=50, stop="üß", stream=stream,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    if stream:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        content = answer.choices[0].message.content
    assert content == "user\nGrüß"


def test_min_tokens_puts_stop_strings_off(gateway: Gateway) -> None:
    completion = gateway.openai().completions.create(
        model="chat", prompt="stop and go. ", max_tokens=500, stop="stop", extra_body={"min_tokens": 3}
    )
    assert completion.choices[0].text == "stop and go. "


def test_a_stop_token_is_counted_but_not_shown(gateway: Gateway, tokenizer: Tokenizer) -> None:
    ids = [300, 301, 302, 303]
    completion = gateway.openai().completions.create(
        model="chat", prompt=ids, max_tokens=50, extra_body={"stop_token_ids": [302], "return_token_ids": True}
    )
    [choice] = completion.choices
    assert choice.text == tokenizer.backend.decode(ids[:2])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 302)
    assert (choice.token_ids, choice.prompt_token_ids) == (ids[:3], ids)
    assert completion.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("skip_special_tokens", "end"), [(True, ""), (False, "<|im_end|>")])
@pytest.mark.parametrize("stop", [None, "nowhere"])  # with stop strings tokens are looked at one by one
def test_a_stop_token_shows_where_it_is_asked_for(
    gateway: Gateway, tokenizer: Tokenizer, stop: str | None, skip_special_tokens: bool, end: str, stream: bool
) -> None:
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": skip_special_tokens}
    create = gateway.openai().completions.create
    for stop_ids, shown in (([302], tokenizer.decode([300, 301, 302])), ([2], tokenizer.decode([300, 301]) + end)):
        prompt = [300, 301, *stop_ids, 303]
        answer: Any = create(
            model="chat", prompt=prompt, max_tokens=50, stop=stop, stream=stream,
            extra_body={**fields, "stop_token_ids": stop_ids},
        )  # fmt: skip
        choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == shown
        assert choices[-1].stop_reason == stop_ids[0]


def test_token_ids_of_streams(gateway: Gateway, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.backend.encode(CHAT_PROMPT).ids
    stream = gateway.openai().chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=20, stream=True, extra_body={"return_token_ids": True}
    )
    chunks = list(stream)
    assert chunks[0].prompt_token_ids == prompt
    token_ids = [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids]
    assert token_ids == list(itertools.islice(itertools.cycle(prompt), 20))


def test_offsets_of_tokens_are_places_in_the_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    """Characters of several tokens, too: tokens behind them are where the text has them, echoed or generated."""
    prompt = tokenizer.encode("日本 token 🎉 another")
    completion = gateway.openai().completions.create(
        model="chat", prompt=prompt, max_tokens=len(prompt), logprobs=0, echo=True
    )
    [choice] = completion.choices
    named = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    whole = [(name, offset) for name, offset in named if "\ufffd" not in name]
    assert 0 < len(whole) < len(named)
    assert [choice.text[offset : offset + len(name)] for name, offset in whole] == [name for name, _ in whole]


def test_logprobs_of_completions(gateway: Gateway, tokenizer: Tokenizer) -> None:
    completion = gateway.openai().completions.create(
        model="chat", prompt=[301, 302], max_tokens=2, logprobs=2, echo=True, extra_body={"prompt_logprobs": 1}
    )
    [choice] = completion.choices
    names = [tokenizer.token_text(token) for token in (301, 302, 301, 302)]
    assert choice.text == "".join(names)
    assert choice.logprobs.tokens == names
    assert choice.logprobs.token_logprobs == [None, -0.2, -0.1, -0.2]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {tokenizer.token_text(302): -0.2, tokenizer.token_text(303): -1.2}
    offsets = [0, *itertools.accumulate(map(len, names))][:-1]
    assert choice.logprobs.text_offset == offsets
    shown = {"logprob": -0.2, "rank": 1, "decoded_token": names[1]}
    assert choice.prompt_logprobs[0] is None
    assert choice.prompt_logprobs[1]["302"] == shown


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 3), (1, 3), (3, 1), (2, 0)])
def test_an_echo_and_prompt_logprobs_have_as_many_as_each_asks_for(
    gateway: Gateway, logprobs: int, prompt_logprobs: int
) -> None:
    completion = gateway.openai().completions.create(
        model="chat", prompt=[301, 302, 303], max_tokens=2, logprobs=logprobs, echo=True,
        extra_body={"prompt_logprobs": prompt_logprobs},
    )  # fmt: skip
    [choice] = completion.choices
    # The echo engine's likeliest token is the one that stands there.
    assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [max(logprobs, 1)] * 4
    assert [len(entry) for entry in choice.prompt_logprobs[1:]] == [max(prompt_logprobs, 1)] * 2


def test_echo_alone(gateway: Gateway) -> None:
    completion = gateway.openai().completions.create(model="chat", prompt="just this", max_tokens=0, echo=True)
    assert completion.choices[0].text == "just this"
    assert completion.usage.completion_tokens == 0


def test_logprobs_of_chat(gateway: Gateway, tokenizer: Tokenizer) -> None:
    chat = gateway.openai().chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=3,
        extra_body={"prompt_logprobs": 0},
    )  # fmt: skip
    ids = tokenizer.backend.encode(CHAT_PROMPT).ids
    content = chat.choices[0].logprobs.content
    assert [entry.token for entry in content] == [tokenizer.token_text(token) for token in ids[:12]]
    assert [len(entry.top_logprobs) for entry in content] == [3] * 12
    assert bytes(byte for entry in content for byte in entry.bytes).decode().startswith("<|im_start|>user\nGr")
    assert len(chat.prompt_logprobs) == len(ids)


def test_logprobs_may_name_tokens_by_their_ids(gateway: Gateway, tokenizer: Tokenizer) -> None:
    body: Any = {"model": "chat", "prompt": [301, 302], "max_tokens": 3, "logprobs": 2, "echo": True}
    create = gateway.openai().completions.create
    by_id: Any = {"return_tokens_as_token_ids": True}
    for stream in (False, True):
        named, numbered = (
            [
                choice.logprobs
                for answer in [create(**body, stream=stream, extra_body=extra)]
                for chunk in (answer if stream else [answer])
                for choice in chunk.choices
            ]
            for extra in ({}, by_id)
        )
        ids = [301, 302, 301, 302, 301]
        assert [token for each in numbered for token in each.tokens] == [f"token_id:{token}" for token in ids]
        tops = [top for each in numbered for top in each.top_logprobs]
        assert tops[0] is None
        assert tops[1] == {"token_id:302": -0.2, "token_id:303": -1.2}
        for values in ("token_logprobs", "text_offset"):  # names take no room in the text; chunks may hold more tokens
            by_number, by_name = (
                [x for each in logprobs for x in getattr(each, values)] for logprobs in (numbered, named)
            )
            assert by_number == by_name


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats_may_name_tokens_by_their_ids(gateway: Gateway, tokenizer: Tokenizer, stream: bool) -> None:
    answer: Any = gateway.openai().chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2, stream=stream,
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    ids = tokenizer.backend.encode(CHAT_PROMPT).ids[:12]
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in ids]
    assert [[top.token for top in entry.top_logprobs] for entry in content] == [
        [f"token_id:{token}", f"token_id:{token + 1}"] for token in ids
    ]
    assert [entry.bytes for entry in content] == [tokenizer.token_bytes(token) for token in ids]


def test_the_models(gateway: Gateway) -> None:
    client = gateway.openai()
    assert [model.id for model in client.models.list()] == ["chat", "code"]
    assert client.models.retrieve("code").max_model_len == MAX_MODEL_LEN
    assert [model.id for model in gateway.openai("/models/code/v1").models.list()] == ["code"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_on_its_own_port_a_model_need_not_be_named(gateway: Gateway) -> None:
    with gateway.http() as http:
        for url in (f"{gateway.model_url}/v1", f"{gateway.url}/models/code/v1"):
            answer = http.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200
        answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


def test_tokenize_and_back(gateway: Gateway, tokenizer: Tokenizer) -> None:
    with gateway.http() as http:
        tokens = http.post("/tokenize", json={"model": "chat", "prompt": TEXT, "return_token_strs": True}).json()
        text = http.post("/detokenize", json={"model": "chat", "tokens": tokens["tokens"]}).json()
        chat = http.post("/models/code/tokenize", json={"messages": MESSAGES}).json()
    assert tokens["tokens"] == tokenizer.backend.encode(TEXT).ids
    assert tokens["count"] == len(tokens["token_strs"]) == len(tokens["tokens"])
    assert text == {"prompt": TEXT}
    assert chat["tokens"] == tokenizer.backend.encode(CHAT_PROMPT).ids


def test_the_asynchronous_client_with_many_streams(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async def stream(client: openai.AsyncOpenAI, number: int) -> str:
        chunks = await client.completions.create(model="chat", prompt=f"number {number} ", max_tokens=40, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(40)))

    assert asyncio.run(run()) == [echoed(tokenizer, f"number {number} ", 40) for number in range(40)]


def test_the_usual_harmless_fields_are_taken(gateway: Gateway) -> None:
    body = {
        "model": "chat", "messages": MESSAGES, "max_tokens": 1, "temperature": 0.7, "top_p": 0.9, "seed": 5,
        "user": "u", "store": False, "metadata": {"a": "b"}, "response_format": {"type": "text"}, "stop": [],
        "logit_bias": {"5": -100}, "presence_penalty": 0.1, "frequency_penalty": 0.1, "tools": [],
        "service_tier": "auto", "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "cache_salt": "s",
        "priority": 0, "ignore_eos": True, "audio": None,
    }  # fmt: skip
    with gateway.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_behind_a_call_ends_the_answer(tool_gateway: Gateway, is_streamed: bool) -> None:
    content = '<tool_call>{"name": "add", "arguments": {}}</tool_call> END'
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    asked: Any = {"model": "chat", "messages": [{"role": "user", "content": content}], "tools": tools, "stop": "END"}
    answer = tool_gateway.openai().chat.completions.create(**asked, stream=is_streamed)
    last = list(answer)[-1] if is_streamed else answer
    assert last.choices[0].finish_reason == "tool_calls"


def test_a_stop_string_behind_a_call_shows_where_it_is_asked_for(tool_gateway: Gateway) -> None:
    content = '<tool_call>{"name": "add", "arguments": {}}</tool_call> the END is near'
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    answer = tool_gateway.openai().chat.completions.create(
        model="chat", messages=[{"role": "user", "content": content}], tools=tools, stop=["END"],
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add"]
    assert message.content.endswith("the END")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_retentions_of_the_cache_are_those_of_openai(gateway: Gateway, path: str) -> None:
    asked = {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/responses": {"input": "hello"},
    }[path]
    with gateway.http() as http:
        for retention in ("in_memory", "24h", None):
            body = {"model": "chat", **asked, "prompt_cache_retention": retention}
            assert http.post(path, json=body).status_code == 200
        refused = http.post(path, json={"model": "chat", **asked, "prompt_cache_retention": "7d"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_cache_retention"
