"""`swiftkv lending` against a gateway: its output, its exit codes, and the advice in its errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from echo_gateway import Gateway, start_gateway
from typer.testing import CliRunner, Result

from swiftkv.cli import app
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer
from tests.support.interruptible import interruptible


def run(*arguments: str, key: str | None = None) -> Result:
    return CliRunner(env={"SWIFTKV_ADMIN_KEY": key, "COLUMNS": "120"}).invoke(app, ["lending", *arguments])


@pytest.fixture
def lending_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(admin_key="key"))
    yield gateway
    stop()


def test_show(gateway: Gateway) -> None:
    table = run("show", "--url", gateway.url, key=gateway.admin_key)
    assert table.exit_code == 0, table.stderr
    rows = [line.split() for line in table.stdout.splitlines()]
    assert ["code", "worker", "ready", "64MiB", "48MiB", "48MiB", "0B", "-", "-", "-"] in rows
    assert ["chat", "master", "ready", "64MiB", "-", "0B", "48MiB", "30", "20", "46"] in rows
    assert ["code", "chat", "attached", "1MiB", "48", "of", "64", "48MiB"] in rows
    machine = run("show", "--json", "--url", gateway.url, key=gateway.admin_key)
    assert [model["model"] for model in json.loads(machine.stdout)["models"]] == ["chat", "code"]


def test_set_and_show(lending_gateway: Gateway) -> None:
    at = ("--url", lending_gateway.url)
    asked = run("set", "code", "25%", "--dry-run", *at, key="key")
    assert asked.stdout == "code would lend up to 16MiB; 32MiB would be recalled\n"
    lowered = run("set", "code", "16MiB", *at, key="key")
    assert lowered.exit_code == 0
    assert lowered.stdout == "code lends up to 16MiB, 16MiB at the moment\n32MiB came back in 0.250 s\n"
    assert "offers nothing" not in run("show", *at, key="key").stdout
    assert run("set", "code", "0", *at, key="key").stdout.startswith("code lends up to 0B, 0B at the moment\n")
    shown = run("show", *at, key="key").stdout
    assert shown.endswith("\ncode offers nothing more for 28 s: its own requests needed blocks\n")
    assert run("set", "code", "100%", *at, key="key").stdout == "code lends up to 64MiB, 64MiB at the moment\n"
    for key in (None, "wrong"):
        refused = run("show", *at, key=key)
        assert refused.exit_code == 1
        assert "export SWIFTKV_ADMIN_KEY=<admin key>" in refused.stderr
        assert refused.stdout == ""


@pytest.mark.parametrize(
    ("worker", "budget", "code", "says"),
    [
        (
            "code",
            "lots",
            2,
            "BUDGET 'lots' is not a percentage of the pool up to 100% such as 75%, a size such as 128MiB,",
        ),
        ("code", "75", 2, "BUDGET '75' is not a percentage"),
        ("code", "1TiB", 1, "1TiB is more than the pool of 'code', 64MiB; 100% is the most"),
        ("chat", "50%", 1, "model 'chat' is a master"),
        ("no/such?", "50%", 1, "no such path"),
        ("cod", "50%", 1, "no model 'cod'; this node has: chat, code"),
    ],
)
def test_what_cannot_be_set_is_a_line_on_stderr(
    gateway: Gateway, worker: str, budget: str, code: int, says: str
) -> None:
    result = run("set", worker, budget, "--url", gateway.url, key=gateway.admin_key)
    assert result.exit_code == code
    assert result.stderr.startswith(f"swiftkv: {says}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_no_node_and_something_else_than_a_node(gateway: Gateway) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://[", f"{gateway.url}/v1"):
        result = run("show", "--url", url)
        assert result.exit_code == 1
        assert result.stderr.startswith("swiftkv: ")
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [[], ["show"], ["set"]])
def test_help_has_examples(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert not command or "Example" in result.stdout


def test_watch_shows_it_anew_until_ctrl_c(gateway: Gateway) -> None:
    command = interruptible("lending", "show", "--watch")
    environment = os.environ | {"SWIFTKV_ADMIN_KEY": gateway.admin_key, "SWIFTKV_URL": gateway.url, "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watching:
        assert watching.stdout is not None
        shown = iter(watching.stdout.readline, "")
        headings = [line for line in islice(shown, 12) if "blocks in use" in line]
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
    assert watching.returncode == 0
    assert len(headings) == 2
