"""Requests that cannot meet their targets are refused on arrival, with what is forecast; nobody else is."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from echo_gateway import TEXT, Gateway, start_gateway
from prometheus_client.parser import text_string_to_metric_families
from test_outbox import LateReader, client_and_reader, until

from swiftkv.engine.messages import Admitted, EngineStats, SamplingParams, StepOutput
from swiftkv.lease.messages import GroupBlocks
from swiftkv.server.client import EngineClient
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import Generation, SequenceRequest, Terms
from swiftkv.server.targets import Targets
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.tier.messages import TierStats

TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
BODY = {"model": "chat", "prompt": "one two", "max_tokens": 3}


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A step takes 50 ms, which the gateway knows."""
    gateway, stop = start_gateway(tmp_path_factory.mktemp("paced"), tokenizer, step_ms=50)
    learn(gateway)
    yield gateway
    stop()


def learn(gateway: Gateway) -> None:
    """Engines say how long a step takes with their first ones."""
    with gateway.http() as http:
        for model in ("chat", "code"):
            assert http.post("/v1/completions", json={**BODY, "model": model}).status_code == 200


def post(gateway: Gateway, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post("/v1/completions", json={**BODY, **fields}, headers=headers)


def samples(gateway: Gateway, name: str, **labels: str) -> float:
    with gateway.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_a_first_token_that_would_be_late_is_refused_on_arrival(paced: Gateway) -> None:
    before = samples(paced, "swiftkv:requests_refused_total", limit="target_ttft", model_name="chat")
    refused = post(paced, {TTFT: "20"})
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert re.fullmatch(
        r"model 'chat' would take at least 0\.0\d+ s to the first token; the target is 0\.02 s \(target_ttft\)",
        error["message"],
    )
    assert (error["code"], error["type"]) == ("predicted_ttft", "rate_limit_error")
    assert refused.headers["retry-after"] == "600"  # alone it would not be in time either
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert samples(paced, "swiftkv:requests_refused_total", limit="target_ttft", model_name="chat") == before + 1


def test_a_target_that_can_be_met_refuses_nobody(paced: Gateway) -> None:
    assert post(paced, {TTFT: "30000", TPOT: "30000"}).status_code == 200
    assert post(paced).status_code == 200


def test_tokens_that_would_come_too_slowly_are_refused(paced: Gateway) -> None:
    refused = post(paced, {TPOT: "10"})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "predicted_tpot"
    assert "at least 0.05 s per token; the target is 0.01 s (target_tpot)" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "600"  # alone they would not come fast enough either


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_all_protocols_refuse(paced: Gateway, path: str) -> None:
    words = {"input": "one"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "one"}]}
    with paced.http() as http:
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {"model": "chat", length: 20, **words}
        refused = http.post(path, json=body, headers={TTFT: "20"})
    assert refused.status_code == 429
    assert "the target is 0.02 s" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "600"


def test_first_tokens_are_compared_with_what_was_forecast(paced: Gateway) -> None:
    name = "swiftkv:time_to_first_token_forecast_ratio"
    before = samples(paced, f"{name}_count", model_name="code")
    for _ in range(3):
        assert post(paced, {TTFT: "600000"}, model="code").status_code == 200
    assert samples(paced, f"{name}_count", model_name="code") == before + 3
    for _ in range(16):  # one of them is forecast, too
        assert post(paced, model="code").status_code == 200
    assert samples(paced, f"{name}_count", model_name="code") == before + 4


def test_whoever_has_a_token_is_never_dropped(paced: Gateway) -> None:
    stream = paced.openai().completions.create(model="chat", prompt="one two", max_tokens=12, stream=True)
    chunks = iter(stream)
    next(chunks)
    assert post(paced, {TTFT: "20"}).status_code == 429
    assert list(chunks)[-1].choices[0].finish_reason == "length"


def test_a_models_own_targets_are_for_requests_that_may_not_wait(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, step_ms=50, targets=Targets(0.02, 0.02))
    try:
        learn(gateway)
        assert post(gateway).status_code == 429
        assert post(gateway, service_tier="flex").status_code == 200
        assert post(gateway, {TTFT: "30000"}).status_code == 200  # no token is in time, but nothing else runs
    finally:
        stop()


# ---- an engine that says what the test wants ----

BORROWED = ("borrowed_used", "borrowed_cached", "borrowed_in_flight", "staging_layer_blocks")
COSTS = [0.001, 0.0, 0.0, 0.0, 0.0, 0.02]


def begin(client: EngineClient, length: int, ttft_s: float | None = None) -> Generation:
    prompt = np.random.default_rng(length).integers(0, 1000, length).astype("<i4").tobytes()
    return client.generate([SequenceRequest(prompt, SamplingParams(16))], Terms(targets=Targets(ttft_s)))


async def say_costs(client: EngineClient, reader: LateReader, step_time_s: list[float]) -> None:
    await reader.say(StepOutput(b"", b"", b"", stats=EngineStats(*[0] * 12, step_time_s=step_time_s)))
    await until(lambda: client.stats is not None)


def test_when_to_come_again_follows_from_what_is_forecast(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            begin(client, 100, 0.001)  # nobody knows yet how long steps take
            await say_costs(client, reader, COSTS)
            for _ in range(3):
                begin(client, 4000)
            with pytest.raises(ApiError, match=r"about 1\d.* s to the first token; the target is 5 s") as caught:
                begin(client, 3500, 5.0)
            assert 7 <= int(caught.value.response().headers["retry-after"]) <= 13
            assert client.num_in_flight == 4
            client.abort_all()
            begin(client, 3500, 5.0)

    asyncio.run(run())


async def say_steps(reader: LateReader, until_it_fails: Generation) -> ApiError:
    """Have the engine do steps that compute nothing until a request fails; return why it did."""

    async def read() -> None:
        async for _ in until_it_fails:
            pass

    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while not reading.done():
            await reader.say(StepOutput(b"", b"", b""))
            await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as caught:
        reading.result()
    return caught.value


def test_a_request_for_which_it_has_become_too_late_is_refused_before_it_begins(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            late = begin(client, 100, 2.3)  # a step takes 2.07 s, and the prompt 0.12
            error = await say_steps(reader, late)
            assert (error.status, error.code) == (429, "predicted_ttft")
            assert re.fullmatch(
                r"model 'late' would take about [0-9.e+]+ s to the first token; the target is 2\.3 s \(target_ttft\)",
                error.message,
            )
            assert int(error.response().headers["retry-after"]) >= 1
            assert client.num_in_flight == 0
            await reader.take_until(lambda: reader.aborted == list(late.request_ids))

    asyncio.run(run())


def test_a_request_that_has_begun_or_has_no_target_is_not_refused_later(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            terms = Terms(targets=Targets(2.3))
            one = SequenceRequest(bytes(400), SamplingParams(16))
            begun, in_part = client.generate([one], terms), client.generate([one, one], terms)
            untargeted, late = begin(client, 100), begin(client, 100, 2.3)
            admitted = [Admitted(begun.request_ids[0], 0), Admitted(in_part.request_ids[1], 0)]
            await reader.say(StepOutput(b"", b"", b"", admitted=admitted))
            await say_steps(reader, late)  # the others would have been refused before it
            assert [request.num_unfinished for request in (begun, in_part, untargeted)] == [1, 2, 1]
            assert client.num_in_flight == 4

    asyncio.run(run())


def test_a_prompt_that_storage_may_have_is_not_refused_later(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            late = begin(client, 100, 2.3)
            await reader.say(StepOutput(b"", b"", b"", stats=EngineStats(*[0] * 12, tier=TierStats())))
            await until(lambda: client.stats is not None and client.stats.tier is not None)
            stays = begin(client, 90, 0.5)
            await say_steps(reader, late)
            assert stays.num_unfinished == 1

    asyncio.run(run())


def test_what_was_sent_before_is_expected_in_the_cache(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            with pytest.raises(ApiError):
                begin(client, 1500, 0.5)
            first = begin(client, 1500)
            with pytest.raises(ApiError):
                begin(client, 1500, 0.5)  # the first waits
            client.outlook.admitted(first.request_ids[0], 0, time.perf_counter())
            first.close()
            begin(client, 1500, 0.5)

    asyncio.run(run())


def test_a_text_too_long_for_its_target_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            client.outlook.refuse_unread(400, 0, Targets(0.5))
            client.outlook.refuse_unread(4000, 0, Targets())
            with pytest.raises(ApiError, match=r"at least 4.*the target is 0\.5 s"):
                client.outlook.refuse_unread(4000, 0, Targets(0.5))

    asyncio.run(run())


def test_a_text_has_at_least_so_many_tokens(tokenizer: Tokenizer) -> None:
    for text in (TEXT, TEXT * 20, "a", " " * 500):
        assert 1 <= tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(100_000) > 1000


def test_memory_that_others_lend_is_no_reason_to_refuse(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            assert client.outlook.forecast.pool_tokens == 1600
            blocks = GroupBlocks(*[0] * 8, total=100, borrowed_free=3, **dict.fromkeys(BORROWED, 0))
            await reader.say(StepOutput(b"", b"", b"", stats=EngineStats(*[0] * 12, groups=[blocks])))
            await until(lambda: client.stats is not None)
            assert client.outlook.forecast.pool_tokens == math.inf

    asyncio.run(run())


def test_an_engine_that_is_gone_forecasts_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            await say_costs(client, reader, COSTS)
            client.engine_down("was killed")
            client.outlook.refuse_unread(4000, 0, Targets(0.001))

    asyncio.run(run())
