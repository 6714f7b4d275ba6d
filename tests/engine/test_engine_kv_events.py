"""An engine that tells a router what its prefix cache has."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from swiftkv.engine.messages import EXIT_LOAD_FAILED
from swiftkv.engine.runner import ModelRunner
from swiftkv.lease.messages import LinkGeometry
from swiftkv.models.registry import read_config
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint
from tests.support.lender_by_hand import borrowing_over

BLOCK_SIZE = 16
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


def test_an_engine_that_lends_and_cannot_listen_says_so_in_one_line(tmp_path: Path) -> None:
    """Nothing of lending runs by then, whose thread would find its sockets closed."""
    make_checkpoint(tmp_path / "model", "llama")
    (group,) = read_config(tmp_path / "model").kv_groups(BLOCK_SIZE, "float32")
    link = LinkGeometry(0, 0, 1, 1, group.block_bytes, 8, 0, 1)
    lending = replace(borrowing_over(link, tmp_path), stream_buffers=1, max_wait_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = EngineProcess(
            tmp_path / "model",
            stderr=subprocess.PIPE,
            block_size=BLOCK_SIZE,
            kv_bytes=64 * group.block_bytes,
            lending=lending,
            kv_events={"endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"},
        )
        assert engine.process.wait(TIMEOUT_S) == EXIT_LOAD_FAILED
    assert engine.process.stderr is not None
    [line] = engine.process.stderr.read().decode().splitlines()
    engine.close()
    assert "kv_events_config.endpoint: cannot listen on" in line


def replayed(router: zmq.Socket[Any]) -> list[dict[str, Any]]:
    """Return all events from the start."""
    router.send_multipart((b"", bytes(8)))
    events: list[dict[str, Any]] = []
    while (frames := router.recv_multipart())[2]:
        events += msgspec.msgpack.decode(frames[2])[1]
    return events
