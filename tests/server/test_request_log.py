"""The id of a request, and its line in the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway

from swiftkv.errors import ConfigError
from swiftkv.server.app import ServerSettings
from swiftkv.server.request_log import RequestLog, open_request_log
from swiftkv.server.tokenizer import Tokenizer


@dataclass
class LoggedGateway:
    gateway: Gateway
    log: RequestLog
    path: Path

    def lines(self, count: int) -> list[dict[str, Any]]:
        """The lines, oldest first, once there are `count`: one is written when its answer has left."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(lines := self.path.read_text().splitlines()) < count:
            assert time.monotonic() < deadline_s, f"{len(lines)} of {count} lines"
            self.log.close()
        return [json.loads(line) for line in lines]


@pytest.fixture
def logged(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[LoggedGateway]:
    """A step takes 5 ms."""
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path)
    settings = ServerSettings(api_key="key", request_log=log)
    gateway, stop = start_gateway(tmp_path, tokenizer, step_ms=5, settings=settings)
    gateway.api_key = "key"
    yield LoggedGateway(gateway, log, path)
    stop()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "code", "prompt": [300] * 20, "max_tokens": 7, **fields}


@pytest.mark.parametrize("sent", ["a", "run-7/turn 2".replace(" ", "_"), "~" * 128])
def test_a_sound_id_is_kept(gateway: Gateway, sent: str) -> None:
    with gateway.http() as http:
        for path in ("/health", "/no-such-path"):
            assert http.get(path, headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize(
    ("path", "fields", "prefix"),
    [
        ("/v1/completions", {"prompt": "a"}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl-"),
    ],
)
def test_the_id_of_an_answer_ends_with_it(gateway: Gateway, path: str, fields: dict[str, Any], prefix: str) -> None:
    with gateway.http() as http:
        body = {"model": "chat", "max_tokens": 1, **fields}
        asked, again = (http.post(path, json=body, headers=headers) for headers in ({"X-Request-Id": "my/id"}, {}))
    assert asked.json()["id"] == f"{prefix}my/id"
    assert again.json()["id"] == prefix + again.headers["x-request-id"]


@pytest.mark.parametrize("sent", ["", "two words", "~" * 129, "caf\xe9", "tab\there"])
def test_others_get_a_new_one(gateway: Gateway, sent: str) -> None:
    with gateway.http() as http:
        answers = [http.get("/health", headers={"X-Request-Id": sent.encode("latin-1")}) for _ in range(2)]
        answers.append(http.get("/health"))
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3
    assert sent not in ids


def test_the_line_of_a_generation(logged: LoggedGateway) -> None:
    with logged.gateway.http() as http:
        for stream in (False, True):
            body = completion(n=2, stream=stream)
            answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": f"stream-{stream}"})
            assert answer.status_code == 200
    for line, stream in zip(logged.lines(2), (False, True), strict=True):
        assert line["request_id"] == f"stream-{stream}"
        assert (line["method"], line["path"], line["model"]) == ("POST", "/v1/completions", "code")
        assert (line["status"], line["sequences"], line["finish_reasons"]) == (200, 2, ["length"])
        assert (line["prompt_tokens"], line["generated_tokens"]) == (40, 14)
        assert 0 <= line["cached_tokens"] <= 40
        assert set(line["cached_tokens_details"]) == {"local", "peer", "host", "storage"}
        assert sum(line["cached_tokens_details"].values()) == line["cached_tokens"]
        # The second sequence may begin after the first token of the first.
        assert 0 <= line["queue_s"] <= line["last_token_s"] <= line["total_s"]
        assert 0 < line["first_token_s"] <= line["last_token_s"]
        assert line["exposed_s"] == 0.001
        assert line["leased_bytes"] == {"lent": 20, "taken_back": 0, "borrowed": 1, "given_back": 0}


def test_the_lines_of_what_fails(logged: LoggedGateway) -> None:
    with logged.gateway.http() as http:
        http.get("/health")
        http.get("/models/code/metrics")
        http.post("/v1/completions", json=completion(model="none"))
        http.post("/v1/completions", json=completion(max_tokens=-1))
        http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
        http.get("/admin/lending")
    lines = logged.lines(4)
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 404),
        ("/v1/completions", 400),
        ("/v1/models", 401),
        ("/admin/lending", 401),
    ]
    assert all("sequences" not in line for line in lines)


def test_what_is_refused_leaves_a_line_in_the_log_too(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """One for each status and time: a path may hold anything, and is no kind of its own."""
    caplog.set_level(logging.INFO, logger="swiftkv")
    with gateway.http() as http:
        http.get("/health", headers={"X-Request-Id": "fine"})
        for number in range(20):
            http.get(f"/no-such-path/{number}%0A", headers={"X-Request-Id": f"lost-{number}"})
        http.post("/v1/completions", json=completion(max_tokens=-1), headers={"X-Request-Id": "bad"})
        http.get("/health")  # a line is written after its answer was sent, and before the next request begins
    lines = [record.getMessage() for record in caplog.records if record.name == "swiftkv.server.request_log"]
    assert sum("was answered 404" in line for line in lines) < 5  # one for each interval of a slow machine
    assert lines[-1] == "POST /v1/completions was answered 400 (request bad)"
    assert all("\n" not in line for line in lines)


def test_a_client_that_hangs_up(logged: LoggedGateway) -> None:
    with logged.gateway.http() as http:
        body = completion(stream=True, max_tokens=4000, ignore_eos=True)
        with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "gone"}) as answer:
            next(answer.iter_lines())
    lines = logged.lines(1)
    assert (lines[0]["request_id"], lines[0]["status"], lines[0]["finish_reasons"]) == ("gone", 200, ["abort"])
    assert 1 <= lines[0]["generated_tokens"] < 4000


def test_a_log_that_cannot_be(tmp_path: Path) -> None:
    with open_request_log(None) as log:
        assert log is None
    with pytest.raises(ConfigError, match=r"^node.request_log: cannot write to .*: Is a directory; name another"):
        RequestLog(tmp_path)
    path = tmp_path / "log"
    with open_request_log(str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
