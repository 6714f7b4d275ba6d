"""`GET /admin/overview`, and who watches by it: `swiftkv top`, `swiftkv page`, and the page at `/`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway
from typer.testing import CliRunner, Result

from swiftkv.cli import app
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer
from tests.support.browser import CHROMIUM, Browser

KEYS = ServerSettings(admin_key="admin-key", api_key="api-key")


@pytest.fixture
def keyed_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=KEYS)
    yield gateway
    stop()


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


def test_top_says_why_it_ends_when_the_node_is_gone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The line is not part of the screen, which disappears."""
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=KEYS)
    environment = os.environ | {"SWIFTKV_ADMIN_KEY": gateway.admin_key, "SWIFTKV_URL": gateway.url, "TERM": "xterm"}
    command = [sys.executable, "-m", "swiftkv.cli", "top", "--interval", "0.1"]
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


def test_the_page_is_there_without_a_key_and_tells_nothing(keyed_gateway: Gateway) -> None:
    texts = {}
    for path, media_type in {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}.items():
        answer = httpx.get(keyed_gateway.url + path, timeout=PATIENCE_S).raise_for_status()
        assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        texts[path] = answer.text
    assert "chat" not in texts["/"]
    assert httpx.get(f"{keyed_gateway.url}/admin/overview", timeout=PATIENCE_S).status_code == 401
    addresses = re.findall(r"https?://[^\"'\s]+", "".join(texts.values()))
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name, which nobody fetches
    assert sum(map(len, texts.values())) < 60 << 10
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", texts["/page.js"])


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
CARD = """[...document.querySelectorAll("article")].find((card) => card.querySelector("h3").textContent === "code")"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser.started(tmp_path) as browser:
        yield browser


@needs_browser
@pytest.mark.parametrize("width", [400, 800, 1100])
def test_the_page_shows_every_model_its_pool_and_what_it_lends(
    keyed_gateway: Gateway, browser: Browser, width: int
) -> None:
    browser.open(f"{keyed_gateway.url}/#key=admin-key", width=width)
    browser.wait_for("document.querySelectorAll('article').length === 2")
    assert browser.evaluate("document.getElementById('status').textContent").endswith("2 models, lending over shm")
    assert "code: pool of 64.0 MiB" in browser.evaluate("document.querySelector('#pools svg').ariaLabel")
    assert browser.evaluate("document.querySelectorAll('path.band').length") == 1
    assert browser.evaluate(f"{CARD}.querySelector('output').textContent") == "48.0 MiB of 64.0 MiB"
    assert browser.evaluate("location.hash") == ""
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []


@needs_browser
def test_a_slider_says_what_it_would_take_back_and_sets_the_budget_when_it_is_let_go(
    keyed_gateway: Gateway, browser: Browser
) -> None:
    browser.open(f"{keyed_gateway.url}/#key=admin-key")
    browser.wait_for(f"{CARD}.querySelector('output').textContent")
    slider, effect = f"{CARD}.querySelector('input')", f"{CARD}.querySelector('.effect').textContent"
    browser.evaluate(f"{slider}.value = 25; {slider}.dispatchEvent(new Event('input'))")
    browser.wait_for(f"{effect} === '32.0 MiB would be taken back'")
    assert keyed_gateway.budgets["code"] == []
    browser.evaluate(f"{slider}.dispatchEvent(new Event('change'))")
    browser.wait_for(f"{effect}.startsWith('32.0 MiB came back in')")
    assert keyed_gateway.budgets["code"] == [16 << 20]
    browser.wait_for(f"{CARD}.querySelector('output').textContent === '16.0 MiB of 64.0 MiB'")


@needs_browser
def test_a_card_says_how_much_of_a_model_is_loaded(keyed_gateway: Gateway, browser: Browser) -> None:
    browser.open(f"{keyed_gateway.url}/#key=admin-key")
    state = f"{CARD}.querySelector('.state').textContent"
    browser.wait_for(f"{state} === 'worker, ready'")
    with keyed_gateway.admin() as http:
        http.post("/admin/models/code/sleep?level=1").raise_for_status()
    with keyed_gateway.engines["code"].standing_still():
        keyed_gateway.call(lambda: keyed_gateway.clients["code"].wake(0.0))
        browser.wait_for(f"{state} === 'worker, waking up: 0 bytes of 0 bytes of weights loaded'")


@needs_browser
def test_the_page_asks_for_keys_and_talks_to_a_model(keyed_gateway: Gateway, browser: Browser) -> None:
    browser.open(keyed_gateway.url)
    browser.wait_for("!document.getElementById('keys').hidden")
    assert browser.evaluate("document.getElementById('watched').hidden")
    browser.evaluate(
        "document.getElementById('admin-key').value = 'admin-key';"
        "document.getElementById('api-key').value = 'api-key'; document.getElementById('keys').requestSubmit()"
    )
    browser.wait_for("document.querySelectorAll('#talk-model option').length === 2")
    browser.evaluate("document.getElementById('talk').requestSubmit()")
    figures = browser.wait_for("document.getElementById('talk-figures').textContent")
    assert re.search(
        r"^first token after .*, \d+ tokens of prompt, \d+ of them from the cache; \d+ tokens of answer$", figures
    )
    assert browser.evaluate("document.querySelector('#conversation .assistant').textContent.length") > 0
