"""Storage is attached and detached through `/admin` and `swiftkv storage`; mistakes are named and change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway
from typer.testing import CliRunner, Result

from swiftkv.cli import app
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer

FILE = {"backend": "file", "path": "kv", "size": "1GiB"}


@pytest.fixture
def own_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(admin_key="key"))
    yield gateway
    stop()


def attach(gateway: Gateway, section: object, model: str = "chat") -> httpx.Response:
    with gateway.admin() as http:
        return http.post(f"/admin/storage/{model}/attach", json=section)


def detach(gateway: Gateway, model: str = "chat") -> httpx.Response:
    with gateway.admin() as http:
        return http.post(f"/admin/storage/{model}/detach")


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def run(*arguments: str) -> Result:
    return CliRunner(env={"SWIFTKV_ADMIN_KEY": "key", "COLUMNS": "120"}).invoke(app, ["storage", *arguments])


def engine_view(gateway: Gateway) -> dict[str, object]:
    view: dict[str, object] = httpx.get(f"{gateway.url}/ready", timeout=PATIENCE_S).json()["engines"]["chat"]
    return view


def test_storage_is_attached_and_detached(own_gateway: Gateway) -> None:
    assert engine_view(own_gateway)["storage_backend"] is None
    answer = attach(own_gateway, FILE | {"prefetch_policy": "wait_complete"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["model"], answer.json()["backend"]) == ("chat", "file")
    view = engine_view(own_gateway)
    assert (view["storage"], view["storage_backend"]) == ("ok", "file")
    with own_gateway.admin() as http:
        chat, code = http.get("/admin/storage").json()["models"]
    assert (chat["backend"], chat["state"], chat["write_policy"]) == ("file", "ok", "write_through")
    assert chat["prefetch_policy"] == "wait_complete"
    assert code == {"model": "code"} | dict.fromkeys(("backend", "state", "write_policy", "prefetch_policy"))
    assert detach(own_gateway).json()["backend"] is None
    view = engine_view(own_gateway)
    assert (view["storage"], view["storage_backend"]) == (None, None)
    assert error(detach(own_gateway)) == (409, "no storage is attached")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"backend": "tape"}, "storage.backend: 'tape' is not one of file, "),
        ({"backend": "file", "path": "kv"}, "storage.size: missing; write a size"),
        (FILE | {"prefetch_policy": "never"}, "storage.prefetch_policy: 'never' is not timeout, "),
        (FILE | {"syze": 1}, "storage.syze: unknown key; did you mean size?"),
    ],
)
def test_a_mistake_is_named_with_its_key(gateway: Gateway, section: object, message: str) -> None:
    status, said = error(attach(gateway, section))
    assert status == 400
    assert said.startswith(message)


def test_models_that_cannot_have_storage_and_those_that_are_not_there(gateway: Gateway) -> None:
    assert error(attach(gateway, FILE, "code")) == (409, "model 'code': its KV is nowhere")
    assert error(attach(gateway, FILE, "nobody"))[0] == error(detach(gateway, "nobody"))[0] == 404


def test_an_engine_that_is_gone_is_asked_for_nothing(own_gateway: Gateway) -> None:
    attach(own_gateway, FILE)
    own_gateway.engines["chat"].stop()
    own_gateway.call(lambda: own_gateway.clients["chat"].engine_down("was killed by SIGKILL"))
    assert error(detach(own_gateway))[0] == 503
    with own_gateway.admin() as http:
        chat = http.get("/admin/storage").json()["models"][0]
    assert (chat["backend"], chat["state"]) == ("file", None)  # the next one is started with it


def test_the_command_line(own_gateway: Gateway, tmp_path: Path) -> None:
    at = ("--url", own_gateway.url)
    (tmp_path / "storage.yaml").write_text(json.dumps(FILE))
    assert run("attach", "chat", str(tmp_path / "storage.yaml"), *at).stdout.startswith("chat has file storage after ")
    shown = [line.split() for line in run("show", *at).stdout.splitlines()]
    assert ["chat", "file", "ok", "write_through", "timeout"] in shown
    assert ["code", "-", "-", "-", "-"] in shown
    assert json.loads(run("show", "--json", *at).stdout)["models"][0]["backend"] == "file"
    assert run("detach", "chat", *at).stdout.startswith("chat has no storage after ")
    refused = run("detach", "chat", *at)
    assert (refused.exit_code, refused.stderr) == (1, "swiftkv: no storage is attached\n")
    missing = run("attach", "chat", str(tmp_path / "gone.yaml"), *at)
    assert missing.exit_code == 2
    assert "gone.yaml cannot be read: No such file or directory" in missing.stderr
