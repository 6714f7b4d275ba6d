"""`/admin/cache` and `swiftkv cache`: what caches hold, why a request found no more, and how to empty one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import httpx
import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway, wait_until
from typer.testing import CliRunner, Result

from swiftkv.cli import app
from swiftkv.engine.messages import CacheStop
from swiftkv.server.app import ServerSettings
from swiftkv.server.cache_routes import MEANINGS
from swiftkv.server.tokenizer import Tokenizer

PROMPT = list(range(1, 101))


@pytest.fixture(scope="module")
def own_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path_factory.mktemp("cache"), tokenizer, settings=ServerSettings(admin_key="key"))
    yield gateway
    stop()


def run(gateway: Gateway, *arguments: str) -> Result:
    runner = CliRunner(env={"SWIFTKV_ADMIN_KEY": "key", "COLUMNS": "120"})
    return runner.invoke(app, ["cache", *arguments, "--url", gateway.url])


def complete(gateway: Gateway, request_id: str, model: str = "chat", prompt: Sequence[int] = PROMPT) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(
        f"{gateway.url}/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text


def test_why_a_request_found_no_more(own_gateway: Gateway) -> None:
    prompt = PROMPT[::-1]  # no other test asks for it
    complete(own_gateway, "first", "code", prompt)
    complete(own_gateway, "again", "code", prompt)
    with own_gateway.admin() as http:
        first, again = (http.get(f"/admin/cache/requests/{name}").json() for name in ("first", "again"))
    assert (first["request_id"], first["model"]) == ("first", "code")
    assert first["sequences"] == [
        {
            "prompt_tokens": 100,
            "cached_tokens": 0,
            "reason": "never_stored",
            "meaning": MEANINGS["never_stored"],
            "age_s": None,
        }
    ]
    (sequence,) = again["sequences"]
    assert (sequence["cached_tokens"], sequence["reason"], sequence["age_s"]) == (96, "evicted", 1.5)
    shown = run(own_gateway, "why", "again").stdout
    assert shown.startswith("code: 96 of 100 prompt tokens were cached: evicted (1.5 s before): the next block was")
    assert json.loads(run(own_gateway, "why", "first", "--json").stdout) == first


def test_every_model_that_knows_the_id_explains_its_request(own_gateway: Gateway) -> None:
    complete(own_gateway, "of-both", "code")
    complete(own_gateway, "of-both", "chat")
    found = json.loads(run(own_gateway, "why", "of-both", "--json").stdout)
    assert [found["model"], *(other["model"] for other in found["others"])] == ["chat", "code"]
    shown = run(own_gateway, "why", "of-both").stdout
    assert [line.partition(":")[0] for line in shown.splitlines()] == ["chat", "code"]


def test_an_id_may_have_slashes(own_gateway: Gateway) -> None:
    name = "team/job?7"
    complete(own_gateway, name, model="code")
    assert json.loads(run(own_gateway, "why", name, "--json").stdout)["request_id"] == name
    pinned = run(own_gateway, "pin", name, "--for", "2h")
    assert "code keeps 96 tokens" in pinned.stdout, pinned.stderr
    assert run(own_gateway, "unpin", "code", "1").exit_code == 0
    with own_gateway.admin() as http:
        assert http.get("/admin/cache/requests/team/pin").headers["allow"] == "POST"


def test_a_request_that_is_not_known(own_gateway: Gateway) -> None:
    with own_gateway.admin() as http:
        answer = http.get("/admin/cache/requests/nobody")
    assert answer.status_code == 404
    assert "no recent request has the id 'nobody'" in answer.json()["error"]["message"]
    refused = run(own_gateway, "why", "nobody")
    assert refused.exit_code == 1
    assert "no recent request has the id 'nobody'" in refused.stderr


def test_every_reason_has_a_meaning() -> None:
    reasons = {reason for part in get_args(CacheStop) for reason in (get_args(part) or (part,))}
    assert set(MEANINGS) == reasons


def test_clear(own_gateway: Gateway) -> None:
    with own_gateway.admin() as http:
        http.post("/admin/cache/chat/clear")
        complete(own_gateway, "before", model="chat")
        assert http.post("/admin/cache/chat/clear").json() == {"model": "chat", "blocks": 1}
        assert http.post("/admin/cache/nobody/clear").status_code == 404
    assert run(own_gateway, "clear", "chat").stdout == "chat has forgotten 0 cached blocks\n"


def test_show(own_gateway: Gateway) -> None:
    for model in ("chat", "code"):
        complete(own_gateway, f"shown-{model}", model)
    table = run(own_gateway, "show")
    assert table.exit_code == 0, table.stderr
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == ["chat", "code"]
    overview = json.loads(run(own_gateway, "show", "--json").stdout)
    with own_gateway.admin() as http:
        assert http.get("/admin/cache").json() == overview
    for model in overview["models"]:
        assert model["blocks"].keys() == {"free", "used", "cached"}
        assert model["hit_tokens_total"].keys() == {"local", "peer", "host", "storage"}


def test_a_prompt_in_a_file_is_pinned(own_gateway: Gateway, tmp_path: Path) -> None:
    text, chat, other = tmp_path / "prompt.txt", tmp_path / "chat.json", tmp_path / "other.json"
    text.write_text("a word and " * 40)
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "say it " * 40}], "cache_salt": "mine"}))
    other.write_text(json.dumps({"prompt": "never asked for " * 40}))
    with own_gateway.admin() as http:
        http.post("/v1/completions", json={"model": "code", "prompt": text.read_text(), "max_tokens": 1})
        http.post("/v1/chat/completions", json={"model": "code", "max_tokens": 1, **json.loads(chat.read_text())})
        counted = [
            http.post("/tokenize", json={"model": "code", **body}).json()["count"]
            for body in ({"prompt": text.read_text()}, {"messages": json.loads(chat.read_text())["messages"]})
        ]
    for file, count in zip((text, chat), counted, strict=True):
        made = run(own_gateway, "pin", "--model", "code", "--prompt", str(file), "--for", "2h")
        assert made.stdout == f"code keeps {(count - 1) // 16 * 16} tokens for 7,200 s: pin 1\n", made.stderr
        assert run(own_gateway, "unpin", "code", "1").exit_code == 0
    refused = run(own_gateway, "pin", "--model", "code", "--prompt", str(other))
    assert refused.exit_code == 1
    assert "model 'code': there is no room" in refused.stderr


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "give either field 'prompt' or field 'messages'"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "give either field 'prompt'"),
        ({"prompt": "a", "temperature": 1}, "temperature"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "model": "chat"}, "this is the path of model 'code', not of 'chat'"),
    ],
)
def test_a_prompt_to_pin_that_is_none_is_refused(own_gateway: Gateway, body: dict[str, object], field: str) -> None:
    with own_gateway.admin() as http:
        answer = http.post("/admin/cache/code/pin", json=body)
    assert answer.status_code in (400, 404)
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("one", "--prompt", "file", "--model", "code"), ("one", "--model", "code"), ("--prompt", "file")],
    ids=["neither", "both", "a model for nothing", "no model"],
)
def test_a_pin_of_two_things_or_none(own_gateway: Gateway, arguments: tuple[str, ...]) -> None:
    refused = run(own_gateway, "pin", *arguments)
    assert refused.exit_code == 2
    assert "name either a REQUEST, or a model and a prompt" in refused.stderr


@pytest.mark.parametrize("time_to_live", ["1", "long", "1.5h", "90s&ttl=1h"])
def test_a_time_that_is_no_duration_is_named_as_it_was_written(own_gateway: Gateway, time_to_live: str) -> None:
    refused = run(own_gateway, "pin", "one", "--for", time_to_live)
    assert refused.exit_code == 2
    assert f"'--for': '{time_to_live}' is not a duration such as 90s, 30m or 24h" in refused.stderr


def test_a_file_that_cannot_be_read(own_gateway: Gateway, tmp_path: Path) -> None:
    refused = run(own_gateway, "pin", "--model", "code", "--prompt", str(tmp_path / "none"))
    assert refused.exit_code == 2
    assert "No such file" in refused.stderr


def test_the_time_of_a_pin_runs_out_while_its_engine_reports_nothing(own_gateway: Gateway) -> None:
    complete(own_gateway, "to-watch", model="code")
    assert run(own_gateway, "pin", "to-watch", "--for", "2h").exit_code == 0
    with own_gateway.admin() as http:

        def seconds_left() -> float:
            models: list[dict[str, list[dict[str, float]]]] = http.get("/admin/cache").json()["models"]
            (pin,) = (pin for model in models for pin in model["pins"])
            return pin["seconds_left"]

        first = seconds_left()
        wait_until(lambda: seconds_left() < first)
    assert run(own_gateway, "unpin", "code", "1").exit_code == 0


def test_a_prompt_is_pinned_shown_and_unpinned(own_gateway: Gateway) -> None:
    complete(own_gateway, "to-keep", model="code")
    made = run(own_gateway, "pin", "to-keep", "--for", "2h")
    assert made.stdout == "code keeps 96 tokens for 7,200 s: pin 1\n", made.stderr
    (shown,) = (model for model in json.loads(run(own_gateway, "show", "--json").stdout)["models"] if model["pins"])
    assert shown["model"] == "code"
    assert shown["pins"] == [{"pin": 1, "tokens": 96, "seconds_left": pytest.approx(7200, abs=60), "state": "kept"}]
    assert re.search(r"code keeps 96 tokens: pin 1, 7,\d{3} s left", run(own_gateway, "show").stdout)
    with own_gateway.admin() as http:
        refused = http.post("/admin/cache/requests/to-keep/pin")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_pinned")
        assert "there is no room" in refused.json()["error"]["message"]
        assert http.post("/admin/cache/requests/nobody/pin").status_code == 404
        assert http.post("/admin/cache/requests/to-keep/pin?ttl=long").status_code == 400
        assert http.delete("/admin/cache/nobody/pins/1").status_code == 404
    assert run(own_gateway, "unpin", "code", "1").stdout == "code: pin 1 is removed\n"
    again = run(own_gateway, "unpin", "code", "1")
    assert again.exit_code == 1
    assert "model 'code': there is no pin 1" in again.stderr


def test_an_id_that_two_models_know_is_pinned_at_each(own_gateway: Gateway) -> None:
    for model in ("chat", "code"):
        complete(own_gateway, "to-both", model)
    with own_gateway.admin() as http:
        pins = [http.post("/admin/cache/requests/to-both/pin").json() for _ in range(2)]
        assert {pin["model"] for pin in pins} == {"chat", "code"}
        refused = http.post("/admin/cache/requests/to-both/pin")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_pinned")
        for pin in pins:
            assert http.delete(f"/admin/cache/{pin['model']}/pins/{pin['pin']}").status_code == 200
