"""A model that is loaded anew serves the files that are there now; what cannot be loaded changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from swiftkv.cli import app
from swiftkv.server.waking import PROGRESS_HEADER
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.completions import streaming
from tests.support.node_process import (
    DEADLINE_S,
    NodeProcess,
    remove,
    short_temporary_directory,
    small_models,
    wait_for,
)


def answer(url: str) -> list[int]:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def text(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


def put(source: Path, target: Path) -> None:
    """Put the files of a checkpoint in place of others, one by one, by renaming."""
    for file in source.iterdir():
        shutil.copy(file, target / "arriving")
        os.replace(target / "arriving", target / file.name)


@pytest.mark.slow
def test_a_model_is_loaded_anew(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"tokenizer": True, "max_position_embeddings": 4096}
    for seed, name in enumerate(("first", "second")):
        make_checkpoint(tmp_path / name, "llama", seed=seed, **shape)
    make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=3, **shape)
    shutil.copytree(tmp_path / "first", tmp_path / "served")
    steady, changing = small_models(tmp_path / "first", "steady", "changing")
    changing |= {"path": str(tmp_path / "served"), "endpoint": {"port": 0}}
    twin = {**steady, "name": "twin", "path": str(tmp_path / "second")}
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": [steady, changing, twin]}, tmp_path, temporary) as node:

        def reload() -> tuple[int, str]:
            done = CliRunner().invoke(app, ["models", "reload", "changing", "--url", node.url])
            return done.exit_code, done.stdout + done.stderr

        first, second = (answer(f"{node.url}/models/{name}") for name in ("steady", "twin"))
        assert first != second
        own_port = node.url_of("changing")
        assert answer(own_port) == first
        with streaming(node, "steady", 3000) as stream:
            put(tmp_path / "second", tmp_path / "served")
            code, said = reload()
            assert (code, said.startswith("changing is ready")) == (0, True), said
            assert next(stream.events)["choices"]
        assert answer(own_port) == answer(f"{node.url}/models/changing") == second
        put(tmp_path / "other", tmp_path / "served")
        code, said = reload()
        assert code != 0
        assert "KV cache has changed" in said
        put(tmp_path / "first", tmp_path / "served")
        (tmp_path / "served" / "arriving").write_bytes(b"nothing")
        os.replace(tmp_path / "served" / "arriving", tmp_path / "served" / "model.safetensors")
        code, said = reload()
        assert code != 0
        assert "not safetensors" in said
        rewrite_config(tmp_path / "served", max_position_embeddings=64)
        assert "allow 64 tokens" in reload()[1]
        assert answer(own_port) == second
    remove(temporary)


@pytest.mark.slow
def test_requests_wait_for_a_model_that_is_loaded_anew(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "served", "llama", tokenizer=True, max_position_embeddings=4096)
    [changing] = small_models(tmp_path / "served", "changing")
    temporary = short_temporary_directory()
    config = {"node": {"port": 0}, "models": [{**changing, "auto_wake": True}]}
    body = {"prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    with NodeProcess(config, tmp_path, temporary) as node, ThreadPoolExecutor() as pool, ExitStack() as stack:
        asked = {"url": f"{node.url}/v1/completions", "json": body, "timeout": DEADLINE_S}
        before = httpx.post(**asked).text
        assert before.endswith("data: [DONE]\n\n")
        with streaming(node, "changing", 3000):
            url = f"{node.url}/admin/models/changing/reload"
            reloading = pool.submit(httpx.post, url, headers=node.admin_headers(), timeout=DEADLINE_S)
            wait_for("it to fall asleep", lambda: node.ready()["changing"] == "going to sleep")
            waiting = pool.submit(httpx.post, **asked)
            shown = stack.enter_context(httpx.stream("POST", **asked, headers={PROGRESS_HEADER: "1"})).iter_lines()
            assert next(shown).startswith(": ")  # it waits, too
        assert reloading.result().status_code == 200
        assert text(waiting.result().text) == text("\n".join(shown)) == text(before) != ""
    remove(temporary)


def test_a_model_that_wakes_with_other_files_is_asked_in_their_way(tmp_path: Path) -> None:
    """The template belongs to the new weights, and so does the vocabulary, which must stay as it was."""
    make_checkpoint(tmp_path / "served", "llama", tokenizer=True)
    make_checkpoint(tmp_path / "other", "llama", vocab_size=331)
    [model] = small_models(tmp_path / "served", "changing")
    temporary = short_temporary_directory()
    with NodeProcess({"node": {"port": 0}, "models": [model]}, tmp_path, temporary) as node:

        def admin(what: str) -> int:
            url = f"{node.url}/admin/models/changing/{what}"
            return httpx.post(url, headers=node.admin_headers(), timeout=DEADLINE_S).status_code

        def prompt_tokens() -> int:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            answer = httpx.post(f"{node.url}/v1/chat/completions", json=body, timeout=DEADLINE_S).json()
            tokens: int = answer["usage"]["prompt_tokens"]
            return tokens

        before = prompt_tokens()
        assert admin("sleep?level=2") == 200
        assert admin("wake") == 200
        assert prompt_tokens() == before
        template = tmp_path / "served" / "chat_template.jinja"
        shown = template.read_text() if template.exists() else "{{ messages[0].content }}"
        template.write_text("one two three four five six seven " + shown)
        node.engines()["changing"].kill()
        node.wait_line("changing: its files have changed; the next engine serves the new ones")
        node.wait_line("changing: serves again")
        longer = prompt_tokens()
        assert longer > before
        assert admin("sleep?level=2") == 200
        template.write_text("one two three four five six seven eight nine ten " + shown)
        assert admin("wake") == 200
        assert prompt_tokens() > longer
        assert admin("sleep?level=2") == 200
        shutil.copytree(tmp_path / "served", tmp_path / "kept")
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tmp_path / "other" / name, tmp_path / "served" / name)
        assert admin("wake") == 503
        node.wait_line("changing: its files have changed, and cannot replace those .* vocabulary has changed")
        put(tmp_path / "kept", tmp_path / "served")
        wait_for("it to serve", lambda: node.ready()["changing"] == "ready")
        assert prompt_tokens() > longer
    remove(temporary)
