"""An engine that tells a router what its prefix cache has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from swiftkv.engine.runner import ModelRunner
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

PROMPT = [3 + i % 300 for i in range(40)]


def test_a_router_hears_of_prompts_and_answers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    client = EngineThread(tmp_path / "model", ModelRunner, kv_events={**addresses, "topic": "kv@pod@model"})
    context = zmq.Context()
    router = context.socket(zmq.DEALER)
    router.connect(addresses["replay_endpoint"])
    with client.running():
        (answer,) = client.wait([client.add(PROMPT, cache_salt="a tenant", max_tokens=10)])
        told = [*PROMPT, *answer.token_ids][:48]
        events: list[dict[str, Any]] = []
        while sum(len(event["token_ids"]) for event in events) < len(told):  # the last batch follows the answer
            events = replayed(router)
    context.destroy(linger=0)
    assert {event["type"] for event in events} == {"BlockStored"}
    assert [token for event in events for token in event["token_ids"]] == told
    assert events[0]["extra_keys"][0] == ["a tenant"]
    assert {event["medium"] for event in events} == {"CPU"}
    assert events[0]["kv_cache_spec_kind"] == "full_attention"


def replayed(router: zmq.Socket[Any]) -> list[dict[str, Any]]:
    """Return all events from the start."""
    router.send_multipart((b"", bytes(8)))
    events: list[dict[str, Any]] = []
    while (frames := router.recv_multipart())[2]:
        events += msgspec.msgpack.decode(frames[2])[1]
    return events
