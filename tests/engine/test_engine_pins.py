"""Pins of a real engine: what they keep, when they end, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swiftkv.engine.messages import CacheReport, Pin, PinPrompt, PinView, Unpin
from swiftkv.engine.runner import ModelRunner
from tests.engine.engine_process import EngineClient
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

BLOCK = 16
HOUR_S = 3600.0


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pins") / "llama"
    make_checkpoint(directory, "llama")
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[EngineThread[ModelRunner]]:
    """An engine whose pool has room for 48 blocks, half of them for pins."""
    client = EngineThread(checkpoint, ModelRunner, max_model_len=512, kv_bytes=768 << 10, max_pinned_share=0.5)
    with client.running():
        yield client


def ask(engine: EngineClient, message: Pin | PinPrompt | Unpin) -> CacheReport:
    engine.send(message)
    while not isinstance(report := engine.receive(), CacheReport):
        engine.take(report)
    assert report.call == message.call
    return report


def pin(engine: EngineClient, request_id: int, ttl_s: float = HOUR_S) -> PinView | None:
    return ask(engine, Pin(request_id, [request_id], ttl_s)).pin


def ran(engine: EngineClient, tokens: list[int]) -> int:
    """Run a prompt, and return the request's number."""
    request_id = engine.add(tokens, max_tokens=2)
    engine.wait([request_id])
    return request_id


def cached(engine: EngineClient, tokens: list[int]) -> int | None:
    return engine.answers[ran(engine, tokens)].cached_tokens


def test_a_pinned_prompt_is_there_whatever_comes_until_it_is_unpinned(engine: EngineThread[ModelRunner]) -> None:
    kept = pin(engine, ran(engine, prompt(200, 1)))
    assert kept is not None
    assert (kept.num_tokens, kept.is_lost) == (192, False)
    for seed in range(2, 6):
        ran(engine, prompt(400, seed))
    assert cached(engine, prompt(200, 1)) == 192
    stats = engine.wait_for_rest()
    assert [view.pin_id for view in stats.pins] == [kept.pin_id]
    assert [group.pinned for group in stats.groups] == [12]
    assert ask(engine, Unpin(1000, kept.pin_id)).why_not is None
    assert ask(engine, Unpin(1001, kept.pin_id)).why_not == f"there is no pin {kept.pin_id}"
    for seed in range(6, 9):
        ran(engine, prompt(400, seed))
    assert cached(engine, prompt(200, 1)) == 0


def test_a_pin_beyond_the_share_of_the_pool_is_refused(engine: EngineThread[ModelRunner]) -> None:
    first, second = ran(engine, prompt(300, 1)), ran(engine, prompt(300, 2))
    assert pin(engine, first) is not None
    refused = ask(engine, Pin(second, [second], HOUR_S))
    assert refused.pin is None
    assert refused.why_not == (
        "pins would take 75% of the pool, and kv_cache.max_pinned is 50%; unpin something, or raise it"
    )
    assert "does not remember" in str(ask(engine, Pin(900, [900], HOUR_S)).why_not)


def test_of_a_prompt_that_nobody_names_a_request_of_stays_what_the_pool_has(
    engine: EngineThread[ModelRunner],
) -> None:
    ran(engine, prompt(200, 1))
    longer = np.array([*prompt(200, 1), *prompt(100, 2)], np.int32).tobytes()
    assert ask(engine, PinPrompt(1, longer, "another salt", HOUR_S)).why_not == (
        "no whole block of the prompt is in the model's own pool now; send a request with the prompt first"
    )
    kept = ask(engine, PinPrompt(2, longer, "", HOUR_S)).pin
    assert kept is not None
    assert kept.num_tokens == 192
    for seed in range(3, 6):
        ran(engine, prompt(400, seed))
    assert cached(engine, prompt(200, 1)) == 192


def test_a_pin_ends_when_its_time_is_over(engine: EngineThread[ModelRunner]) -> None:
    assert pin(engine, ran(engine, prompt(200, 1)), ttl_s=1e-6) is not None
    while engine.stats is None or engine.stats.pins:
        engine.take_one()
    assert [group.pinned for group in engine.stats.groups] == [0]


def test_a_request_that_needs_the_whole_pool_ends_a_pin_and_the_pin_says_so(engine: EngineThread[ModelRunner]) -> None:
    kept = pin(engine, ran(engine, prompt(380, 1)))
    assert kept is not None
    assert cached(engine, prompt(508, 2)) == 0
    stats = engine.wait_for_rest()
    assert [(view.pin_id, view.is_lost) for view in stats.pins] == [(kept.pin_id, True)]
    assert [group.pinned for group in stats.groups] == [0]
