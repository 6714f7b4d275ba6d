"""The page at `/` of the node, in a real browser where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_gateway import PATIENCE_S, Gateway

from tests.support.browser import CHROMIUM, Browser

AXE = find_spec("axe_playwright_python")
"""A package that has axe-core in it. Playwright, which the rest of it needs, is not used here."""
CARD = """[...document.querySelectorAll("article")].find((card) => card.querySelector("h3").textContent === "code")"""
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.started(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


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
def test_bars_and_bands_move_to_where_they_belong(keyed_gateway: Gateway, browser: Browser) -> None:
    """The drawing stays, so that the style sheet can have its parts move."""
    browser.open(f"{keyed_gateway.url}/#key=admin-key")
    lent = "Number([...document.querySelectorAll('#pools rect.lent')].at(-1).getAttribute('width'))"
    before = browser.wait_for(lent)
    browser.evaluate("window.drawing = document.querySelector('#pools svg')")
    with keyed_gateway.admin() as http:
        http.patch("/admin/lending/code", json={"budget": "25%"}).raise_for_status()
    browser.wait_for(f"Math.abs({lent} - {before} / 3) < 1")
    assert browser.evaluate("window.drawing === document.querySelector('#pools svg')")
    assert "16.0 MiB lent" in browser.evaluate("window.drawing.ariaLabel")


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
    figures = "document.getElementById('talk-figures').textContent"
    said = browser.wait_for(figures)
    assert re.search(
        r"^first token after .*, \d+ tokens of prompt, 0 of them from the cache; \d+ tokens of answer$", said
    )
    assert browser.evaluate("document.querySelector('#conversation .assistant').textContent.length") > 0
    browser.evaluate("document.getElementById('talk').requestSubmit()")  # with the turn before, which is cached
    browser.wait_for(
        "/, 16 of them from the cache \\(16 host\\);/.test(document.getElementById('talk-figures').textContent)"
    )


def findings(browser: Browser) -> list[str]:
    """Return what axe-core finds fault with in the page as it is now, by all of its rules."""
    violations: list[dict[str, Any]] = browser.evaluate("axe.run().then((results) => results.violations)")
    return [
        f"{found['id']}: {node['failureSummary']} {node['html']}" for found in violations for node in found["nodes"]
    ]


@needs_browser
@pytest.mark.skipif(AXE is None, reason="axe-core is not installed (pip install --no-deps axe-playwright-python)")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100])
def test_axe_finds_no_fault(keyed_gateway: Gateway, browser: Browser, width: int, is_dark: bool) -> None:
    assert AXE is not None
    (package,) = AXE.submodule_search_locations or ()
    browser.open(keyed_gateway.url, width=width, is_dark=is_dark)
    browser.wait_for("!document.getElementById('keys').hidden")
    browser.evaluate(Path(package, "axe.min.js").read_text())
    assert findings(browser) == []
    browser.evaluate("keep('admin-key', 'wrong'); look()")
    slider = browser.wait_for(f"{CARD}.querySelector('output').textContent") and f"{CARD}.querySelector('input')"
    browser.evaluate(f"{slider}.value = 25; {slider}.dispatchEvent(new Event('input'))")
    browser.wait_for(f"{CARD}.querySelector('.effect').textContent")
    browser.evaluate("document.getElementById('talk').requestSubmit()")
    browser.wait_for("!document.getElementById('keys').hidden")  # the API key was wrong
    browser.evaluate("keep('admin-key', 'api-key'); document.getElementById('talk').requestSubmit()")
    browser.wait_for("document.getElementById('talk-figures').textContent.startsWith('first token')")
    assert browser.evaluate(f"matchMedia('(prefers-color-scheme: {'dark' if is_dark else 'light'})').matches")
    assert findings(browser) == []
    browser.evaluate("document.documentElement.removeAttribute('lang')")
    assert [found.partition(":")[0] for found in findings(browser)] == ["html-has-lang"]  # it does look
