"""A node whose YAML names a collector: traces with the steps of its engines arrive there."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory
from tests.support.otlp_receiver import receiving, values

pytest.importorskip("opentelemetry.sdk", reason="the extra otlp is not installed")


@pytest.mark.slow
def test_traces_of_a_node(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    model = {"name": "chat", "path": str(tmp_path), "dtype": "float32", "threads": 1, "max_num_batched_tokens": 64}
    temporary = short_temporary_directory()
    body = {"prompt": [3 + i % 300 for i in range(150)], "max_tokens": 3}
    with receiving() as receiver:
        config = {"node": {"port": 0, "otlp": {"endpoint": receiver.url}}, "models": [model]}
        with NodeProcess(config, tmp_path, temporary) as node:
            answer = httpx.post(f"{node.url}/models/chat/v1/completions", json=body, timeout=DEADLINE_S)
            trace_id = answer.headers["traceparent"].split("-")[1]
            spans = receiver.trace(trace_id, 5)
            metrics = httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text
    remove(temporary)
    assert values(spans["POST /v1/completions"].attributes)["gen_ai.usage.completion_tokens"] == 3
    assert values(spans["prefill"].attributes)["swiftkv.prompt_tokens"] == 150
    assert 0 < values(spans["prefill chunk"].attributes)["swiftkv.prompt_tokens"] <= 64
    assert 'swiftkv:traces_total{outcome="sent"}' in metrics
