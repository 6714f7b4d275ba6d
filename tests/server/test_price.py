"""The price of a request: everything that costs has a limit, and is refused by name before it is paid."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from echo_gateway import MAX_MODEL_LEN, PATIENCE_S, TEXT, Gateway, start_gateway
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swiftkv.server.answer import CompletionAnswer
from swiftkv.server.begun import BegunRequest, Prompt, make_choices
from swiftkv.server.detokenizer import StopMatcher, StopStrings
from swiftkv.server.errors import ApiError
from swiftkv.server.price import LIMITS, json_shape
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.sampling import sequence_requests
from swiftkv.server.threads import BoundedThreads
from swiftkv.server.tokenizer import Tokenizer
from tests.support.node_process import wait_for

COMPLETION: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 1}
LONG: dict[str, Any] = {**COMPLETION, "prompt": [[1] * 4000] * 10, "n": 30}
USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": "chat", "messages": [USER], "max_tokens": 1}


def post(gateway: Gateway, path: str, body: dict[str, Any] | str) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, str) else json.dumps(body)
    with gateway.http() as http:
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    return response.status_code, response.json().get("error", {})


@contextmanager
def peak_below(limit_bytes: int) -> Iterator[None]:
    """Python objects that this process, the gateway included, makes meanwhile take less than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\,:[{}]é', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,', max_size=4), inner, max_size=4),
    max_leaves=25,
)


def naive_shape(value: object) -> tuple[int, int]:
    """Containers and depth."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [naive_shape(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(containers for containers, _ in inner), 1 + max((depth for _, depth in inner), default=0)


def num_strings(value: object) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(num_strings, value.values()))
    return sum(map(num_strings, value)) if isinstance(value, list) else isinstance(value, str)


@settings(max_examples=200, deadline=None)
@given(value=json_values, before=st.integers(0, 80))
def test_a_body_is_measured_as_if_it_were_parsed(value: object, before: int) -> None:
    # The measure reads 64 KiB at once: the value lies across the end of the first.
    body = json.dumps(["x" * (65536 - before), value], ensure_ascii=False).encode()
    shape = json_shape(body)
    assert (shape.containers, shape.depth) == naive_shape([value, ""])
    structure = Counter(char for char in _outside_strings(body.decode()) if char in ",:[{")
    assert shape.values == 1 + structure.total()
    assert shape.strings == 1 + num_strings(value)


def _outside_strings(text: str) -> Iterator[str]:
    inside = escaped = False
    for char in text:
        if not inside and char != '"':
            yield char
        if char == '"' and not escaped:
            inside = not inside
        escaped = char == "\\" and not escaped


def test_half_a_million_wrong_parts_are_one_error(gateway: Gateway) -> None:
    body = '{"model": "chat", "messages": [{"role": "user", "content": [' + "1," * 500_000 + "1]}]}"
    with peak_below(64 << 20):
        status, error = post(gateway, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "messages.0.content.0")


@pytest.mark.parametrize("item", ["1,", "[],", "{},", '"ab",', '{"role":"user"},'])
def test_16_mib_of_wrong_items_are_not_even_parsed(gateway: Gateway, item: str) -> None:
    body = '{"model": "chat", "messages": [' + item * ((16 << 20) // len(item) - 40) + "1]}"
    with peak_below(96 << 20):
        status, error = post(gateway, "/v1/chat/completions", body)
    assert (status, error["code"]) == (413, "body_too_complex")
    assert "JSON" in error["message"]
    assert "at most" in error["message"]


@pytest.mark.parametrize(
    ("body_type", "field", "value"),
    [
        (ChatBody, "messages.0.content", [{"role": "user", "content": [1] * 20_000}]),
        (ChatBody, "messages.0.content", [{"role": "user", "content": [{"type": "text"}] * 20_000}]),
        (ChatBody, "messages", [USER] * (LIMITS.messages + 1)),
        (CompletionBody, "logit_bias", {f"x{i}": "x" for i in range(20_000)}),
        (CompletionBody, "metadata", {str(i): i for i in range(20_000)}),
        (CompletionBody, "stop", [1] * 20_000),
        (CompletionBody, "prompt", [1.5] * 20_000),
    ],
)
def test_the_first_few_errors_are_enough(gateway: Gateway, body_type: type[Any], field: str, value: Any) -> None:
    whole = {**(CHAT if body_type is ChatBody else COMPLETION), field.split(".")[0]: value}
    with pytest.raises(ValidationError) as caught:
        body_type.model_validate(whole)
    assert caught.value.error_count() <= 4
    path = "/v1/chat/completions" if body_type is ChatBody else "/v1/completions"
    status, error = post(gateway, path, whole)
    assert status == 400
    assert error["param"].startswith(field)


def test_unknown_fields_are_counted_before_they_are_named(gateway: Gateway) -> None:
    body = {**COMPLETION, **{f"unknown{i}": i for i in range(20_000)}}
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate(body)
    assert caught.value.error_count() == 1
    status, error = post(gateway, "/v1/completions", body)
    assert status == 400
    assert "20003 entries" in error["message"]
    assert str(LIMITS.fields) in error["message"]


def test_an_error_does_not_repeat_a_megabyte_of_the_body(gateway: Gateway) -> None:
    for body in (
        {**COMPLETION, "x" * (1 << 20): 1},
        {**CHAT, "messages": [{"role": "user", "content": "hi", "x" * (1 << 20): 1}]},
    ):
        status, error = post(gateway, "/v1/chat/completions" if "messages" in body else "/v1/completions", body)
        assert status == 400
        assert len(json.dumps(error)) < 2000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {**COMPLETION, "stop": ["x" * 1024] * 5}, 400, "stop"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4000}] * 5},
            400,
            "messages",
        ),
        ("/v1/completions", {**COMPLETION, "prompt": "x" * (1 << 20)}, 400, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 10, "n": 128}, 400, "n"),
        ("/v1/completions", {**LONG, "prompt_logprobs": 0}, 400, "prompt_logprobs"),
        ("/v1/completions", {**LONG, "logprobs": 5, "echo": True}, 400, "logprobs"),
        ("/v1/completions", {**COMPLETION, "n": 128, "max_tokens": 4000, "logprobs": 20}, 400, "logprobs"),
        ("/tokenize", {"model": "chat", "prompt": "a " * (LIMITS.tokenize_chars // 2 + 1)}, 413, "prompt"),
        (
            "/tokenize",
            {"model": "chat", "messages": [{"role": "user", "content": "a " * (LIMITS.tokenize_chars // 2 + 1)}]},
            413,
            "messages",
        ),
        ("/detokenize", {"model": "chat", "tokens": [1] * (4 * MAX_MODEL_LEN + 1)}, 413, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_too_much_is_named(gateway: Gateway, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answered, error = post(gateway, path, body)
    assert (answered, error["param"]) == (status, param)
    assert any(char.isdigit() for char in error["message"])


def test_the_same_beneath_the_limit_is_taken(gateway: Gateway) -> None:
    assert post(gateway, "/tokenize", {"model": "chat", "prompt": "a " * (LIMITS.tokenize_chars // 2)})[0] == 200
    assert post(gateway, "/detokenize", {"model": "chat", "tokens": [1] * (4 * MAX_MODEL_LEN)})[0] == 200
    messages = [{"role": "user", "content": ""}] * 300
    assert post(gateway, "/v1/chat/completions", {**CHAT, "messages": messages})[0] == 200


def test_only_the_first_choice_of_a_prompt_computes_its_logprobs(gateway: Gateway) -> None:
    body = CompletionBody.model_validate({**COMPLETION, "n": 3, "logprobs": 2, "echo": True})
    asked = [
        request.sampling.prompt_logprobs
        for request in sequence_requests(gateway.models["chat"], body, [[5, 6, 7], [8, 9]])
    ]
    assert asked == [2, None, None, 2, None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_shows_the_logprobs_of_its_prompt(gateway: Gateway, stream: bool) -> None:
    body = {**COMPLETION, "prompt": [[301, 302], [303, 304, 305]], "n": 2, "max_tokens": 3, "logprobs": 1, "echo": True}
    shown: dict[int, list[float | None]] = {index: [] for index in range(4)}
    with gateway.http() as http:
        response = http.post("/v1/completions", json={**body, "stream": stream})
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-2]] if stream else [response.text]
    for event in events:
        for choice in json.loads(event)["choices"]:
            shown[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert shown[0] == shown[1] == [None, -0.2, -0.1, -0.2, -0.1]
    assert shown[2] == shown[3] == [None, -0.4, -0.5, -0.3, -0.4, -0.5]


def test_prompt_logprobs_stand_with_every_choice(gateway: Gateway) -> None:
    with gateway.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "prompt": [1, 2, 3], "n": 2, "prompt_logprobs": 1})
    first, second = (choice["prompt_logprobs"] for choice in answer.json()["choices"])
    assert first == second
    assert [None if entry is None else sorted(entry) for entry in first] == [None, ["2"], ["3"]]


class _NotedTokenizer(Tokenizer):
    """The tokenizer, which notes the threads that have it do what takes long."""

    threads: set[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_strings(self, token_ids: Any) -> list[str]:
        self.threads.add(threading.get_ident())
        return super().token_strings(token_ids)

    def _token_text(self, token_id: int) -> str:
        self.threads.add(threading.get_ident())
        return super()._token_text(token_id)


def test_the_event_loop_writes_nothing_that_clients_can_make_large(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = _NotedTokenizer.from_pretrained(tokenizer_dir)
    assert isinstance(tokenizer, _NotedTokenizer)
    tokenizer.threads = set()
    gateway, stop = start_gateway(tmp_path, tokenizer)
    try:
        loop_threads: list[int] = []
        gateway.call(lambda: loop_threads.append(threading.get_ident()))
        prompt = list(range(700, 1000))
        assert post(gateway, "/tokenize", {"model": "chat", "prompt": TEXT, "return_token_strs": True})[0] == 200
        for stream in (False, True):
            # Each names tokens that nobody has named before.
            body = {
                **COMPLETION,
                "prompt": prompt[stream::2],
                "echo": True,
                "logprobs": 0,
                "max_tokens": 1,
                "stream": stream,
            }
            with gateway.http() as http:
                assert "logprobs" in http.post("/v1/completions", json=body).text
        assert tokenizer.threads
        assert loop_threads[0] not in tokenizer.threads
    finally:
        stop()


def test_a_model_that_tokenizes_much_holds_up_no_other(gateway: Gateway) -> None:
    """Both threads of `chat` are busy and its queue is full: it says 429, and `code` answers."""
    release = threading.Event()
    threads = BoundedThreads("a test", workers=1, max_waiting=1)
    chat = gateway.models["chat"]
    usual = chat.threads
    object.__setattr__(chat, "threads", threads)
    try:
        busy = asyncio.run_coroutine_threadsafe(threads.run(release.wait), gateway.loop)
        waiting = asyncio.run_coroutine_threadsafe(threads.run(release.wait), gateway.loop)
        gateway.call(lambda: None)
        with gateway.http() as http:
            refused = http.post("/tokenize", json={"model": "chat", "prompt": "a"})
            assert http.post("/tokenize", json={"model": "code", "prompt": "a"}).status_code == 200
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        release.set()
        assert busy.result(PATIENCE_S)
        assert waiting.result(PATIENCE_S)
    finally:
        release.set()
        object.__setattr__(chat, "threads", usual)


def test_who_hangs_up_takes_the_work_along(gateway: Gateway) -> None:
    """A request whose turn has not come leaves the queue, and never runs."""
    release = threading.Event()
    chat = gateway.models["chat"]
    usual = chat.threads
    threads = BoundedThreads("a test", workers=1, max_waiting=1)
    object.__setattr__(chat, "threads", threads)
    try:
        busy = asyncio.run_coroutine_threadsafe(threads.run(release.wait), gateway.loop)
        gateway.call(lambda: None)
        with gateway.asking("/tokenize", {"model": "chat", "prompt": "a"}):
            wait_for("it to wait", lambda: threads.num_waiting == 1)
        wait_for("its place to be free again", lambda: threads.num_waiting == 0)
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(post(gateway, "/tokenize", {"model": "chat", "prompt": "a"})[0])
        )
        asking.start()
        release.set()
        asking.join(PATIENCE_S)
        assert answers == [200]
        assert busy.result(PATIENCE_S)
    finally:
        release.set()
        object.__setattr__(chat, "threads", usual)


def test_threads_bound_what_waits_in_bytes() -> None:
    async def run() -> None:
        release = threading.Event()
        threads = BoundedThreads("a test", workers=1, max_bytes=100)
        tasks = [asyncio.ensure_future(threads.run(release.wait, num_bytes)) for num_bytes in (1000, 1000, 1)]
        await asyncio.sleep(0)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [refused] = done
        with pytest.raises(ApiError, match="too many requests wait for a test"):
            refused.result()
        tasks[1].cancel()
        release.set()
        assert await tasks[0]
        assert await threads.run(lambda: 5, 1000) == 5

    asyncio.run(run())


def calls(work: Any) -> int:
    """The number of functions that are called meanwhile, in Python and in C."""
    count = 0
    gc.disable()  # what it calls is no part of the work

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_stop_strings_cost_linear_time() -> None:
    """Text that is always almost a stop string costs the same for each character, whatever there is to look for."""
    stops = ["a" * 250 + chr(ord("b") + i) for i in range(16)]
    few, many = StopMatcher(StopStrings(stops[:1])), StopMatcher(StopStrings(stops))
    costs = [calls(lambda matcher=matcher: [matcher.push("a") for _ in range(2000)]) for matcher in (few, many)]
    assert costs[1] <= 1.1 * costs[0] <= 2000 * 20


def test_usage_costs_the_same_for_any_number_of_sequences(gateway: Gateway) -> None:
    costs = []
    model, prompts = gateway.models["chat"], [Prompt([1, 2, 3])]
    for n in (1, 100):
        body = CompletionBody.model_validate({**COMPLETION, "n": n, "max_tokens": 4000, "stream": True})

        def measure(body: CompletionBody = body) -> None:
            choices = make_choices(model, body, prompts, is_held=False)
            with model.client.generate(sequence_requests(model, body, [[1, 2, 3]])) as generation:
                answer = CompletionAnswer(BegunRequest("asked", model, body, prompts, choices, generation))
                costs.append(calls(answer.usage))

        gateway.call(measure)
    assert costs[0] == costs[1]


def test_one_request_takes_no_more_than_half_of_the_places(gateway: Gateway) -> None:
    client = gateway.models["chat"].client
    body = {**COMPLETION, "prompt": ["a"] * 100}
    assert post(gateway, "/v1/completions", {**body, "n": 3})[0] == 200
    status, error = post(gateway, "/v1/completions", {**body, "n": 4})
    assert (status, error["param"]) == (400, "n")
    assert str(client.max_in_flight // 2) in error["message"]
