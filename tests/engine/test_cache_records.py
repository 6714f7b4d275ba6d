"""The reasons why prompts found no more in the cache, each as an engine meets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftkv.engine.messages import CacheCommand, CacheReport, Explanation
from swiftkv.engine.runner import ModelRunner
from tests.engine.engine_process import EngineClient, wait_until_stored
from tests.engine.engine_thread import EngineThread
from tests.engine.tiered_engine import BLOCK, prompt


@contextmanager
def engine(checkpoint: Path, **options: Any) -> Iterator[EngineThread[ModelRunner]]:
    client = EngineThread(checkpoint, ModelRunner, max_num_seqs=4, max_num_batched_tokens=128, **options)
    with client.running():
        yield client


def ask(client: EngineClient, command: CacheCommand) -> CacheReport:
    """Send a command to an engine at rest."""
    client.wait_for_rest()
    client.send(command)
    while not isinstance(report := client.receive(), CacheReport):
        pass
    assert report.call == command.call
    return report


def why(client: EngineClient, tokens: Sequence[int], **options: Any) -> Explanation:
    """Generate after a prompt, and return the reason why no more of it was cached."""
    request_id = client.add(tokens, max_tokens=2, **options)
    (answer,) = client.wait([request_id])
    (found,) = ask(client, CacheCommand(7, [request_id])).explanations
    assert (found.request_id, found.prompt_tokens) == (request_id, len(tokens))
    assert found.cached_tokens == answer.cached_tokens
    return found


def test_reasons_of_the_pool(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"], kv_bytes=48 * BLOCK * 768) as client:
        first = prompt(100, 1)
        assert why(client, first).reason == "never_stored"
        again = why(client, first)
        assert (again.reason, again.cached_tokens) == ("complete", 96)
        assert why(client, [*first[:50], *prompt(50, 2)]).reason == "never_stored"
        assert why(client, first, cache_salt="mine").reason == "other_salt"
        assert why(client, first, cache_salt="mine").reason == "complete"
        assert why(client, first, prompt_logprobs=0).reason == "prompt_logprobs"
        assert why(client, [5, 6, 7]).reason == "complete"
        whole_blocks = prompt(4 * BLOCK, 9)
        assert why(client, whole_blocks).reason == "never_stored"
        again = why(client, whole_blocks)
        assert (again.reason, again.cached_tokens) == ("complete", 3 * BLOCK)  # the last token is computed
        for seed in (3, 4, 5):
            client.generate([prompt(400, seed)])
        evicted = why(client, first)
        assert evicted.reason == "evicted"
        assert evicted.age_s is not None
        assert evicted.age_s >= 0


def test_a_window_whose_tail_is_gone(checkpoints: dict[str, Path]) -> None:
    """Only the ends of prompts and answers can be gone on from, once others needed the room of the rest."""
    with engine(checkpoints["gemma3"], kv_bytes=704 << 10) as client:
        long = prompt(400, 1)
        client.generate([long])
        client.generate([prompt(200, 2)])
        found = why(client, long[:210])
        assert found.reason == "tail_gone"


def test_clearing_forgets_what_nobody_uses(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as client:
        first = prompt(100, 1)
        client.generate([first], max_tokens=2)
        report = ask(client, CacheCommand(3, clear=True))
        assert (report.cleared_blocks, report.explanations) == (6, [])
        assert ask(client, CacheCommand(4, clear=True)).cleared_blocks == 0
        found = why(client, first)
        assert (found.reason, found.cached_tokens) == ("evicted", 0)


def test_clearing_leaves_running_requests_alone(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as client:
        (right,) = client.generate([prompt(100, 1)], max_tokens=300)
        running = client.add(prompt(100, 1), max_tokens=300)
        while not client.answers[running].token_ids:
            client.take_one()
        client.send(CacheCommand(1, clear=True))
        while not isinstance(message := client.receive(), CacheReport):
            client.take(message)
        client.wait([running])
        assert client.answers[running].token_ids == right.token_ids


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"delay": 1.0, "delay_time": "30s"}, "late"),
        ({"flip": 1.0}, "corrupt"),
    ],
)
def test_reasons_of_a_tier_below(
    checkpoints: dict[str, Path], tmp_path: Path, fault: dict[str, Any], reason: str
) -> None:
    file = {"backend": "file", "path": str(tmp_path / "kv"), "size": 1 << 30, "min_free": 0}
    spec = {"directory": "/", "prefetch_threshold": BLOCK}
    first = prompt(100, 1)
    with engine(checkpoints["llama"], storage={"backend": file, **spec}) as client:
        client.generate([first])
        wait_until_stored(client)
    faulty = {"backend": "fault", "inner": file, **fault}
    patience = {"prefetch_timeout_base_s": 0.2 if reason == "late" else 60.0}
    with engine(checkpoints["llama"], storage={"backend": faulty, **spec, **patience}) as client:
        assert why(client, first).reason == reason


def test_requests_that_are_not_remembered_are_left_out(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as client:
        client.generate([[5, 6, 7]], max_tokens=2)
        assert ask(client, CacheCommand(1, [99])).explanations == []
