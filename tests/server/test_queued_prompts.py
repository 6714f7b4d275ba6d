"""Prompts that wait for an engine are counted until they have a token, and too many of them are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from test_outbox import LateReader, client_and_reader, until

from swiftkv.engine.messages import EngineStats, SamplingParams, StepOutput
from swiftkv.server.client import EngineClient
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import Generation, SequenceRequest
from swiftkv.server.queued_prompts import QueuedPrompts


def begin(client: EngineClient, *lengths: int) -> Generation:
    return client.generate([SequenceRequest(b"\0" * 4 * length, SamplingParams(16)) for length in lengths])


async def say_token(reader: LateReader, request_id: int) -> None:
    await reader.say(StepOutput(np.array([request_id], "<u8").tobytes(), np.array([7], "<i4").tobytes(), b"\0"))


def test_prompts_count_until_their_first_token_or_their_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            first = begin(client, 100)
            with begin(client, 30, 4):
                await reader.take_until(lambda: len(reader.added) == 3)
                assert client.outlook.queued.num_tokens == 134
                await say_token(reader, reader.added[0])
                await until(lambda: client.outlook.queued.num_tokens == 34)
                await say_token(reader, reader.added[0])
                await say_token(reader, reader.added[1])
                await until(lambda: client.outlook.queued.num_tokens == 4)
            assert client.outlook.queued.num_tokens == 0
            first.close()
            assert client.outlook.queued.num_tokens == 0
            begin(client, 50)
            client.engine_down("was killed")
            assert client.outlook.queued.num_tokens == 0

    asyncio.run(run())


def test_too_many_tokens_that_wait_are_refused_until_they_are_computed(tmp_path: Path) -> None:
    async def run() -> None:
        async with client_and_reader(tmp_path) as (client, reader):
            client.outlook.queued.max_tokens = 1000
            with begin(client, 600), begin(client, 800):  # the limit is not reached before the second
                await reader.say(StepOutput(b"", b"", b"", stats=EngineStats(*[0] * 12, prefill_tokens_per_s=40.0)))
                await until(lambda: client.outlook.queued.tokens_per_s == 40.0)
                with pytest.raises(ApiError, match="has 1400 of at most 1000 prompt tokens waiting") as caught:
                    begin(client, 1)
                assert caught.value.status == 429
                assert caught.value.response().headers["retry-after"] == "35"
                assert caught.value.response().headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
                await reader.take_until(lambda: len(reader.added) == 2)
                await say_token(reader, reader.added[0])
                await until(lambda: not client.outlook.queued.is_full)
                begin(client, 1).close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens_per_s", "num_tokens", "expected_s"),
    [(None, 5000, 1.0), (100.0, 20, 1.0), (100.0, 250, 2.5), (1.0, 9000, 600.0)],
)
def test_when_to_come_again(tokens_per_s: float | None, num_tokens: int, expected_s: float) -> None:
    assert QueuedPrompts(tokens_per_s=tokens_per_s, num_tokens=num_tokens).retry_after_s() == expected_s
