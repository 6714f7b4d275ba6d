"""A real node with tenants: their keys let in, their caches are apart, and its engine shares by their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory

KEYS = {"SWIFTKV_TEST_KEY_A": "the key of alice", "SWIFTKV_TEST_KEY_B": "the key of bobby"}
PROMPT = [1 + i % 100 for i in range(100)]


@pytest.mark.slow
def test_a_node_serves_its_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "tiny", "llama", tokenizer=True)
    model = {"name": "chat", "path": str(tmp_path / "tiny"), "threads": 1, "kv_cache": {"memory": "4MiB"}}
    tenants = [
        {"name": name, "api_key_env": variable, "weight": weight}
        for name, variable, weight in (("alice", "SWIFTKV_TEST_KEY_A", 3), ("bob", "SWIFTKV_TEST_KEY_B", 0.5))
    ]
    for variable, key in KEYS.items():
        monkeypatch.setenv(variable, key)
    config = {"node": {"port": 0, "tenants": tenants, "state_dir": "state"}, "models": [model]}
    temporary = short_temporary_directory()
    with NodeProcess(config, tmp_path, temporary) as node:

        def complete(key: str) -> dict[str, Any]:
            body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{node.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        cached = [
            complete(key)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in (KEYS["SWIFTKV_TEST_KEY_A"], KEYS["SWIFTKV_TEST_KEY_A"], KEYS["SWIFTKV_TEST_KEY_B"])
        ]
        assert cached == [0, 96, 0]

        def get(path: str, headers: dict[str, str]) -> httpx.Response:
            return httpx.get(f"{node.url}/{path}", headers=headers, timeout=DEADLINE_S)

        assert get("v1/models", {}).status_code == 401
        assert get("v1/batches", {"x-api-key": KEYS["SWIFTKV_TEST_KEY_A"]}).status_code == 404
        assert 'tenant="bob"' in get("metrics", node.admin_headers()).text
        assert any("$SWIFTKV_TEST_KEY_A" in line for line in node.lines)
        (engine,) = node.engines().values()
        for process in (engine, *psutil.Process(engine.pid).children(recursive=True)):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert not any(key.encode() in environment for key in KEYS.values())
    remove(temporary)
