"""Files and batches over HTTP: OpenAI's client, a gateway, and echo engines whose answers are known beforehand.

It is one file, for its tests share the ways to upload, to wait and to read what came out.
"""

from __future__ import annotations

import codecs
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway, wait_until
from openai.types import Batch, FileObject

from swiftkv.server.app import ServerSettings
from swiftkv.server.batches.objects import ENDED
from swiftkv.server.batches.storage import StorageLimits
from swiftkv.server.batches.store import Store
from swiftkv.server.limits import NodeLimits
from swiftkv.server.tokenizer import Tokenizer

PROMPT = "again and again "


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": PROMPT, "max_tokens": 5, **fields}


def jsonl(bodies: Sequence[dict[str, Any]], url: str = "/v1/completions") -> bytes:
    """An input file whose lines are called 0, 1, 2, …"""
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client: openai.OpenAI, content: bytes) -> FileObject:
    return client.files.create(file=("requests.jsonl", content), purpose="batch")


def create(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Batch:
    return client.batches.create(
        input_file_id=upload(client, content).id, endpoint=endpoint, completion_window="24h", metadata={"night": "1"}
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a result file by custom_id; none may come twice."""
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("batches")
    state = directory / "state"
    state.mkdir()
    limits = StorageLimits(max_file_bytes=1 << 20, max_storage_bytes=4 << 20, max_line_bytes=8 << 10, max_requests=300)
    gateway, stop = start_gateway(directory, tokenizer, state=state, storage_limits=limits)
    yield gateway
    stop()


@pytest.fixture
def slow(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A gateway of its own for a test that breaks things; a step takes 10 ms."""
    state = tmp_path / "state"
    state.mkdir()
    gateway, stop = start_gateway(tmp_path, tokenizer, step_ms=10, state=state)
    yield gateway
    stop()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_lines_are_answered_as_clients_are(gateway: Gateway, endpoint: str) -> None:
    client = gateway.openai()
    bodies: list[dict[str, Any]] = [
        {"model": ("chat", "code")[i % 2], "max_tokens": 1 + i % 7, "n": 1 + i % 2, "seed": 3} for i in range(40)
    ]
    for i, body in enumerate(bodies):
        text = f"{PROMPT} {i}"
        if endpoint == "/v1/completions":
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
    created = create(client, jsonl(bodies, endpoint), endpoint)
    assert (created.status, created.endpoint, created.metadata) == ("validating", endpoint, {"night": "1"})
    assert created.expires_at == created.created_at + 24 * 3600
    batch = ended(client, created)
    assert batch.status == "completed"
    assert batch.error_file_id is None
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    answers = results(client, batch.output_file_id)
    assert list(answers) == [str(i) for i in range(40)]
    with gateway.http() as http:
        for i, body in enumerate(bodies):
            response = answers[str(i)]["response"]
            assert response["status_code"] == 200
            assert answers[str(i)]["error"] is None
            expected = http.post(endpoint, json=body).json()
            for part in ("choices", "model", "object"):
                assert response["body"][part] == expected[part]
            assert response["body"]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_files_have_pages_and_can_be_deleted(gateway: Gateway) -> None:
    client = gateway.openai()
    files = [upload(client, b"x" * i) for i in range(5)]
    assert [file.bytes for file in files] == list(range(5))
    assert {(file.filename, file.purpose, file.status) for file in files} == {("requests.jsonl", "batch", "processed")}
    listed = [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")]
    assert listed[-5:] == [file.id for file in files]
    newest = client.files.list(limit=2)
    assert [file.id for file in newest.data] == [files[4].id, files[3].id]
    assert newest.has_more
    assert client.files.content(files[3].id).content == b"xxx"
    assert client.files.retrieve(files[3].id) == files[3]
    for file in files:
        assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file"):
            ask(files[0].id)
    with pytest.raises(openai.BadRequestError, match="'after'"):
        client.files.list(after=files[0].id)


def test_a_path_tells_all_methods_that_it_takes(gateway: Gateway) -> None:
    with gateway.http() as http:
        allowed = {path: http.put(path).headers["allow"] for path in ("/v1/files", "/v1/files/x", "/v1/batches/x")}
    assert allowed == {"/v1/files": "GET, POST", "/v1/files/x": "DELETE, GET", "/v1/batches/x": "GET"}


def test_batches_have_pages(gateway: Gateway) -> None:
    client = gateway.openai()
    created = [create(client, jsonl([completion()])) for _ in range(3)]
    for batch in created:
        ended(client, batch)
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == [created[2].id, created[1].id]
    assert first.has_more
    assert first.get_next_page().data[0].id == created[0].id
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.retrieve("batch_x")


GOOD = jsonl([completion()])
LINE = json.loads(GOOD)


def test_a_file_may_begin_with_a_byte_order_mark(gateway: Gateway) -> None:
    """Editors on Windows write one."""
    client = gateway.openai()
    batch = ended(client, create(client, codecs.BOM_UTF8 + GOOD))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1


def changed(**fields: Any) -> bytes:
    """A good line, and one that is changed."""
    return GOOD + json.dumps({**LINE, "custom_id": "b", **fields}).encode()


@pytest.mark.parametrize(
    ("content", "code", "line", "says"),
    [
        (b"", "empty_file", None, "no lines"),
        (b"\n \n", "empty_file", None, "no lines"),
        (GOOD + b"\n{", "invalid_json_line", 3, "not parseable"),
        (GOOD + b'"a"', "invalid_request", 2, "Expected `object`"),
        (GOOD + b'{"custom_id": "b", "method": "POST", "url": "", "body": ' + b"[" * 5000, "invalid_json_line", 2, ""),
        (GOOD + b'{"custom_id": "\\ud800", "method": "POST", "url": "", "body": {}}', "invalid_json_line", 2, ""),
        (changed(body={"prompt": "ä"}).decode("unicode_escape").encode("latin1"), "invalid_json_line", 2, "utf-8"),
        (GOOD + GOOD, "duplicate_custom_id", 2, "'0' is used by another line"),
        (changed(custom_id=7), "invalid_request", 2, "custom_id"),
        (changed(custom_id=""), "invalid_custom_id", 2, "1 to 1024 characters"),
        (changed(method="GET"), "invalid_method", 2, "'GET'; it must be POST"),
        (changed(url="/v1/embeddings"), "url_mismatch", 2, "the batch is for /v1/completions"),
        (changed(body=[]), "invalid_request", 2, "Expected `object`"),
        (changed(body={"model": 1}), "invalid_request", 2, "model"),
        (GOOD + b'{"method": "POST"}', "invalid_request", 2, "custom_id"),
        (GOOD + b'{"a": "' + b"x" * 9000 + b'"}\n', "line_too_long", 2, "node.max_body"),
        (jsonl([completion()] * 301), "too_many_tasks", None, "more than 300 requests (node.batches.max_requests)"),
    ],
)
def test_a_mistake_in_an_input_file_is_told_by_its_line(
    gateway: Gateway, content: bytes, code: str, line: int | None, says: str
) -> None:
    client = gateway.openai()
    batch = ended(client, create(client, content))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.line) == (code, line)
    assert says in (error.message or "")
    assert line is None or (error.message or "").startswith(f"line {line}: ")
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0


def test_many_mistakes_are_told_in_order_and_only_so_many(gateway: Gateway) -> None:
    client = gateway.openai()
    batch = ended(client, create(client, b"{\n" * 250))
    assert batch.errors is not None
    assert [error.line for error in batch.errors.data or ()] == list(range(1, 101))


def test_lines_that_are_refused_are_in_the_error_file(gateway: Gateway) -> None:
    client = gateway.openai()
    bodies: list[dict[str, Any]] = [
        completion(),
        completion(model="gone"),
        completion(max_tokens=-1),
        completion(stream=True),
        {"model": "chat"},
        {"prompt": PROMPT},
        completion(priority=3),
        completion(prompt=PROMPT * 400, max_tokens=4096),
        completion(prompt="[" * 100),
        completion(cache_salt="refuse"),
    ]
    batch = ended(client, create(client, jsonl(bodies)))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 2, "failed": 8}
    assert list(results(client, batch.output_file_id)) == ["0", "8"]
    errors = results(client, batch.error_file_id)
    told = {key: (line["response"]["status_code"], line["response"]["body"]["error"]) for key, line in errors.items()}
    assert {key: (status, error["param"]) for key, (status, error) in told.items()} == {
        "1": (404, "model"),
        "2": (400, "max_tokens"),
        "3": (400, "stream"),
        "4": (400, "prompt"),
        "5": (400, "model"),
        "6": (400, "priority"),
        "7": (400, "max_tokens"),
        "9": (400, None),
    }
    assert "no model 'gone'" in told["1"][1]["message"]


def test_uploads_and_downloads_take_a_descriptor_each_and_count_as_two_connections(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    limits = NodeLimits(max_connections=7)
    settings = ServerSettings(limits=limits)
    gateway, stop = start_gateway(tmp_path, tokenizer, state=state, settings=settings)
    head = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    ends = [threading.Event() for _ in range(3)]

    def form(end: threading.Event) -> Iterator[bytes]:
        yield head
        end.wait(PATIENCE_S)
        yield b'\r\n--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'

    def send(end: threading.Event) -> httpx.Response:
        with gateway.http() as http:
            headers = {"content-type": "multipart/form-data; boundary=B", "connection": "close"}
            return http.post("/v1/files", content=form(end), headers=headers)

    try:
        with ThreadPoolExecutor(3) as threads, gateway.http() as http:
            uploads = [threads.submit(send, end) for end in ends]
            wait_until(lambda: limits.num_files == 3)
            refused = http.post(
                "/v1/files", content=b"--B--", headers={"content-type": "multipart/form-data; boundary=B"}
            )
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert http.post("/v1/completions", json=completion()).status_code == 200
            ends[0].set()
            file_id = uploads[0].result().json()["id"]
            wait_until(lambda: limits.num_files == 2 and limits.num_connections == 3)
            assert http.get(f"/v1/files/{file_id}/content").content == b"abc"
            assert http.get("/v1/files/file-none/content").status_code == 404
            for end in ends:
                end.set()
            assert [upload.result().status_code for upload in uploads] == [200] * 3
        wait_until(lambda: limits.num_files == 0)
    finally:
        for end in ends:
            end.set()
        stop()


def test_a_batch_is_created_from_an_upload_for_batches_only(gateway: Gateway) -> None:
    client = gateway.openai()
    with pytest.raises(openai.NotFoundError, match="no file 'file-x'"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
    batch = ended(client, create(client, GOOD))
    assert batch.output_file_id is not None
    with pytest.raises(openai.BadRequestError, match="was not uploaded with purpose 'batch'"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint="/v1/completions", completion_window="24h")
    for field, value in (("endpoint", "/v1/embeddings"), ("completion_window", "48h"), ("output_expires_after", {})):
        body = {"input_file_id": batch.input_file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        with gateway.http() as http:
            refused = http.post("/v1/batches", json={**body, field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_a_cancelled_batch_keeps_what_it_has(slow: Gateway) -> None:
    client = slow.openai()
    created = create(client, jsonl([completion(max_tokens=1)] + [completion(max_tokens=2000)] * 40))
    wait_until(lambda: client.batches.retrieve(created.id).request_counts.completed == 1)  # type: ignore[union-attr]
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(created.input_file_id)
    assert client.batches.cancel(created.id).status == "cancelling"
    batch = ended(client, created)
    assert batch.status == "cancelled"
    assert batch.cancelled_at
    wait_until(lambda: slow.clients["chat"].num_in_flight == 0)
    assert list(results(client, batch.output_file_id)) == ["0"]
    errors = results(client, batch.error_file_id)
    assert list(errors) == [str(i) for i in range(1, 41)]
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert {line["response"] for line in errors.values()} == {None}
    assert client.batches.cancel(created.id) == batch
    assert client.files.delete(created.input_file_id).deleted


def test_a_line_that_needs_more_memory_than_is_lent_holds_up_no_others(gateway: Gateway) -> None:
    """A client would be told to come again in half an hour."""
    client = gateway.openai()
    tries = {"model_name": "chat", "outcome": "again"}
    waiting = create(client, jsonl([completion(cache_salt="starve")]))
    wait_until(lambda: gateway.metrics.registry.get_sample_value("swiftkv:batch_lines_total", tries))
    assert ended(client, create(client, GOOD)).status == "completed"
    assert client.batches.retrieve(waiting.id).status == "in_progress"
    client.batches.cancel(waiting.id)
    ended(client, waiting)


def test_what_has_ended_cannot_be_cancelled(gateway: Gateway) -> None:
    client = gateway.openai()
    batch = ended(client, create(client, GOOD))
    with pytest.raises(openai.ConflictError, match="is completed"):
        client.batches.cancel(batch.id)


def test_a_batch_expires(slow: Gateway) -> None:
    client = slow.openai()
    created = create(client, jsonl([completion(max_tokens=1), *[completion(max_tokens=2000)] * 3]))
    wait_until(lambda: client.batches.retrieve(created.id).request_counts.completed == 1)  # type: ignore[union-attr]

    def let_expire(store: Store) -> None:
        number, batch = store._numbered_batch(created.id)
        batch.expires_at = 1
        store._put(number, batch)

    slow.with_store(let_expire)
    slow.call(lambda: slow.storage.changed.set())  # type: ignore[union-attr]
    batch = ended(client, created)
    assert batch.status == "expired"
    assert list(results(client, batch.output_file_id)) == ["0"]
    assert {line["error"]["code"] for line in results(client, batch.error_file_id).values()} == {"batch_expired"}


def test_lines_run_again_when_their_engine_died(slow: Gateway) -> None:
    client, engine = slow.openai(), slow.engines["chat"]
    lengths = [*(1 + 3 * i for i in range(39)), 3000]  # the last outlasts the question how far the batch is
    created = create(client, jsonl([completion(max_tokens=length) for length in lengths]))
    wait_until(lambda: client.batches.retrieve(created.id).request_counts.completed > 0)  # type: ignore[union-attr]
    engine.stop()
    engine.step_ms = 0
    slow.call(lambda: slow.clients["chat"].engine_down("was killed by SIGKILL", retry_after_s=0.1))
    assert client.batches.retrieve(created.id).status == "in_progress"
    engine.start()
    slow.wait_ready("chat")
    batch = ended(client, created)
    assert batch.status == "completed"
    answers = results(client, batch.output_file_id)
    assert list(answers) == [str(i) for i in range(40)]
    tokens = {key: line["response"]["body"]["usage"]["completion_tokens"] for key, line in answers.items()}
    assert tokens == {str(i): length for i, length in enumerate(lengths)}


@pytest.mark.slow
def test_a_line_beside_which_engines_always_die_fails(slow: Gateway) -> None:
    client, engine = slow.openai(), slow.engines["chat"]
    created = create(client, jsonl([completion(max_tokens=4000)]))
    for _ in range(3):
        wait_until(lambda: slow.clients["chat"].num_in_flight == 1)
        engine.stop()
        slow.call(lambda: slow.clients["chat"].engine_down("was killed by SIGKILL", retry_after_s=0.1))
        engine.start()
        slow.wait_ready("chat")
    batch = ended(client, created)
    [line] = results(client, batch.error_file_id).values()
    assert line["response"]["status_code"] == 503


def test_a_line_survives_any_number_of_sleeps(slow: Gateway) -> None:
    client = slow.openai()
    created = create(client, jsonl([completion(max_tokens=400)]))
    for _ in range(3):
        wait_until(lambda: slow.clients["chat"].num_in_flight == 1)
        with slow.admin() as http:
            assert http.post("/admin/models/chat/sleep?now=true").status_code == 200
            assert http.post("/admin/models/chat/wake").status_code == 200
    assert ended(client, created).request_counts.completed == 1  # type: ignore[union-attr]


def test_clients_find_room_beside_a_batch(slow: Gateway) -> None:
    client, engine = slow.openai(), slow.clients["chat"]
    created = create(client, jsonl([completion(max_tokens=200)] * 300))
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            most[0] = max(most[0], engine.num_in_flight)

    watching = threading.Thread(target=watch)
    watching.start()
    with slow.http() as http:
        for _ in range(5):
            assert http.post("/v1/completions", json=completion()).status_code == 200
    assert client.batches.retrieve(created.id).status in ("validating", "in_progress")
    wait_until(lambda: most[0] >= 16)
    stop.set()
    watching.join()
    assert most[0] <= 16 + 1
    client.batches.cancel(created.id)
    ended(client, created)


def post_form(gateway: Gateway, body: bytes, content_type: str = "multipart/form-data; boundary=b") -> httpx.Response:
    with gateway.http() as http:
        return http.post("/v1/files", content=body, headers={"Content-Type": content_type})


PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
END = b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (PURPOSE + FILE + END, 200, ""),
        (FILE + PURPOSE + END + b"and more" * 100_000, 200, ""),
        (PURPOSE + FILE, 400, "ends before the form does"),
        (PURPOSE + END, 400, "field 'file' is required"),
        (FILE + END, 400, "field 'purpose' is required"),
        (FILE + PURPOSE.replace(b"batch", b"vision") + END, 400, "only 'batch' is supported"),
        (FILE + PURPOSE.replace(b"batch", b"x" * 2000) + END, 400, "longer than 1024 bytes"),
        (FILE + FILE + END, 400, "'file' comes twice"),
        (PURPOSE + PURPOSE + END, 400, "'purpose' comes twice"),
        (FILE.replace(b'"file"', b'"expires_after[seconds]"') + END, 400, "'expires_after[seconds]' is not supported"),
        (FILE.replace(b"form-data", b"form-data" + b"x" * 9000) + END, 400, "header size exceeded"),
        (b"nonsense", 400, "not valid multipart/form-data"),
        (b"", 400, "ends before the form does"),
        (FILE.replace(b"{}", b"x" * ((1 << 20) + 1)) + PURPOSE + END, 413, "node.batches.max_file"),
        (b"x" * (2 << 20), 413, "larger than"),
    ],
)
def test_forms_are_taken_or_refused_with_a_reason(gateway: Gateway, body: bytes, status: int, says: str) -> None:
    answer = post_form(gateway, body)
    assert answer.status_code == status, answer.text
    assert says in answer.text
    names = {path.name for path in Path(gateway.with_store(lambda store: store.content_path("x"))).parent.iterdir()}
    assert names == {file.id for file in gateway.openai().files.list()}


def test_what_is_no_form_is_refused(gateway: Gateway) -> None:
    for content_type in ("application/json", "multipart/form-data", "multipart/mixed; boundary=b"):
        answer = post_form(gateway, FILE, content_type)
        assert (answer.status_code, "must be a form" in answer.text) == (400, True)


def test_web_pages_of_other_sites_cannot_leave_files_here(gateway: Gateway) -> None:
    with gateway.http() as http:
        form: Any = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        for origin in ("http://elsewhere.example", "http://["):
            refused = http.post("/v1/files", headers={"Origin": origin}, **form)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert http.post("/v1/files", headers={"Origin": gateway.url}, **form).status_code == 200


def test_all_files_together_have_a_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "state").mkdir()
    limits = StorageLimits(max_storage_bytes=1000)
    gateway, stop = start_gateway(tmp_path, tokenizer, state=tmp_path / "state", storage_limits=limits)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        file = upload(client, b"x" * 400)
        with pytest.raises(openai.InternalServerError, match=r"files and uploads take \d+B of 1000B; delete some"):
            upload(client, b"x" * 700)
        client.files.delete(file.id)
        upload(client, b"x" * 500)
    stop()


def test_files_and_batches_ask_for_the_key(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "state").mkdir()
    settings = ServerSettings(api_key="a key that is long")
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=settings, state=tmp_path / "state")
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as http:
        for path in ("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"):
            assert http.get(path).status_code == 401
        assert http.post("/v1/files", files={"file": b""}).status_code == 401
    assert ended(gateway.openai(), create(gateway.openai(), GOOD)).status == "completed"
    stop()


def test_a_database_that_is_full_is_an_error_and_batches_wait(slow: Gateway) -> None:
    client = slow.openai()
    lines = [completion(max_tokens=30, prompt=PROMPT * 100)] * 149
    created = create(client, jsonl([*lines, completion(max_tokens=1000)]))
    wait_until(lambda: client.batches.retrieve(created.id).request_counts.completed >= 1)  # type: ignore[union-attr]

    def limit(store: Store, num_pages: int) -> int:
        store._database.execute(f"PRAGMA max_page_count = {num_pages}").fetchall()
        return 0

    slow.with_store(lambda store: limit(store, 1))  # it is what it has
    file = upload(client, b"x")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with slow.http() as http:
        while (refused := http.post("/v1/batches", json={**body, "metadata": {"a": "x" * 1000}})).status_code == 200:
            pass
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
    assert "is full; free some space" in refused.text
    assert client.batches.retrieve(created.id).status == "in_progress"
    with slow.http() as http:
        assert http.post("/v1/completions", json=completion()).status_code == 200
    slow.with_store(lambda store: limit(store, 1 << 30))
    batch = ended(client, created)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 150
    assert len(results(client, batch.output_file_id)) == 150


@contextmanager
def small_file_system(directory: Path) -> Iterator[None]:
    """Mount 1 MiB of memory, where that is allowed."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_is_full_is_an_error_and_nothing_is_left_on_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with small_file_system(state):
        gateway, stop = start_gateway(tmp_path, tokenizer, state=state)
        client = gateway.openai()
        with pytest.raises(openai.InternalServerError, match="is full; free some space") as error:
            upload(client, b"x" * (2 << 20))
        assert error.value.status_code == 507
        assert not list((state / "files").iterdir())
        batch = ended(client, create(client, GOOD))
        assert batch.status == "completed"
        stop()
