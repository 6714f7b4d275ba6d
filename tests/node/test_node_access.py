"""A real node lets in only those who may, and its processes and answers give nothing away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from swiftkv.admin_key import find_admin_key
from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, remove, short_temporary_directory

API_KEY = "the key of the models"
ENVIRONMENT = {"SWIFTKV_TEST_API_KEY": API_KEY, "SWIFTKV_TEST_OTHER": "not a key"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with a key for its models and none for `/admin`."""
    directory = tmp_path_factory.mktemp("access")
    make_checkpoint(directory / "tiny", "llama", tokenizer=True)
    model = {"name": "chat", "path": str(directory / "tiny"), "threads": 1, "kv_cache": {"memory": "4MiB"}}
    config = {"node": {"port": 0, "api_key_env": "SWIFTKV_TEST_API_KEY"}, "models": [model]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with NodeProcess(config, directory, short_temporary_directory()) as node:
            yield node
    remove(node.temporary)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SWIFTKV_ADMIN_KEY"}
    command = [sys.executable, "-m", "swiftkv", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


def test_the_cli_finds_the_key_that_the_node_made(node: NodeProcess) -> None:
    shown = run_cli("lending", "show", "--json", "--url", node.url)
    assert shown.returncode == 0, shown.stderr
    assert [model["model"] for model in json.loads(shown.stdout)["models"]] == ["chat"]


def test_without_the_key_admin_is_closed(node: NodeProcess) -> None:
    file = Path(next(line for line in node.lines if line.startswith("the admin key is in ")).split()[-1])
    assert file.read_text().strip() == find_admin_key(node.url)
    for headers in ({}, {"Authorization": f"Bearer {API_KEY}"}):
        assert httpx.get(f"{node.url}/admin/lending", headers=headers, timeout=DEADLINE_S).status_code == 401


def test_engines_do_not_inherit_keys(node: NodeProcess) -> None:
    def environment(pid: int) -> bytes:
        return Path(f"/proc/{pid}/environ").read_bytes()

    (engine,) = node.engines().values()
    assert API_KEY.encode() in environment(node.process.pid)  # so the search finds what is there
    for process in (engine, *psutil.Process(engine.pid).children(recursive=True)):
        assert API_KEY.encode() not in environment(process.pid)
        assert b"SWIFTKV_TEST_OTHER=not a key" in environment(process.pid)


def test_answers_name_no_directory_of_this_machine(node: NodeProcess) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    (card,) = httpx.get(f"{node.url}/v1/models", headers=headers, timeout=DEADLINE_S).json()["data"]
    assert (card["id"], card["root"]) == ("chat", "tiny")
    paths = ("/v1/models", "/v1/models/nobody", "/nowhere", "/ready", "/docs", "/metrics", "/admin/lending")
    for path in paths:
        for key in (API_KEY, find_admin_key(node.url)):
            answer = httpx.get(f"{node.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=DEADLINE_S)
            assert str(node.file.parent) not in answer.text
            assert str(node.temporary) not in answer.text


def test_the_key_is_gone_when_the_node_is(tmp_path: Path) -> None:
    """A name that is not this machine's is refused by a real node, too."""
    make_checkpoint(tmp_path / "tiny", "llama", tokenizer=True)
    model = {"name": "chat", "path": str(tmp_path / "tiny"), "threads": 1, "kv_cache": {"memory": "4MiB"}}
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": [model]}, tmp_path, temporary) as node:
        assert find_admin_key(node.url) is not None
        for host, status in (("evil.example", 403), ("localhost", 200)):
            answer = httpx.get(f"{node.url}/v1/models", headers={"Host": host}, timeout=DEADLINE_S)
            assert answer.status_code == status
        node.process.terminate()
        assert node.process.wait(DEADLINE_S) == 0
        assert find_admin_key(node.url) is None
        node.assert_nothing_left()
    remove(temporary)
