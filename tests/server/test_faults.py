"""Clients that hang up, engines that die, more connections than anybody should open."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest
from echo_gateway import PATIENCE_S, Gateway, wait_until

LONG: dict[str, Any] = {"model": "chat", "prompt": "again and again ", "max_tokens": 4000}


def finished(gateway: Gateway, reason: str) -> float:
    registry = gateway.metrics.registry
    labels = {"model_name": "chat", "engine": "0", "finished_reason": reason}
    return registry.get_sample_value("vllm:request_success_total", labels) or 0.0


def running(gateway: Gateway) -> float | None:
    labels = {"model_name": "chat", "engine": "0"}
    return gateway.metrics.registry.get_sample_value("vllm:num_requests_running", labels)


def test_a_client_that_hangs_up_in_a_stream_ends_its_request(slow_gateway: Gateway) -> None:
    client = slow_gateway.clients["chat"]
    with slow_gateway.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        chunks = response.iter_bytes()  # httpx hangs up as soon as nobody holds this
        next(chunks)
        assert client.num_in_flight == 1
    wait_until(lambda: client.num_in_flight == 0)
    wait_until(lambda: running(slow_gateway) == 0)  # the engine says so: it was told
    assert finished(slow_gateway, "abort") == 1


@pytest.mark.parametrize(
    "sent_ahead",
    [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"x"],
    ids=["nothing", "GET", "byte"],
)
def test_a_client_that_hangs_up_before_the_answer_ends_its_request(slow_gateway: Gateway, sent_ahead: bytes) -> None:
    """It may have sent another request ahead, or a part of one."""
    client = slow_gateway.clients["chat"]
    with slow_gateway.asking("/v1/completions", {**LONG, "n": 3}, sent_ahead):
        wait_until(lambda: client.num_in_flight == 3)
    wait_until(lambda: client.num_in_flight == 0)
    wait_until(lambda: running(slow_gateway) == 0)  # the engine says so: it was told
    assert finished(slow_gateway, "abort") == 3


def test_a_client_that_hangs_up_within_its_body_is_nobodys_error(
    slow_gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway is the test's own: connections that other tests have left may end at any time."""
    host, port = slow_gateway.url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    with slow_gateway.http() as http:
        alone = open_connections(http)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall("\r\n".join([*lines, "Content-Length: 100", "", '{"model": ']).encode())
            wait_until(lambda: open_connections(http) == alone + 1)
        wait_until(lambda: open_connections(http) == alone)
    assert "swiftkv:http_body_bytes 0.0" in b"".join(slow_gateway.metrics.render(None)).decode()
    assert not caplog.records


def open_connections(http: httpx.Client) -> float:
    [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith("swiftkv:http_connections ")]
    return float(line.split()[1])


def test_an_engine_that_dies_fails_its_requests_and_no_others(slow_gateway: Gateway) -> None:
    client, engine = slow_gateway.clients["chat"], slow_gateway.engines["chat"]
    answers: list[Any] = []

    def ask(model: str, stream: bool) -> None:
        body = {**LONG, "model": model, "stream": stream, "max_tokens": 4000 if model == "chat" else 100}
        with slow_gateway.http() as http:
            answers.append((model, stream, http.post("/v1/completions", json=body)))

    threads = [threading.Thread(target=ask, args=(m, s)) for m in ("chat", "code") for s in (False, True)]
    for thread in threads:
        thread.start()

    def both_have_begun() -> bool:
        return client.num_in_flight == 2 and all(one.first_token_s for one in list(client._in_flight.values()))

    wait_until(both_have_begun)
    engine.stop()
    slow_gateway.call(lambda: client.engine_down("was killed by SIGKILL", retry_after_s=3))
    for thread in threads:
        thread.join(PATIENCE_S)
    by_kind = {(model, stream): response for model, stream, response in answers}
    assert by_kind["chat", False].status_code == 503
    assert by_kind["chat", False].headers["retry-after"] == "3"
    assert by_kind["chat", True].status_code == 200
    assert by_kind["chat", True].text.endswith("data: [DONE]\n\n")
    reason = "model 'chat' stopped and is being restarted: its engine was killed by SIGKILL"
    assert f'"message":"{reason}"' in by_kind["chat", True].text
    assert by_kind["code", False].json()["usage"]["completion_tokens"] == 100
    assert '"error"' not in by_kind["code", True].text

    with slow_gateway.http() as http:
        refused = http.post("/v1/completions", json=LONG)
        ready = http.get("/ready")
        assert http.get("/health").status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
    assert ready.status_code == 503
    assert ready.json()["models"] == {"chat": "restarting", "code": "ready"}
    assert "'chat' is restarting (was killed by SIGKILL)" in ready.json()["error"]["message"]

    engine.start()
    slow_gateway.wait_ready("chat")
    with slow_gateway.http() as http:
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200


def test_a_stream_cut_by_a_dying_engine_is_an_error_for_the_openai_client(slow_gateway: Gateway) -> None:
    client, engine = slow_gateway.clients["chat"], slow_gateway.engines["chat"]
    stream = slow_gateway.openai().completions.create(**LONG, stream=True)
    next(stream)
    engine.stop()
    slow_gateway.call(lambda: client.engine_down("ended with code 1"))
    with pytest.raises(openai.APIError, match="stopped"):
        list(stream)


def test_nobody_at_the_other_end(slow_gateway: Gateway) -> None:
    """The process is gone, and the supervisor has not noticed yet."""
    slow_gateway.engines["chat"].stop()
    with slow_gateway.http() as http:
        # The socket notices on its own; until then a request is lost, and fails when the supervisor speaks.
        wait_until(lambda: not slow_gateway.clients["chat"]._push.poll(0, 2))
        response = http.post("/v1/completions", json=LONG)
    assert response.status_code == 503
    assert slow_gateway.clients["chat"].num_in_flight == 0


def test_the_last_word_of_a_dead_engine_is_not_taken_for_its_successors(slow_gateway: Gateway) -> None:
    client = slow_gateway.clients["chat"]
    last_word = client.engine
    assert last_word is not None
    slow_gateway.engines["chat"].stop()
    slow_gateway.call(lambda: client.engine_down("ended with code 1"))
    slow_gateway.call(lambda: client.engine_up(last_word))
    assert client.state == "restarting"
    # It stays so while the successor is on its way, even one that got the same process id.
    slow_gateway.call(lambda: client.expect(last_word.incarnation + 1))
    slow_gateway.call(lambda: client.engine_up(last_word))
    assert client.state == "restarting"
    successor = msgspec.structs.replace(last_word, incarnation=last_word.incarnation + 1)
    slow_gateway.call(lambda: client.engine_up(successor))
    assert client.state == "ready"


def test_an_engine_that_comes_up_while_the_node_drains_does_not_reopen_its_model(slow_gateway: Gateway) -> None:
    client, engine = slow_gateway.clients["chat"], slow_gateway.engines["chat"]
    engine.stop()
    slow_gateway.call(lambda: client.engine_down("ended with code 1"))
    asyncio.run_coroutine_threadsafe(client.drain(timeout_s=1), slow_gateway.loop).result(PATIENCE_S)
    engine.start()
    slow_gateway.wait_ready("chat")
    assert client.state == "draining"
    with slow_gateway.http() as http:
        refused = http.post("/v1/completions", json=LONG)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]


def test_draining_finishes_what_runs_and_refuses_the_rest(slow_gateway: Gateway) -> None:
    client = slow_gateway.clients["chat"]
    answers: list[httpx.Response] = []

    def ask() -> None:
        with slow_gateway.http() as http:
            answers.append(http.post("/v1/completions", json={**LONG, "max_tokens": 60}))

    asking = threading.Thread(target=ask)
    with slow_gateway.engines["chat"].standing_still():
        asking.start()
        wait_until(lambda: client.num_in_flight == 1)
        draining = asyncio.run_coroutine_threadsafe(client.drain(timeout_s=PATIENCE_S), slow_gateway.loop)
        wait_until(lambda: client.state == "draining")
        with slow_gateway.http() as http:
            refused = http.post("/v1/completions", json=LONG)
    draining.result(PATIENCE_S)
    asking.join(PATIENCE_S)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert answers[0].json()["usage"]["completion_tokens"] == 60


def test_what_does_not_finish_in_time_is_failed(slow_gateway: Gateway) -> None:
    client = slow_gateway.clients["chat"]
    stream = slow_gateway.openai().completions.create(**LONG, stream=True)
    next(stream)
    asyncio.run_coroutine_threadsafe(client.drain(timeout_s=0.05), slow_gateway.loop).result(PATIENCE_S)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert client.num_in_flight == 0


def test_a_full_queue_is_429(slow_gateway: Gateway) -> None:
    client = slow_gateway.clients["chat"]
    slow_gateway.call(lambda: setattr(client, "max_in_flight", 6))
    stream = slow_gateway.openai().completions.create(**LONG, n=3, stream=True)
    next(stream)
    other = slow_gateway.openai().completions.create(**LONG, n=3, stream=True)
    next(other)
    with slow_gateway.http() as http:
        response = http.post("/v1/completions", json=LONG)
    stream.close()
    other.close()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert response.json()["error"]["code"] == "queue_full"
    refused = {"model_name": "chat", "limit": "max_num_queued_reqs"}
    assert slow_gateway.metrics.registry.get_sample_value("swiftkv:requests_refused_total", refused) == 1


def test_500_connections_at_once(gateway: Gateway) -> None:
    """All of them are answered: with the text, or with 429."""

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as http:
            bodies = [{"model": "chat", "prompt": f"{i} ", "max_tokens": 8, "stream": i % 2 == 0} for i in range(500)]
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))

    responses = asyncio.run(run())
    assert {response.status_code for response in responses} <= {200, 429}
    assert sum(response.status_code == 200 for response in responses) >= 400
    for number, response in enumerate(responses):
        if response.status_code == 200:
            assert f"{number} " in response.text or number % 2 == 0
    wait_until(lambda: gateway.clients["chat"].num_in_flight == 0)


def test_a_probe_of_one_model_does_not_fail_because_of_another(slow_gateway: Gateway) -> None:
    slow_gateway.call(lambda: slow_gateway.clients["chat"].engine_down("was ended"))
    with slow_gateway.http() as http:
        statuses = {path: http.get(path).status_code for path in ("/ready", "/models/chat/ready", "/models/code/ready")}
        code = http.get("/models/code/ready").json()
        metrics = http.get("/models/code/metrics").text
        nobody = http.get("/models/none/ready").status_code
    assert statuses == {"/ready": 503, "/models/chat/ready": 503, "/models/code/ready": 200}
    assert list(code["engines"]) == ["code"]
    assert 'model_name="code"' in metrics
    assert 'model_name="chat"' not in metrics
    assert nobody == 404
