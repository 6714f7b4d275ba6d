"""Models that sleep, as clients and administrators see them; the engine is an echo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_coordinator import FIRST_BUDGET_BYTES, POOL_BYTES
from echo_gateway import PATIENCE_S, Gateway, start_gateway
from typer.testing import CliRunner

from swiftkv.cli import app
from swiftkv.errors import ConfigError
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.lending import LendingMember, NodeLending, Outsider
from swiftkv.server.load_meter import LoadMeter
from swiftkv.server.node_views import Loading
from swiftkv.server.sleep import Sleeper
from swiftkv.server.tokenizer import Tokenizer
from tests.support.node_process import wait_for


@pytest.fixture
def own_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """Its steps take 10 ms."""
    gateway, stop = start_gateway(tmp_path, tokenizer, step_ms=10)
    yield gateway
    stop()


def admin(gateway: Gateway, path: str) -> httpx.Response:
    with gateway.admin() as http:
        return http.post(f"/admin/models/{path}")


def complete(gateway: Gateway, model: str) -> httpx.Response:
    with gateway.http() as http:
        return http.post("/v1/completions", json={"model": model, "prompt": "one two three", "max_tokens": 4})


def state(gateway: Gateway, model: str) -> EngineState:
    return gateway.clients[model].state


@contextmanager
def streaming(gateway: Gateway, model: str, max_tokens: int) -> Iterator[Iterator[str]]:
    body = {"model": model, "prompt": "one two three", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with gateway.http() as http, http.stream("POST", "/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


def lending(gateway: Gateway) -> dict[str, Any]:
    with gateway.admin() as http:
        (code,) = (m for m in http.get("/admin/lending").json()["models"] if m["model"] == "code")
    return dict(code)


def test_a_model_stays_asleep_where_there_is_no_memory_for_it(own_gateway: Gateway) -> None:
    def check_room() -> None:
        raise ConfigError("kv_cache.memory: too much")

    async def end_engine() -> None:
        raise AssertionError("it sleeps")

    sleeper = Sleeper(own_gateway.clients["code"], NodeLending([], False, "none"), end_engine, check_room=check_room)
    admin(own_gateway, "code/sleep?level=1").raise_for_status()
    with pytest.raises(ApiError, match=r"model .code. stays asleep: kv_cache\.memory: too much") as refused:
        asyncio.run_coroutine_threadsafe(sleeper.wake(), own_gateway.loop).result(PATIENCE_S)
    assert (refused.value.status, refused.value.code) == (503, "no_room")
    assert state(own_gateway, "code") is EngineState.ASLEEP
    admin(own_gateway, "code/wake").raise_for_status()
    assert complete(own_gateway, "code").status_code == 200


@pytest.mark.parametrize(
    ("give_way_s", "says"),
    [(1e6, "weights loaded; it gives way to models that have requests"), (0.0, "weights loaded")],
)
def test_a_model_that_wakes_says_whether_it_gives_way(own_gateway: Gateway, give_way_s: float, says: str) -> None:
    client, engine = own_gateway.clients["code"], own_gateway.engines["code"]
    admin(own_gateway, "code/sleep?level=1").raise_for_status()
    with engine.standing_still():
        own_gateway.call(lambda: client.wake(give_way_s))
        assert state(own_gateway, "code") is EngineState.WAKING
        with own_gateway.http() as http:
            loading = http.get("/ready").json()["engines"]["code"]["loading"]
        assert loading["gives_way"] == (give_way_s > 0)
        shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["status", "--url", own_gateway.url])
        assert shown.exit_code == 1
        assert f"code: 0B of 0B of {says}" in shown.stdout.splitlines()
    wait_for("the model serves again", lambda: state(own_gateway, "code") is EngineState.READY)
    with own_gateway.http() as http:
        assert http.get("/ready").json()["engines"]["code"]["loading"] is None


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_wakes_has_loaded_nothing_yet(own_gateway: Gateway, level: int) -> None:
    client = own_gateway.clients["code"]
    client.load_meter = LoadMeter(100)
    client.load_meter.observe(100)
    admin(own_gateway, f"code/sleep?level={level}").raise_for_status()

    async def wake() -> Loading | None:
        client.wake()
        return client.view().loading

    loading = asyncio.run_coroutine_threadsafe(wake(), own_gateway.loop).result(PATIENCE_S)
    assert loading == Loading(0, 100, None, gives_way=False)
    wait_for("the model serves again", lambda: state(own_gateway, "code") is EngineState.READY)


def test_a_model_that_restarts_has_loaded_nothing_yet(own_gateway: Gateway) -> None:
    client = own_gateway.clients["code"]
    client.load_meter = LoadMeter(100)

    async def end() -> Loading | None:
        client.load_meter.observe(100)
        client.engine_down("was killed by SIGKILL")
        return client.view().loading

    loading = asyncio.run_coroutine_threadsafe(end(), own_gateway.loop).result(PATIENCE_S)
    assert loading == Loading(0, 100, None, gives_way=False)


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_sleeps_says_so_and_answers_as_before_when_it_is_awake(gateway: Gateway, level: int) -> None:
    before = complete(gateway, "code").json()["choices"]
    slept = admin(gateway, f"code/sleep?level={level}").json()
    assert (slept["model"], slept["state"]) == ("code", "asleep")
    refused = complete(gateway, "code")
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert refused.json()["error"]["code"] == "model_asleep"
    assert refused.json()["error"]["message"] == ("model 'code' is asleep; wake it with: swiftkv models wake code")
    assert complete(gateway, "chat").status_code == 200
    with gateway.admin() as http:
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["models"]) == (200, {"chat": "ready", "code": "asleep"})
        assert ready.json()["engines"]["code"]["why"] == "was put to sleep"
        assert (ready.json()["engines"]["code"]["pid"] is None) == (level == 2)
        assert http.get("/models/code/ready").status_code == 503
        assert http.get("/v1/models/code").json()["state"] == "asleep"
        assert http.get("/admin/models/code/is_sleeping").json() == {"is_sleeping": True}
        metrics = http.get("/metrics").text
        assert 'swiftkv:engine_state{model_name="code",state="asleep"} 1.0' in metrics
        vllms_name = ("weights_offloaded", "discard_all")[level - 1]
        assert f'vllm:engine_sleep_state{{engine="0",model_name="code",sleep_state="{vllms_name}"}} 1.0' in metrics
        assert 'vllm:engine_sleep_state{engine="0",model_name="code",sleep_state="awake"} 0.0' in metrics
        assert 'vllm:engine_sleep_state{engine="0",model_name="chat",sleep_state="awake"} 1.0' in metrics
        assert admin(gateway, f"code/sleep?level={level}").status_code == 200  # again: nothing is left to do
        woken = http.post("/admin/models/code/wake_up")
        assert (woken.status_code, woken.json()["state"]) == (200, "ready")
        assert http.post("/admin/models/code/wake").json()["state"] == "ready"
        assert http.get("/admin/models/code/is_sleeping").json() == {"is_sleeping": False}
    assert complete(gateway, "code").json()["choices"] == before


def test_asleep_at_level_1_it_lends_its_whole_pool_and_at_level_2_none(gateway: Gateway) -> None:
    assert lending(gateway)["budget_bytes"] == FIRST_BUDGET_BYTES
    changes = list(gateway.budgets["code"])
    admin(gateway, "code/sleep")
    asleep = lending(gateway)
    assert (asleep["error"], asleep["budget_bytes"], asleep["lent_bytes"]) == (None, POOL_BYTES, POOL_BYTES)
    admin(gateway, "code/wake")
    wait_for("the budget of before", lambda: lending(gateway)["lent_bytes"] == FIRST_BUDGET_BYTES)
    assert gateway.budgets["code"] == changes  # nobody changed what holds while it is awake
    admin(gateway, "code/sleep")
    assert admin(gateway, "code/sleep?level=2").json()["state"] == "asleep"
    assert "is asleep" in lending(gateway)["error"]
    admin(gateway, "code/wake")
    assert lending(gateway)["lent_bytes"] == FIRST_BUDGET_BYTES


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_wakes_a_model_that_wakes_for_requests(gateway: Gateway, level: int) -> None:
    before = complete(gateway, "chat").json()["choices"]
    assert admin(gateway, f"chat/sleep?level={level}").json()["state"] == "asleep"
    with gateway.http() as http:
        assert http.get("/models/chat/ready").status_code == 200
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: complete(gateway, "chat"), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(answer.json()["choices"] == before for answer in answers)


def test_a_stream_that_asks_is_told_how_far_the_model_is_that_it_wakes(own_gateway: Gateway) -> None:
    body = {"model": "chat", "prompt": "one two three", "max_tokens": 4, "stream": True}
    headers = {"X-Swiftkv-Progress": "1"}

    def lines(max_tokens: int) -> Iterator[str]:
        asked = body | {"max_tokens": max_tokens}
        with own_gateway.http() as http, http.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
            assert answer.status_code == 200
            yield from (line for line in answer.iter_lines() if line)

    awake = list(lines(4))
    assert not any(line.startswith(":") for line in awake)
    admin(own_gateway, "chat/sleep?level=1").raise_for_status()
    with own_gateway.engines["chat"].standing_still():
        woken = lines(4)
        assert next(woken) == ": model 'chat' is waking up"
        assert next(woken) == ": model 'chat' is waking up: 0B of 0B of weights loaded"
    rest = [line for line in woken if not line.startswith(":")]
    assert len(rest) == len(awake)
    assert rest[-1] == "data: [DONE]"
    admin(own_gateway, "chat/sleep?level=1").raise_for_status()
    *_, error, end = lines(10**6)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert end == "data: [DONE]"


def test_a_request_that_is_prepared_while_its_model_falls_asleep_wakes_it(own_gateway: Gateway) -> None:
    with ThreadPoolExecutor(1) as clients:
        with own_gateway.preparing_nothing("chat") as threads:
            answer = clients.submit(complete, own_gateway, "chat")
            wait_for("the request to be prepared", lambda: threads.num_waiting)
            assert admin(own_gateway, "chat/sleep").json()["state"] == "asleep"
        assert answer.result().status_code == 200
    assert state(own_gateway, "chat") is EngineState.READY


def test_sleep_waits_for_requests_in_flight_and_gives_up_or_aborts_them(own_gateway: Gateway) -> None:
    with streaming(own_gateway, "code", max_tokens=3000) as events:
        kept = admin(own_gateway, "code/sleep?timeout=50ms")
        assert (kept.status_code, kept.json()["error"]["code"]) == (409, "in_flight")
        assert "has 1 sequences in flight after 0.05 s, so it stays awake" in kept.json()["error"]["message"]
        assert state(own_gateway, "code") is EngineState.READY
        assert complete(own_gateway, "code").status_code == 200
        assert admin(own_gateway, "code/sleep?now=true").json()["state"] == "asleep"
        assert "model 'code' is going to sleep" in list(events)[-2]
    admin(own_gateway, "code/wake")
    with streaming(own_gateway, "code", max_tokens=600) as events, ThreadPoolExecutor(1) as other:
        with own_gateway.engines["code"].standing_still():
            sleeping = other.submit(admin, own_gateway, "code/sleep")
            wait_for("the model to fall asleep", lambda: state(own_gateway, "code") is EngineState.SLEEPING)
            assert "is going to sleep" in complete(own_gateway, "code").json()["error"]["message"]
            busy = admin(own_gateway, "code/sleep")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "not_ready")
        assert list(events)[-1] == "data: [DONE]"
        assert sleeping.result().json()["state"] == "asleep"


def test_an_engine_that_is_killed_in_its_sleep_leaves_the_model_asleep(own_gateway: Gateway) -> None:
    admin(own_gateway, "code/sleep")
    own_gateway.engines["code"].stop()
    own_gateway.call(lambda: own_gateway.clients["code"].engine_down("was killed by SIGKILL"))
    assert state(own_gateway, "code") is EngineState.ASLEEP
    assert complete(own_gateway, "code").json()["error"]["code"] == "model_asleep"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("nobody/sleep", 404, "no model 'nobody'"),
        ("code/sleep?level=3", 400, "field 'level'"),
        ("code/sleep?timeout=soon", 400, "field 'timeout': write a duration such as 90s, 30m or 24h"),
        ("code/sleep?now=yes", 400, "field 'now'"),
        ("code/sleep?levle=2", 400, "parameter 'levle' is not supported; this path takes level, now, timeout"),
        ("code/wake?now=true", 400, "parameter 'now' is not supported"),
        ("nobody/wake", 404, "no model 'nobody'"),
    ],
)
def test_what_cannot_be_is_refused(gateway: Gateway, path: str, status: int, says: str) -> None:
    answer = admin(gateway, path)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert state(gateway, "code") is EngineState.READY


def test_a_model_that_is_down_cannot_be_put_to_sleep(own_gateway: Gateway) -> None:
    own_gateway.call(lambda: own_gateway.clients["code"].engine_down("ended with code 3", state=EngineState.DOWN))
    answer = admin(own_gateway, "code/sleep")
    assert answer.status_code == 409
    assert "is down; only a model that serves" in answer.json()["error"]["message"]
    assert admin(own_gateway, "code/wake").status_code == 503


def test_a_model_without_lending_is_asked_for_no_budget(own_gateway: Gateway) -> None:
    member = LendingMember("code", "worker", 0, own_gateway.clients["code"], Outsider("has no part in lending"))
    lending = NodeLending([member], True, "shm")
    for change in (lending.lend_all, lending.lend_as_before, lending.recall_all):
        asyncio.run(change("code"))
