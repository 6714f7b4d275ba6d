"""A headless Chromium, driven by its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
_WAIT = """new Promise((resolve, reject) => {
  const started = Date.now();
  const look = () => {
    const value = (() => { try { return %s; } catch { return null; } })();
    if (value) resolve(value);
    else if (Date.now() - started > 30000) reject(new Error("never: " + %s + "; " + document.body.innerText));
    else setTimeout(look, 20);
  };
  look();
})"""


class Browser:
    """A browser with one tab at a time. `complaints` keeps the errors that this tab's console shows."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to = os.fdopen(to_browser, "wb", buffering=0)
        self._from = os.fdopen(from_browser, "rb", buffering=0)
        self._ids = count(1)
        self._rest = b""
        self._tab: str | None = None
        self._session: str | None = None
        self.complaints: list[str] = []

    def open(self, url: str, width: int = 1100, height: int = 900, *, is_dark: bool = False) -> None:
        """Open a page in a new tab, and close the previous tab."""
        self._session = None
        if self._tab is not None:
            self._call("Target.closeTarget", targetId=self._tab)
        self.complaints.clear()
        self._tab = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=self._tab, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")
        self.resize(width, height, is_dark=is_dark)
        self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int, *, is_dark: bool) -> None:
        """Give the tab the size and the colours of another screen."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **screen)
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression in the page once that is truthy."""
        return self.evaluate(_WAIT % (expression, json.dumps(expression)))

    def screenshot(self) -> bytes:
        """Return a PNG of the tab."""
        picture: str = self._call("Page.captureScreenshot")["data"]
        return base64.b64decode(picture)

    def close(self) -> None:
        self._to.close()
        self._from.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        call_id = next(self._ids)
        call: dict[str, Any] = {"id": call_id, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        self._to.write(json.dumps(call).encode() + b"\0")
        while (message := self._next()).get("id") != call_id:
            if message.get("sessionId") != self._session:
                continue
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._from.read(1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        """Run a browser with its profile below `directory`."""
        assert CHROMIUM is not None
        read_commands, write_commands = os.pipe()
        read_answers, write_answers = os.pipe()
        # Chromium expects its pipes as descriptors 3 and 4.
        wrapper = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        command = ["bash", "-c", wrapper, CHROMIUM, *_FLAGS, f"--user-data-dir={directory / 'profile'}"]
        process = subprocess.Popen(command, pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_answers)
        browser = cls(write_commands, read_answers)
        try:
            yield browser
        finally:
            browser.close()
            process.kill()
            process.wait()
