"""Models of the hub, fetched over HTTP from a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from swiftkv.errors import CheckpointError
from swiftkv.hub import Checkpoint, locate_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "llama"}'}
FETCH = """
import json, sys
from pathlib import Path
from swiftkv.hub import locate_checkpoint
checkpoint = locate_checkpoint("somebody/model", Path.cwd(), False, json.loads(sys.argv[1]))
print(json.dumps([str(checkpoint.directory), checkpoint.public_name]))
"""


class Hub(BaseHTTPRequestHandler):
    """Serve as much of the hub's API as downloading a snapshot needs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        content = FILES.get(name, b"")
        if "/tree/" in self.path:
            files = [{"type": "file", "path": f, "size": len(c), "oid": f} for f, c in FILES.items()]
            content = json.dumps(files).encode()
        elif not content:
            about = {"id": "somebody/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            content = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("revision", "asked"), [("v1.5", {"v1.5"}), (COMMIT, set()), (None, {"main"})])
def test_a_revision_is_what_the_hub_is_asked_for(
    hub: ThreadingHTTPServer, tmp_path: Path, revision: str | None, asked: set[str]
) -> None:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    environment["no_proxy"] = "127.0.0.1"  # a proxy that the environment names does not reach this hub
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", FETCH, json.dumps(revision)]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    directory, public_name = json.loads(ended.stdout)
    assert public_name == "somebody/model"
    assert Path(directory).name == COMMIT
    assert (Path(directory) / "config.json").read_bytes() == FILES["config.json"]
    names = {path.partition("/revision/")[2] for path in Hub.asked if "/revision/" in path}
    assert names - {COMMIT} == asked  # a commit need not be looked up


def test_a_directory_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes(FILES["config.json"])
    assert locate_checkpoint("tiny", tmp_path, False) == Checkpoint(tmp_path / "tiny", "tiny")
    with pytest.raises(CheckpointError, match=r"tiny is a directory, and only models of the hub have revisions; drop"):
        locate_checkpoint("tiny", tmp_path, False, "main")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/" + "a" * 300, "^/a+ cannot be read: File name too long; name a directory that this user can read"),
        ("~nobody-of-this-name/x", "^'~nobody-of-this-name/x' is neither a directory in .* nor a hub id"),
    ],
)
def test_a_directory_that_cannot_be_read_is_a_mistake(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        locate_checkpoint(path, tmp_path, False)


def test_a_model_is_found_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes(FILES["config.json"])
    gone = tmp_path / "here"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert locate_checkpoint("tiny", tmp_path, False) == Checkpoint(tmp_path / "tiny", "tiny")
