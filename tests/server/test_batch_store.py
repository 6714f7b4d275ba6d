"""The store of files and batches, beside a naive model of it, through crashes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftkv.errors import ConfigError
from swiftkv.server.batches.checking import InputCheck
from swiftkv.server.batches.objects import OfflineBatch, Status, StoredFile
from swiftkv.server.batches.storage import Storage, StorageLimits
from swiftkv.server.batches.store import Store, TakenLine

ENDPOINT = "/v1/completions"


def add_input(store: Store, file_id: str, models: list[str]) -> StoredFile:
    """Add a file whose lines are for these models; every second line is followed by an empty one."""
    lines = []
    for i, model in enumerate(models):
        line = {"custom_id": f"{file_id}/{i}", "method": "POST", "url": ENDPOINT, "body": {"model": model}}
        lines.append(json.dumps(line) + "\n" * (1 + i % 2))
    content = "".join(lines).encode()
    store.content_path(file_id).write_bytes(content)
    return store.add_file(StoredFile(file_id, len(content), 0, "a", "batch"))


def begin(store: Store, name: str, models: list[str]) -> int:
    """Make a batch of lines for these models, and let it begin; return its number."""
    add_input(store, f"file-{name}", models)
    store.add_batch(OfflineBatch(f"batch-{name}", ENDPOINT, f"file-{name}", 0, 1 << 40))
    number, batch = store._numbered_batch(f"batch-{name}")
    check = InputCheck(number, batch, StorageLimits(), {})
    while not check.go_on(store):
        pass
    return number


@dataclass
class NaiveBatch:
    models: dict[str, str]
    """By custom_id, in order."""
    running: set[str] = field(default_factory=set)
    results: dict[str, tuple[bytes, bool]] = field(default_factory=dict)

    def pending(self, model: str) -> list[str]:
        return [i for i, of in self.models.items() if of == model and i not in self.running and i not in self.results]


class StoreMachine(RuleBasedStateMachine):
    """Batches that run, crash, are cancelled and finish: no result is lost that was kept, and none is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = Store(self.directory)
        self.batches: dict[int, NaiveBatch] = {}
        self.taken: list[TakenLine] = []
        self.num_batches = 0
        self.num_results = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(models=st.lists(st.sampled_from(["chat", "code", "gone"]), min_size=1, max_size=8))
    def create(self, models: list[str]) -> None:
        name = str(self.num_batches)
        self.num_batches += 1
        number = begin(self.store, name, models)
        self.batches[number] = NaiveBatch({f"file-{name}/{i}": model for i, model in enumerate(models)})

    @rule(model=st.sampled_from(["chat", "code", "gone"]), limit=st.integers(1, 5))
    def take(self, model: str, limit: int) -> None:
        if model == "gone":
            taken = self.store.take(("chat", "code"), False, limit)
        else:
            taken = self.store.take((model,), True, limit)
        expected = [(number, i) for number, batch in sorted(self.batches.items()) for i in batch.pending(model)]
        assert [(line.batch, line.custom_id) for line in taken] == expected[:limit]
        for line in taken:
            assert json.loads(self.store.text(line))["custom_id"] == line.custom_id
            self.batches[line.batch].running.add(line.custom_id)
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), has_failed=st.booleans())
    def keep(self, data: st.DataObject, has_failed: bool) -> None:
        """Keep a result, also of a line whose batch has ended, or that has one."""
        line = data.draw(st.sampled_from(self.taken))
        self.num_results += 1
        result = json.dumps({"custom_id": line.custom_id, "result": self.num_results}).encode()
        self.store.keep(line, result, has_failed=has_failed)
        batch = self.batches.get(line.batch)
        if batch is not None and line.custom_id in batch.running:
            batch.running.remove(line.custom_id)
            batch.results[line.custom_id] = (result, has_failed)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.taken))
        self.store.put_back(line)
        if line.batch in self.batches:
            self.batches[line.batch].running.discard(line.custom_id)

    @rule()
    def crash(self) -> None:
        """Go on with the files as they are on disk at this moment."""
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.directory, copy, dirs_exist_ok=True)
        (copy / "files" / "file-half").write_bytes(b"of an upload")
        self.teardown()
        self.directory, self.store = copy, Store(copy)
        assert not (copy / "files" / "file-half").exists()
        self.taken.clear()
        for batch in self.batches.values():
            batch.running.clear()

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), status=st.sampled_from(["completed", "cancelled", "expired"]))
    def finish(self, data: st.DataObject, status: Status) -> None:
        number = data.draw(st.sampled_from(sorted(self.batches)))
        naive = self.batches[number]
        if status == "completed" and len(naive.results) < len(naive.models):
            status = "cancelled"
        del self.batches[number]
        files = self.store.finish(number, status)
        batch = self.store._batch_at(number)
        assert batch.status == status
        assert [file.id for file in files] == [i for i in (batch.output_file_id, batch.error_file_id) if i]
        completed = [result for result, has_failed in naive.results.values() if not has_failed]
        assert batch.request_counts.completed == len(completed)
        assert batch.request_counts.failed == len(naive.models) - len(completed)
        lines = {file.id: self.store.content_path(file.id).read_bytes().splitlines() for file in files}
        output = lines.get(batch.output_file_id or "", [])
        assert output == [naive.results[i][0] for i in naive.models if naive.results.get(i, (b"", True))[1] is False]
        errors = [json.loads(line) for line in lines.get(batch.error_file_id or "", [])]
        assert [e["custom_id"] for e in errors] == [i for i in naive.models if naive.results.get(i, (b"", True))[1]]
        for error in errors:
            if error["custom_id"] in naive.results:
                assert json.dumps(error).encode() == naive.results[error["custom_id"]][0]
            else:
                assert error["error"]["code"] == f"batch_{status}"

    @invariant()
    def counts_are_right(self) -> None:
        active = dict(self.store.active_batches())
        assert set(active) == set(self.batches)
        for number, naive in self.batches.items():
            counts = active[number].request_counts
            num_failed = sum(has_failed for _, has_failed in naive.results.values())
            assert (counts.total, counts.failed) == (len(naive.models), num_failed)
            assert counts.completed == len(naive.results) - num_failed


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


def test_nobody_else_may_read_what_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    begin(store, "a", ["chat"])
    for line in store.take(("chat",), True, 1):
        store.keep(line, b"{}", has_failed=False)
    [output] = store.finish(1, "completed")
    assert os.stat(store.content_path(output.id)).st_mode & 0o077 == 0
    assert os.stat(tmp_path / "batches.sqlite3").st_mode & 0o077 == 0
    store.close()


def test_a_check_that_was_interrupted_begins_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_input(store, "file-a", ["chat"] * 450)
    batch = store.add_batch(OfflineBatch("batch-a", ENDPOINT, "file-a", 0, 1 << 40))
    InputCheck(1, batch, StorageLimits(), {}).go_on(store)
    assert not store.take(("chat",), True, 5)  # the batch is validated yet
    store.close()
    store = Store(tmp_path)
    check = InputCheck(1, batch, StorageLimits(), {})
    while not check.go_on(store):
        pass
    assert store.batch("batch-a").request_counts.total == 450
    store.close()


def test_an_input_file_that_is_gone_is_an_error_of_its_batch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_input(store, "file-a", ["chat"])
    batch = store.add_batch(OfflineBatch("batch-a", ENDPOINT, "file-a", 0, 1 << 40))
    store.content_path("file-a").unlink()
    assert InputCheck(1, batch, StorageLimits(), {}).go_on(store)
    errors = store.batch("batch-a").errors
    assert errors is not None
    assert errors.data[0].message == "the input file was deleted"
    store.close()


def test_a_batch_that_is_cancelled_while_it_is_checked_stays_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_input(store, "file-a", ["chat"] * 300)
    batch = store.add_batch(OfflineBatch("batch-a", ENDPOINT, "file-a", 0, 1 << 40))
    check = InputCheck(1, batch, StorageLimits(), {})
    assert not check.go_on(store)
    store.cancel("batch-a")
    assert check.go_on(store)
    assert store.batch("batch-a").status == "cancelling"
    assert store.finish(1, "cancelled") == []
    assert store.batch("batch-a").request_counts.total == 0
    store.close()


def test_memory_of_results_is_given_back_to_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    begin(store, "a", ["chat"] * 50)
    for line in store.take(("chat",), True, 50):
        store.keep(line, b"x" * 50_000, has_failed=False)
    store.finish(1, "completed")
    store.close()
    assert (tmp_path / "batches.sqlite3").stat().st_size < 200_000


@pytest.mark.parametrize("damage", ["nonsense", "later"])
def test_a_database_that_cannot_be_read_is_a_mistake_of_the_configuration(tmp_path: Path, damage: str) -> None:
    Store(tmp_path).close()
    path = tmp_path / "batches.sqlite3"
    if damage == "nonsense":
        path.write_bytes(b"this is no database" * 1000)
    else:
        database = sqlite3.connect(path)
        database.execute("PRAGMA user_version = 99")
        database.close()
    with pytest.raises(ConfigError, match="move it away" if damage == "nonsense" else "later version"):
        Store(tmp_path)


def test_a_disk_that_takes_nothing_is_no_damage(tmp_path: Path) -> None:
    """To move the database away would lose files and batches, and not help."""
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from swiftkv.errors import ConfigError\nfrom swiftkv.server.batches.store import Store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n    Store(Path(sys.argv[1]))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert ended.stdout.startswith(f"node.state_dir: {tmp_path / 'batches.sqlite3'} cannot be used: "), ended.stderr
    assert ended.stdout.endswith("; free space for it, or name another directory\n")


def test_a_directory_in_the_place_of_the_database_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite3").mkdir()
    with pytest.raises(ConfigError, match="cannot be used: unable to open database file; "):
        Store(tmp_path)


def test_a_store_whose_directory_was_removed_is_closed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shutil.rmtree(tmp_path)
    store.close()


def test_storage_that_fails_at_its_end_is_closed_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        storage = await Storage.open(tmp_path, StorageLimits())
        await storage.call(Store.close)  # so that the next one fails
        await storage.close()

    asyncio.run(run())
    assert "the database of files and batches was not closed properly" in caplog.text


def test_closing_is_given_up_while_the_disk_hangs(tmp_path: Path) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(store: Store) -> None:
        hangs.set()
        goes_on.wait()

    async def run() -> None:
        storage = await Storage.open(tmp_path, StorageLimits())
        hanging = asyncio.create_task(storage.call(hang))
        await asyncio.to_thread(hangs.wait)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await storage.close()
        goes_on.set()
        await hanging

    asyncio.run(run())
