"""Take the documents' pictures of the page: `python -m tests.support.page_pictures docs/images`.

A node with three models of `checkpoints/` serves conversations for two minutes meanwhile. This needs Pillow, which is
in the extra `bench`.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.support.browser import Browser
from tests.support.node_process import DEADLINE_S, NodeProcess

ROOT = Path(__file__).parents[2]
SCREENS = {"page": (1100, 900), "page-800": (800, 900), "page-400": (400, 1300)}
WATCHED_S = 120.0
QUESTIONS = ("What does os.path.join do?", "How do I call it?", "And what is json.dumps for?", "Can you repeat that?")
PROGRAM = "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self):\n        self._items = []\n\n"
CONFIG = {
    "node": {"port": 0},
    "models": [
        {"name": "chat", "path": str(ROOT / "checkpoints/chat"), "role": "master", "kv_cache": {"memory": "4MiB"}},
        {
            "name": "code",
            "path": str(ROOT / "checkpoints/code"),
            "kv_cache": {"memory": "16MiB"},
            "lending": {"budget": "60%", "window": "10s"},
        },
        {
            "name": "small",
            "path": str(ROOT / "checkpoints/code"),
            "kv_cache": {"memory": "8MiB"},
            "lending": {"budget": "25%", "window": "10s"},
        },
    ],
}


def converse(node: NodeProcess, seed: int, until_s: float) -> None:
    """Hold conversations with `chat` that together outgrow its pool."""
    choice = random.Random(seed)
    messages: list[dict[str, Any]] = []
    while time.monotonic() < until_s:
        messages.append({"role": "user", "content": choice.choice(QUESTIONS)})
        body = {"messages": messages, "max_tokens": choice.randrange(50, 250), "ignore_eos": True}
        answer = httpx.post(f"{node.url}/models/chat/v1/chat/completions", json=body, timeout=DEADLINE_S)
        if answer.is_success and len(messages) < 12:
            messages.append(answer.json()["choices"][0]["message"])
        else:
            messages = []
        time.sleep(choice.expovariate(1.0))


def write(node: NodeProcess, model: str, seed: int, until_s: float) -> None:
    """Have a model continue a program, piece by piece."""
    choice = random.Random(seed)
    text = PROGRAM
    while time.monotonic() < until_s:
        body = {"prompt": text, "max_tokens": choice.randrange(30, 120), "ignore_eos": True}
        answer = httpx.post(f"{node.url}/models/{model}/v1/completions", json=body, timeout=DEADLINE_S)
        text = text + answer.json()["choices"][0]["text"] if answer.is_success and len(text) < 8000 else PROGRAM
        time.sleep(choice.expovariate(0.3))


def main(directory: Path) -> None:
    work = Path(tempfile.mkdtemp())
    with NodeProcess(CONFIG, work, work) as node, Browser.started(work) as browser, ThreadPoolExecutor(16) as threads:
        until_s = time.monotonic() + WATCHED_S
        for seed in range(8):
            threads.submit(converse, node, seed, until_s + 15)
        for seed, model in enumerate(["code", "code", "small"]):
            threads.submit(write, node, model, seed, until_s + 15)
        key = node.admin_headers()["Authorization"].removeprefix("Bearer ")
        browser.open(f"{node.url}/#key={key}")
        time.sleep(WATCHED_S)
        for name, (width, height) in SCREENS.items():
            for suffix, is_dark in (("", False), ("-dark", True)):
                browser.resize(width, height, is_dark=is_dark)
                time.sleep(1.5)  # until bars have stopped moving
                picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
                picture.quantize(64).save(directory / f"{name}{suffix}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
