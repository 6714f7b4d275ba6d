"""``/admin``: who lends to whom, budgets at run time, who may ask, and engines that do not answer."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_coordinator import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    FIRST_BUDGET_BYTES,
    NUM_EXTENTS,
    POOL_BYTES,
    REFUSED_BUDGET_BYTES,
)
from echo_gateway import PATIENCE_S, Gateway, start_gateway
from prometheus_client.parser import text_string_to_metric_families

from swiftkv.bench.serve import main as run_bench
from swiftkv.server import lending
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer
from tests.support.node_process import wait_for

NUM_LENT = FIRST_BUDGET_BYTES // EXTENT_BYTES


@pytest.fixture
def lending_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    gateway, stop = start_gateway(tmp_path, tokenizer)
    yield gateway
    stop()


def patch(gateway: Gateway, budget: object, *, worker: str = "code", query: str = "") -> httpx.Response:
    with gateway.admin() as http:
        return http.patch(f"/admin/lending/{worker}{query}", json={"budget": budget})


def lent_bytes(gateway: Gateway) -> int | None:
    with gateway.admin() as http:
        models = {model["model"]: model for model in http.get("/admin/lending").json()["models"]}
    found: int | None = models["code"]["lent_bytes"]
    return found


def test_a_benchmark_asks_where_the_tokenizer_is(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, model_dir=tokenizer_dir, further_names=("other",))
    monkeypatch.setenv("SWIFTKV_ADMIN_KEY", gateway.admin_key)
    flags = ["--model", "other", "--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--disable-tqdm"]
    saving = ["--save-result", "--result-filename", str(tmp_path / "result.json")]
    try:
        assert run_bench(["--base-url", gateway.url, *flags, *saving]) == 0
        assert json.loads((tmp_path / "result.json").read_text())["tokenizer_id"] == str(tokenizer_dir)
        with gateway.admin() as http:
            names = [(model["model"], model["names"]) for model in http.get("/admin/models").json()["models"]]
        assert names == [("chat", ["chat", "other"]), ("code", ["code", "other"])]
    finally:
        stop()


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/admin/models/code"), ("POST", "/admin/models/code/sleep"), ("POST", "/admin/cache/code/clear")],
)
def test_a_parameter_that_is_not_known_is_refused_before_anything_happens(
    gateway: Gateway, method: str, path: str
) -> None:
    with gateway.admin() as http:
        refused = http.request(method, f"{path}?rehearse=true")
        assert refused.status_code == 400
        assert "rehearse" in refused.json()["error"]["message"]
        assert [model["model"] for model in http.get("/admin/lending").json()["models"]] == ["chat", "code"]
    assert gateway.clients["code"].state.serves


def test_what_every_model_lends_and_borrows(gateway: Gateway) -> None:
    with gateway.admin() as http:
        answer = http.get("/admin/lending").json()
    assert (answer["enabled"], answer["transport"]) == (True, "shm")
    chat, code = answer["models"]
    assert (code["model"], code["role"], code["state"], code["error"]) == ("code", "worker", "ready", None)
    assert (code["pool_bytes"], code["budget_bytes"]) == (POOL_BYTES, FIRST_BUDGET_BYTES)
    assert (code["lent_bytes"], code["borrowed_bytes"]) == (FIRST_BUDGET_BYTES, 0)
    (link,) = code["lends"]
    assert (link["lender"], link["borrower"], link["peer_state"]) == ("code", "chat", "attached")
    assert (link["extent_bytes"], link["meu_w"], link["meu_m"], link["num_extents"]) == (
        EXTENT_BYTES,
        2,
        3,
        NUM_EXTENTS,
    )
    assert link["extents"] == {"home": NUM_EXTENTS - NUM_LENT, "lent": NUM_LENT}
    assert link["no_offer_s"] is None
    assert (chat["budget_bytes"], chat["lent_bytes"], chat["borrowed_bytes"]) == (None, 0, FIRST_BUDGET_BYTES)
    (link,) = chat["borrows"]
    assert (link["lender"], link["borrower"], link["lent_bytes"]) == ("code", "chat", FIRST_BUDGET_BYTES)


def test_every_extent_its_owner_and_epoch(gateway: Gateway) -> None:
    with gateway.admin() as http:
        code, chat = (http.get(f"/admin/pools/{name}").json() for name in ("code", "chat"))
    (group,) = code["groups"]
    states = ("free", "used", "cached", "lent", "in_flight", "staging")
    assert sum(group[state] for state in states) == group["total"]
    (link,) = code["lends"]
    assert [extent["extent"] for extent in link["extents"]] == list(range(NUM_EXTENTS))
    assert link["extents"][0] == {"extent": 0, "state": "lent", "owner": "chat", "epoch": 1}
    assert link["extents"][-1] == {"extent": NUM_EXTENTS - 1, "state": "home", "owner": "code", "epoch": 0}
    (replica,) = chat["borrows"]
    assert (replica["lender"], replica["borrower"]) == ("code", "chat")
    assert [e["owner"] for e in replica["extents"]] == [e["owner"] for e in link["extents"]]
    assert (replica["extents"][0]["state"], replica["extents"][-1]["state"]) == ("held", "none")


def test_a_budget_lowered_recalls_and_one_raised_lends(
    lending_gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swiftkv.server.lending")
    asked = patch(lending_gateway, "16MiB", query="?dry_run=true")
    assert asked.status_code == 200
    assert asked.json()["dry_run"] is True
    assert asked.json()["recalled_bytes"] == 32 << 20
    assert lent_bytes(lending_gateway) == FIRST_BUDGET_BYTES
    lowered = patch(lending_gateway, "16MiB").json()
    assert lowered == {
        "model": "code", "dry_run": False, "budget_bytes": 16 << 20, "lent_bytes": 16 << 20,
        "recalled_bytes": 32 << 20, "took_s": 0.25,
    }  # fmt: skip
    assert caplog.messages == ["code: lends up to 16MiB now; 32MiB came back in 0.250 s"]
    assert patch(lending_gateway, "16MiB").json()["recalled_bytes"] == 0  # again: nothing is left to do
    assert patch(lending_gateway, "50%").json()["lent_bytes"] == POOL_BYTES // 2
    assert patch(lending_gateway, 0).json()["lent_bytes"] == 0
    # kv_cache.memory may be a little more than the pool: what the file may say, a request may say, too.
    assert patch(lending_gateway, f"{POOL_BYTES + BLOCK_BYTES - 1}B").json()["budget_bytes"] == POOL_BYTES
    budgets = lending_gateway.budgets["code"]
    assert budgets == [16 << 20, 16 << 20, POOL_BYTES // 2, 0, POOL_BYTES]
    assert patch(lending_gateway, f"{REFUSED_BUDGET_BYTES}B").status_code == 400
    assert budgets[-1] == POOL_BYTES  # a refused budget is not used at the next start
    assert not lending_gateway.budgets["chat"]
    with lending_gateway.admin() as http:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert families["swiftkv:recalls"].samples[0].value == 64


@pytest.mark.parametrize(
    ("budget", "worker", "status", "says"),
    [
        (
            "a lot",
            "code",
            400,
            "field 'budget': must be a percentage of the pool up to 100% such as 75%, a size such as",
        ),
        (75, "code", 400, "field 'budget': must be"),
        (-1, "code", 400, "field 'budget': must be"),
        (True, "code", 400, "field 'budget': must be"),
        (None, "code", 400, "field 'budget' is required"),
        ("101%", "code", 400, "field 'budget': must be"),
        ("9" * 400 + "TiB", "code", 400, "field 'budget': must be"),
        ("65MiB", "code", 400, "65MiB is more than the pool of 'code', 64MiB; 100% is the most"),
        ("13MiB", "code", 400, "model 'code' refuses the budget: thirteen is unlucky"),
        ("50%", "chat", 409, "model 'chat' is a master"),
        ("50%", "cod", 404, "no model 'cod'; this node has: chat, code"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    gateway: Gateway, budget: object, worker: str, status: int, says: str
) -> None:
    response = patch(gateway, budget, worker=worker)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(says)
    assert lent_bytes(gateway) == FIRST_BUDGET_BYTES


def test_other_fields_and_queries_are_mistakes(gateway: Gateway) -> None:
    with gateway.admin() as http:
        extra = http.patch("/admin/lending/code", json={"budget": 0, "force": True})
        missing = http.patch("/admin/lending/code", json={})
        query = http.patch("/admin/lending/code?dry_run=maybe", json={"budget": 0})
        unknown = http.get("/admin/pools/nobody")
    assert [response.status_code for response in (extra, missing, query, unknown)] == [400, 400, 400, 404]
    assert extra.json()["error"]["message"] == "field 'force' is not supported"
    assert missing.json()["error"]["message"] == "field 'budget' is required"
    assert query.json()["error"]["param"] == "dry_run"
    assert lent_bytes(gateway) == FIRST_BUDGET_BYTES


def test_metrics(gateway: Gateway) -> None:
    with gateway.admin() as http:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
        of_chat = http.get(f"{gateway.model_url}/metrics").text

    def value(name: str, **labels: str) -> float:
        (sample,) = (s for s in families[name].samples if labels.items() <= s.labels.items())
        return float(sample.value)

    pair = {"lender": "code", "borrower": "chat"}
    assert value("swiftkv:lent_bytes", model_name="code", **pair) == FIRST_BUDGET_BYTES
    assert value("swiftkv:borrowed_bytes", model_name="chat", **pair) == FIRST_BUDGET_BYTES
    assert value("swiftkv:lending_budget_bytes", model_name="code") == FIRST_BUDGET_BYTES
    assert value("swiftkv:recalls", model_name="code", reason="demand") == 0
    samples = {(s.name, s.labels.get("le")): s.value for s in families["swiftkv:recall_seconds"].samples}
    assert samples == {
        ("swiftkv:recall_seconds_bucket", "0.1"): 0, ("swiftkv:recall_seconds_bucket", "1.0"): 3,
        ("swiftkv:recall_seconds_bucket", "+Inf"): 4, ("swiftkv:recall_seconds_count", None): 4,
        ("swiftkv:recall_seconds_sum", None): 7.5,
    }  # fmt: skip
    assert "swiftkv:borrowed_bytes{" in of_chat
    assert "swiftkv:lent_bytes{" not in of_chat


def test_an_engine_that_is_gone_is_503_and_the_others_are_shown(lending_gateway: Gateway) -> None:
    lending_gateway.engines["code"].stop()
    client = lending_gateway.clients["code"]
    lending_gateway.call(lambda: client.engine_down("ended with code 1", retry_after_s=3))
    refused = patch(lending_gateway, "50%")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
    with lending_gateway.admin() as http:
        assert http.get("/admin/pools/code").status_code == 503
        chat, code = http.get("/admin/lending").json()["models"]
        assert "swiftkv:lent_bytes{" not in http.get("/metrics").text
    assert (code["state"], code["error"], code["lent_bytes"]) == (
        "restarting",
        "model 'code' stopped and is being restarted: its engine ended with code 1",
        None,
    )
    assert (chat["error"], chat["borrowed_bytes"]) == (None, FIRST_BUDGET_BYTES)
    lending_gateway.engines["code"].start()
    lending_gateway.wait_ready("code")
    assert patch(lending_gateway, "50%").status_code == 200


def test_an_engine_that_is_stopped_is_503_in_time(lending_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_RECALL_TIMEOUT_S", 0.2)
    assert lent_bytes(lending_gateway) == FIRST_BUDGET_BYTES  # they are connected
    with lending_gateway.engines["code"].standing_still(), lending_gateway.admin() as http:
        refused = patch(lending_gateway, "25%")
        assert http.get("/metrics").status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "did not answer about lending within 0.2 s" in refused.json()["error"]["message"]
    assert lending_gateway.budgets["code"] == [POOL_BYTES // 4]  # it will hold, and outlive the engine
    wait_for("what was asked to be done", lambda: lent_bytes(lending_gateway) == POOL_BYTES // 4)


def test_a_node_that_does_not_lend(tmp_path: Path, tokenizer: Tokenizer) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, lending=False)
    with gateway.admin() as http:
        answer = http.get("/admin/lending").json()
        pool = http.get("/admin/pools/chat")
        assert http.get("/metrics").status_code == 200
    assert answer["enabled"] is False
    assert [(model["model"], model["lends"], model["error"]) for model in answer["models"]] == [
        ("chat", [], None), ("code", [], None),
    ]  # fmt: skip
    refused = patch(gateway, "50%")
    stop()
    assert (refused.status_code, pool.status_code) == (409, 409)
    assert refused.json()["error"]["message"] == "model 'code' lends and borrows nothing: node.lending is off"


ROUTES = [
    ("GET", "/admin/lending", None),
    ("PATCH", "/admin/lending/code", {"budget": 0}),
    ("GET", "/admin/pools/code", None),
]


def all_routes(gateway: Gateway, headers: dict[str, str]) -> list[httpx.Response]:
    with gateway.http() as http:
        http.headers.pop("Authorization", None)
        return [http.request(method, path, json=body, headers=headers) for method, path, body in ROUTES]


def codes(responses: list[httpx.Response]) -> set[tuple[int, Any]]:
    return {(response.status_code, response.json()["error"]["code"]) for response in responses}


def test_admin_has_a_key_of_its_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_key="models", admin_key="admin")
    assert "admin'" not in repr(settings)
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=settings)
    for headers in ({}, {"Authorization": "Bearer models"}, {"Authorization": "Bearer admin2"}):
        assert codes(all_routes(gateway, headers)) == {(401, "invalid_admin_key")}
    opened = all_routes(gateway, {"Authorization": "Bearer admin"})
    with gateway.http() as http:
        models = http.get("/v1/models", headers={"Authorization": "Bearer admin"})
        own_port = http.get(f"{gateway.model_url}/admin/lending", headers={"Authorization": "Bearer admin"})
        document = http.get("/openapi.json").json()
    stop()
    assert [response.status_code for response in opened] == [200, 200, 200]
    assert models.status_code == 401  # nor does the admin's key open the models
    assert own_port.status_code == 404
    assert document["paths"]["/admin/lending"]["get"]["security"] == [{"admin": []}]
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]


def test_a_proxy_on_this_machine_does_not_give_admin_away(gateway: Gateway) -> None:
    """Its requests come from this machine and name it, whoever made them; nothing was configured here."""
    host = gateway.url.removeprefix("http://")
    for headers in ({"Host": host}, {"Host": "localhost"}, {"Host": host, "Authorization": "Bearer none"}):
        assert codes(all_routes(gateway, headers)) == {(401, "invalid_admin_key")}
    answer = all_routes(gateway, {})[0]
    assert "the one in the file that the node named when it started" in answer.json()["error"]["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def test_without_a_key_a_node_answers_only_to_names_of_this_machine(gateway: Gateway) -> None:
    """A page in a browser whose name was made to point here sends that name, on all routes and ports."""
    port = gateway.url.rsplit(":", 1)[1]
    paths = (f"{gateway.url}/v1/models", f"{gateway.url}/metrics", f"{gateway.url}/docs", f"{gateway.model_url}/health")
    for url in paths:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST", "127.8.8.8"):
            assert httpx.get(url, headers={"Host": host}, timeout=PATIENCE_S).status_code == 200, (url, host)
        for host in ("evil.example", f"evil.example:{port}", "10.0.0.1", "[::1", "", "localhost.evil.example"):
            refused = httpx.get(url, headers={"Host": host}, timeout=PATIENCE_S)
            assert codes([refused]) == {(403, "host_not_allowed")}, (url, host)
    assert "node.allowed_hosts" in refused.json()["error"]["message"]
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 403 ")
    assert codes(all_routes(gateway, {"Host": "evil.example"})) == {(401, "invalid_admin_key")}
    with gateway.admin() as admin:
        assert admin.get("/admin/lending", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(("allowed", "status"), [(("Llm.Internal",), 200), (None, 200), (("other",), 403)])
def test_names_that_may_be_called_are_listed(
    tmp_path: Path, tokenizer: Tokenizer, allowed: tuple[str, ...] | None, status: int
) -> None:
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=ServerSettings(allowed_hosts=allowed))
    answers = [
        httpx.get(f"{gateway.url}/v1/models", headers={"Host": h}, timeout=PATIENCE_S)
        for h in ("llm.internal:80", "localhost")
    ]
    stop()
    assert [answer.status_code for answer in answers] == [status, 200]
