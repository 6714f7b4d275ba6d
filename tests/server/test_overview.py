"""`GET /admin/overview`, and the commands that need it: `swiftkv top` and `swiftkv page`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from echo_gateway import PATIENCE_S, Gateway, start_gateway
from typer.testing import CliRunner, Result

from swiftkv.cli import app
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer


def view(gateway: Gateway) -> dict[str, Any]:
    with gateway.admin() as http:
        answer = http.get("/admin/overview").raise_for_status()
    content: dict[str, Any] = answer.json()
    return content


def of(overview: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in overview["models"] if model["model"] == name)


def run(*arguments: str, gateway: Gateway) -> Result:
    environment = {"SWIFTKV_ADMIN_KEY": gateway.admin_key, "SWIFTKV_URL": gateway.url, "COLUMNS": "80"}
    return CliRunner(env=environment).invoke(app, arguments)


def test_it_has_the_waits_of_clients_and_the_figures_of_engines(gateway: Gateway) -> None:
    before = of(view(gateway), "code")
    with gateway.http() as http:
        body = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
        http.post("/models/code/v1/completions", json=body).raise_for_status()
    after = of(view(gateway), "code")
    assert after["first_token"]["count"] == before["first_token"]["count"] + 1
    assert after["between_tokens"]["count"] == before["between_tokens"]["count"] + 4
    assert after["first_token"]["total_s"] > before["first_token"]["total_s"]
    assert after["engine"]["state"] == "ready"
    stats = gateway.clients["code"].stats
    assert stats is not None
    assert after["figures"]["generation_tokens_total"] == stats.generation_tokens_total
    assert sum(after["figures"]["prefix_hit_tokens_total"].values()) == stats.prefix_hit_tokens_total


def test_it_has_what_admin_lending_shows(gateway: Gateway) -> None:
    overview = view(gateway)
    with gateway.admin() as http:
        lending = http.get("/admin/lending").json()
    assert [model["lending"] for model in overview["models"]] == lending["models"]
    assert (overview["lending_enabled"], overview["transport"]) == (lending["enabled"], lending["transport"])
    for group in of(overview, "code")["lending"]["groups"]:
        states = ("free", "used", "cached", "lent", "in_flight", "staging", "loading")
        assert sum(group[state] for state in states) == group["total"]


def test_top_shows_a_row_for_each_model(gateway: Gateway) -> None:
    shown = run("top", "--once", "--interval", "0.1", gateway=gateway)
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    states = {row[0]: row for row in rows if row[1] == "ready"}
    assert states["chat"][-1] == "48MiB"  # borrowed
    assert states["code"][-1] == "-"
    assert [[row[0], row[-1]] for row in rows if row[-1] == "64MiB"] == [["chat", "64MiB"], ["code", "64MiB"]]


def test_top_wants_a_terminal(gateway: Gateway) -> None:
    """Otherwise it would show nothing until Ctrl-C."""
    refused = run("top", gateway=gateway)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "swiftkv: standard output is not a terminal; print one view with --once\n"


def test_top_says_why_it_ends_when_the_node_is_gone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The line is not part of the screen, which disappears."""
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(admin_key="admin-key"))
    environment = os.environ | {"SWIFTKV_ADMIN_KEY": gateway.admin_key, "SWIFTKV_URL": gateway.url, "TERM": "xterm"}
    command = [sys.executable, "-m", "swiftkv", "top", "--interval", "0.1"]
    terminal, its_end = pty.openpty()
    try:
        top = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=subprocess.PIPE, env=environment)
        os.close(its_end)
        shown = b""
        while b"tok/s" not in shown:
            shown += os.read(terminal, 1 << 16)
    finally:
        stop()
    with suppress(OSError):  # the end of what a terminal has
        while os.read(terminal, 1 << 16):
            pass
    os.close(terminal)
    _, stderr = top.communicate(timeout=PATIENCE_S)
    assert top.returncode == 1
    assert stderr.decode().startswith(f"swiftkv: no node answers at {gateway.url}: ")


def test_page_prints_an_address_that_lets_its_reader_in(keyed_gateway: Gateway) -> None:
    assert run("page", gateway=keyed_gateway).stdout == f"{keyed_gateway.url}/#key=admin-key\n"
    keyed_gateway.admin_key = "wrong"
    refused = run("page", gateway=keyed_gateway)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "export SWIFTKV_ADMIN_KEY" in refused.stderr
