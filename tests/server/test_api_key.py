"""The models' key: without it nothing is served but what monitoring reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from echo_gateway import Gateway, start_gateway

from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer

COMPLETION = {"model": "chat", "prompt": "hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    directory: Path = tmp_path_factory.mktemp("locked")
    gateway, stop = start_gateway(directory, tokenizer, settings=ServerSettings(api_key="secret", max_body_bytes=1000))
    yield gateway
    stop()


@pytest.mark.parametrize("key", [None, "wrong", "secre", "secrets", "ключ"])
def test_without_the_key_nothing_is_served(locked_gateway: Gateway, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/models/chat/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/models/code/v1/chat/completions"),
        ("GET", "/nowhere"),
    ):
        with locked_gateway.http() as http:
            http.headers.pop("Authorization")
            response = http.request(method, path, json=COMPLETION, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key_everything_is(locked_gateway: Gateway) -> None:
    assert locked_gateway.openai().completions.create(model="chat", prompt="a", max_tokens=1).choices
    wrong = locked_gateway.openai().with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


@pytest.mark.parametrize("key", ["key-à", "\x85key"])
def test_only_blanks_around_a_key_are_not_part_of_it(key: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(api_key=key))
    sent = key.encode()
    try:
        with httpx.Client(base_url=gateway.url) as http:
            for headers in ({"Authorization": b"Bearer \t" + sent}, {"x-api-key": sent}):
                assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": sent + b"\xa0"}).status_code == 401
    finally:
        stop()


def test_monitoring_needs_no_key(locked_gateway: Gateway) -> None:
    with locked_gateway.http() as http:
        http.headers.pop("Authorization")
        for path in ("/health", "/ready", "/version", "/metrics", "/models/code/health", "/models/code/metrics"):
            assert http.get(path).status_code == 200


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_metrics_and_documents_can_be_put_behind_a_key(
    api_key: str | None, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = ServerSettings(api_key=api_key, admin_key="admin", protect_metrics=True)
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=settings)
    keys = {"admin", api_key} - {None}
    try:
        with gateway.http() as http:
            http.headers.pop("Authorization", None)
            for path in ("/metrics", "/models/code/metrics", "/docs", "/openapi.json"):
                assert http.get(path).json()["error"]["code"] == "invalid_api_key"
                assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
                for key in keys:
                    assert http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200
            for path in ("/health", "/ready", "/version", "/models/code/ready"):
                assert http.get(path).status_code == 200
            described = http.get("/openapi.json", headers={"Authorization": "Bearer admin"}).json()
            security = described["paths"]["/metrics"]["get"]["security"]
            assert {scheme for each in security for scheme in each} == (
                {"admin"} if api_key is None else {"admin", "bearer", "x-api-key"}
            )
    finally:
        stop()


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerSettings(api_key="secret"))
