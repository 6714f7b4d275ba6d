"""A node that is started again knows how long its steps take before it has computed anything."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from swiftkv.engine.messages import STEP_TIME_TERMS
from swiftkv.learnt import FILE_NAME
from swiftkv.simulate.step_times import read_step_times
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory, small_models


@pytest.mark.slow
def test_step_times_outlive_the_node(checkpoint: Path, tmp_path: Path) -> None:
    temporary, state = short_temporary_directory(), tmp_path / "state"
    setup = {"node": {"port": 0, "state_dir": str(state)}, "models": small_models(checkpoint, "chat")}

    def ask(node: NodeProcess, length: int) -> httpx.Response:
        body = {"prompt": [5] * length, "max_tokens": 8, "ignore_eos": True}
        headers = {"x-llm-d-slo-ttft-ms": "0.001"} if length == 1 else {}
        url = f"{node.url}/models/chat/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S)

    with NodeProcess(setup, tmp_path, temporary) as node:
        assert ask(node, 1).status_code == 200  # nobody can tell yet
        assert not read_step_times(node.url)
        for length in (10, 20, 30, 40, 50):
            assert ask(node, length).status_code == 200
        assert set(read_step_times(node.url)["chat"]) >= set(STEP_TIME_TERMS)
        node.process.terminate()
        node.process.wait(DEADLINE_S)
    assert (state / FILE_NAME).exists()
    with NodeProcess(setup, tmp_path, temporary) as node:
        assert ask(node, 1).status_code == 429
        assert set(read_step_times(node.url)["chat"]) >= set(STEP_TIME_TERMS)
    remove(temporary)
