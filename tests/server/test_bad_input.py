"""Mistakes in requests: each is answered in OpenAI's shape and names its field."""

from __future__ import annotations

import gzip
import re
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_gateway import MAX_MODEL_LEN, PATIENCE_S, VOCAB_SIZE, Gateway, start_gateway, wait_until

from swiftkv.server.app import ServerSettings
from swiftkv.server.limits import NodeLimits
from swiftkv.server.tokenizer import Tokenizer

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 1}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


def post(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    with gateway.http() as http:
        response = http.post(path, json=body)
    error = response.json().get("error", {})
    if response.status_code >= 400:
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str)
    return response.status_code, error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("best_of", 2),
        ("guided_anything", {}),
        ("no_such_field", 1),
        ("max_completion_tokens", 5),
        ("use_beam_search", True),
    ],
)
def test_unsupported_fields_of_completions_are_named(gateway: Gateway, field: str, value: object) -> None:
    status, error = post(gateway, "/v1/completions", {**COMPLETION, field: value})
    assert (status, error["param"], error["code"]) == (400, field, "unsupported_field")
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),  # of a template that takes none
        ("tool_choice", "required"),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("functions", [{}]),
        ("chat_template", "{{ 1 }}"),
        ("echo", True),
        ("logprobs", 5),
        ("web_search_options", {}),
    ],
)
def test_unsupported_fields_of_chat_are_named(gateway: Gateway, field: str, value: object) -> None:
    status, error = post(gateway, "/v1/chat/completions", {**CHAT, field: value})
    assert (status, error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("n", 0),
        ("n", 10**400),
        ("n", "1"),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", 0),
        ("max_tokens", MAX_MODEL_LEN),
        ("min_tokens", 2),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("temperature", 1e308),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**70),
        ("logprobs", 21),
        ("prompt_logprobs", 1000),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 2000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1] * 300),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(i): 0 for i in range(2000)}),
        ("presence_penalty", 3),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("stream", "yes"),
        ("cache_salt", ""),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**40),
        ("user", 5),
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", ["a", 5]),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [2**40]),
        ("prompt", [1.5]),
        ("prompt", {"a": 1}),
        ("prompt", [1] * MAX_MODEL_LEN),
        ("prompt", "word " * MAX_MODEL_LEN),
        ("prompt", "x" * 10**6),
        ("prompt", ["a"] * 300),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_values_are_named(gateway: Gateway, field: str, value: object) -> None:
    status, error = post(gateway, "/v1/completions", {**COMPLETION, field: value})
    assert status == 400
    assert error["param"] is None or error["param"].startswith(field)
    assert field in error["message"] or "prompt" in error["message"] or "token id" in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:"}
TEXT_ONLY = "is not supported: the models take text; types here"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [IMAGE]}]},
            f"field 'messages.0.content.0.type': 'image_url' {TEXT_ONLY}: text",
        ),
        (
            "/v1/responses",
            {"model": "chat", "input": [{"role": "user", "content": [INPUT_IMAGE]}]},
            f"field 'input.0.content.0.type': 'input_image' {TEXT_ONLY}: input_text, output_text, text",
        ),
        (
            "/v1/messages",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            f"field 'messages.0.content.0.type': 'image' {TEXT_ONLY}: text, tool_result",
        ),
        (
            "/v1/messages",
            {**CHAT, "messages": [{"role": "user", "content": ["image"]}]},
            "field 'messages.0.content.0': must be an object whose 'type' is text, tool_result",
        ),
        (
            "/v1/messages",
            {**CHAT, "messages": [{"role": "tool", "content": "x"}]},
            "field 'messages.0.role': 'tool' is not supported; roles here: user, assistant, system",
        ),
        (
            "/v1/messages",
            {**CHAT, "tools": [{"type": "mcp_toolset", "mcp_server_name": "files"}]},
            "field 'tools.0.type': 'mcp_toolset' is not supported: the server runs no tools; types here: custom",
        ),
    ],
)
def test_the_kind_of_an_object_is_told_and_the_kinds_that_are_taken(
    gateway: Gateway, path: str, body: dict[str, Any], message: str
) -> None:
    with gateway.http() as http:
        answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": None}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "messages": None}, "messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": None}]}, "tools.0.function"),
        ("/v1/responses", {"model": "chat", "input": None}, "input"),
        ("/v1/embeddings", {"model": "chat", "input": None}, "input"),
    ],
)
def test_a_required_field_that_is_null_is_missing(
    gateway: Gateway, path: str, body: dict[str, Any], field: str
) -> None:
    status, error = post(gateway, path, body)
    assert (status, error["param"], error["code"]) == (400, field, "missing_field")
    assert error["message"] == f"field '{field}' is required"


def test_a_field_in_place_of_a_missing_one_is_named(gateway: Gateway) -> None:
    status, error = post(gateway, "/v1/completions", {"model": "chat", "prompt_embeds": "x"})
    assert (status, error["param"], error["code"]) == (400, "prompt_embeds", "unsupported_field")


@pytest.mark.parametrize("fields", [{"metadata": {"a": None}}, {"stop": [None]}])
def test_null_within_a_field_is_not_a_missing_field(gateway: Gateway, fields: dict[str, Any]) -> None:
    status, error = post(gateway, "/v1/completions", {**COMPLETION, **fields})
    assert (status, error["code"]) == (400, "invalid_request_error")


def test_a_list_that_is_too_long_is_not_called_a_wrong_type(gateway: Gateway) -> None:
    assert "at most 16" in post(gateway, "/v1/completions", {**COMPLETION, "stop": ["x"] * 17})[1]["message"]


def test_too_many_sequences_for_any_queue(gateway: Gateway) -> None:
    status, error = post(gateway, "/v1/completions", {**COMPLETION, "n": 128, "prompt": ["a"] * 10})
    assert status == 400
    assert "1280 sequences" in error["message"]


def test_stream_options_and_prompt_logprobs_need_the_right_mode(gateway: Gateway) -> None:
    assert post(gateway, "/v1/completions", {**COMPLETION, "stream": True, "prompt_logprobs": 1})[0] == 400
    assert post(gateway, "/v1/chat/completions", {**CHAT, "top_logprobs": 1})[1]["param"] == "top_logprobs"
    # vLLM's own default, which clients send that fill in all of its fields.
    assert post(gateway, "/v1/chat/completions", {**CHAT, "logprobs": False, "top_logprobs": 0})[0] == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": "x", "spell": 1}], "messages.0.spell"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": 5, "text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls"),
        ([{"role": "user", "content": "refuse me"}], "messages"),
        ([{"role": "user", "content": "x" * 10**6}], "messages"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": "x"}, {"role": "assistant"}], "messages.1.content"),
        ([{"role": "system", "tool_calls": [], "content": None}], "messages.0.content"),
        ([{"role": "user", "reasoning_content": "x"}], "messages.0.content"),
    ],
)
def test_bad_messages(gateway: Gateway, messages: object, param: str | None) -> None:
    status, error = post(gateway, "/v1/chat/completions", {**CHAT, "messages": messages})
    assert status == 400
    assert error["param"] == param or (error["param"] or "").startswith(f"{param}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": NaN}',
        b'{"\xf0\x9f": 1}',
        b'{"\\ud800": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "chat", "prompt": "\\ud800"}',
        b'{"model": "chat", "prompt": ["a", "\\ud800"]}',
        b'{"model": "chat", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
        b"1" * 10_000,
    ],
    ids=lambda content: content[:80],
)
def test_bodies_that_are_no_request(gateway: Gateway, path: str, content: bytes) -> None:
    with gateway.http() as http:
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_json_under_another_name_is_refused(gateway: Gateway) -> None:
    with gateway.http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type" in response.json()["error"]["message"]


def test_a_compressed_body_is_told_to_be_sent_plainly(gateway: Gateway) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with gateway.http() as http:
        response = http.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
        assert response.status_code == 400
        assert "Content-Encoding" in response.json()["error"]["message"]
        plain = {**headers, "Content-Encoding": "identity"}
        assert http.post("/v1/completions", json={**COMPLETION, "prompt": "a"}, headers=plain).status_code == 200


def test_unknown_models_paths_and_methods(gateway: Gateway) -> None:
    assert post(gateway, "/v1/completions", {**COMPLETION, "model": "nobody"})[0] == 404
    assert post(gateway, "/models/nobody/v1/completions", {"prompt": "a"})[0] == 404
    assert post(gateway, "/models/code/v1/completions", COMPLETION)[0] == 404
    assert post(gateway, "/v1/audio/speech", COMPLETION)[0] == 404
    with gateway.http() as http:
        response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "GET" in response.json()["error"]["message"]


def test_errors_reach_the_client_as_its_own_exceptions(gateway: Gateway) -> None:
    client = gateway.openai()
    with pytest.raises(openai.BadRequestError, match="no_such_field"):
        client.completions.create(model="chat", prompt="a", extra_body={"no_such_field": 1})
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="a")


def test_an_engine_may_refuse(gateway: Gateway) -> None:
    for stream in (False, True):
        status, error = post(gateway, "/v1/completions", {**COMPLETION, "cache_salt": "refuse", "stream": stream})
        assert (status, error["message"]) == (400, "refused by the engine")


def test_a_request_that_found_no_room_may_come_again(gateway: Gateway) -> None:
    for stream in (False, True):
        with gateway.http() as http:
            response = http.post("/v1/completions", json={**COMPLETION, "cache_salt": "starve", "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1800")
        error = response.json()["error"]
        assert (error["message"], error["code"]) == ("no more was lent", "insufficient_kv_cache")


def send_raw(gateway: Gateway, length_header: str, chunks: Iterator[bytes]) -> bytes:
    """Write a body until the server answers, and return the answer."""
    host, port = gateway.url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", length_header]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode())
        for chunk in chunks:
            connection.sendall(chunk)
            if select.select([connection], [], [], 0)[0]:
                break
        answer = b""
        while not answer.endswith(b"}}"):
            received = connection.recv(65536)
            assert received, "closed before the answer was complete"
            answer += received
        return answer


def test_a_body_of_100_mb_is_refused_from_its_announcement(gateway: Gateway) -> None:
    answer = send_raw(gateway, "Content-Length: 100000000", iter(()))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"error"' in answer


def test_a_body_of_100_mb_that_is_sent_is_refused_too(gateway: Gateway) -> None:
    with gateway.http() as http:
        response = http.post("/v1/completions", content=bytes(100_000_000))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_chunked_body_is_cut_off_at_the_limit(gateway: Gateway) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        yield b"0\r\n\r\n"

    answer = send_raw(gateway, "Transfer-Encoding: chunked", chunks())
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent < 60 << 20


def test_docs_need_nothing_from_elsewhere(gateway: Gateway) -> None:
    with gateway.http() as http:
        page = http.get("/docs")
        links = re.findall(r'(?:src|href)="([^"#]*)"', page.text)
        loaded = [http.get(f"/{link}") for link in links]
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "//" not in re.sub(r"<pre>.*?</pre>", "", page.text, flags=re.DOTALL)
    assert "<script" not in page.text
    assert links == ["openapi.json"]
    assert [answer.status_code for answer in loaded] == [200]
    for path in loaded[0].json()["paths"]:
        assert path in page.text


def test_bodies_of_all_requests_together_have_a_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Both ports share the limit, and bytes that are given back are there for others."""
    limits = NodeLimits(max_bodies=1 << 20)
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(limits=limits))
    body = b'{"model": "chat", "max_tokens": 1, "prompt": "a"%s}'
    half = body % (b" " * (600 << 10))
    headers = {"Content-Type": "application/json"}
    host, port = gateway.url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall("\r\n".join([*lines, f"Content-Length: {len(half)}", "", ""]).encode() + half[:-1])
        wait_until(lambda: limits.body_bytes == len(half) - 1)
        for url in (gateway.url, gateway.model_url):
            refused = httpx.post(f"{url}/v1/completions", content=half, headers=headers, timeout=PATIENCE_S)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "the bodies of other requests" in refused.json()["error"]["message"]
            small = httpx.post(f"{url}/v1/completions", content=body % b"", headers=headers, timeout=PATIENCE_S)
            assert small.status_code == 200
        slow.sendall(half[-1:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: limits.body_bytes == 0)
    answer = httpx.post(f"{gateway.url}/v1/completions", content=half, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall("\r\n".join([*lines, f"Content-Length: {len(half)}", "", ""]).encode() + half[:-1])
        wait_until(lambda: limits.body_bytes == len(half) - 1)
    wait_until(lambda: limits.body_bytes == 0)
    stop()


def test_connections_are_counted_for_all_ports(tmp_path: Path, tokenizer: Tokenizer) -> None:
    limits = NodeLimits(max_connections=1)
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(limits=limits))
    host, port = gateway.model_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        wait_until(lambda: limits.num_connections == 1)
        refused = httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE_S)
        health = httpx.get(f"{gateway.url}/health", timeout=PATIENCE_S)
    wait_until(lambda: limits.num_connections == 0)
    allowed = httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE_S)
    stop()
    assert (refused.status_code, refused.headers["retry-after"], health.status_code) == (503, "1", 200)
    assert refused.json()["error"]["code"] == "too_many_connections"
    assert allowed.status_code == 200
