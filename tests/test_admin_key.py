"""The generated key of `/admin`: for this user and this machine alone, and gone with its node."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from swiftkv.admin_key import find_admin_key, generated_admin_key
from swiftkv.errors import ConfigError

PORT = 65535
URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that keys are in."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "swiftkv"


def test_a_key_is_found_by_its_port_while_the_node_lives(runtime: Path) -> None:
    assert find_admin_key(URL) is None
    with generated_admin_key(PORT) as (key, file), generated_admin_key(PORT - 1) as (other, _):
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert len(key) >= 32
        assert key != other
        assert {path.name for path in runtime.iterdir()} == {f"{PORT}.key", f"{PORT - 1}.key"}
        for host in ("127.0.0.1", "localhost", "[::1]"):
            assert find_admin_key(f"http://{host}:{PORT}/") == key
        for url in (
            f"http://example.org:{PORT}",
            f"http://10.0.0.1:{PORT}",
            "http://localhost",
            "http://[",
            "localhost",
        ):
            assert find_admin_key(url) is None
    assert find_admin_key(URL) is None
    assert not list(runtime.iterdir())


def test_a_client_without_the_nodes_environment_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with generated_admin_key(PORT) as (key, _):
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
        monkeypatch.setenv("TMPDIR", "/nowhere/else")
        assert find_admin_key(URL) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_touch_is_not_believed(mode: int) -> None:
    with generated_admin_key(PORT) as (_, file):
        file.chmod(mode)
        assert find_admin_key(URL) is None


def test_a_directory_that_others_may_touch_is_not_used(runtime: Path) -> None:
    with generated_admin_key(PORT) as (_, file):
        file.parent.chmod(0o755)
        assert find_admin_key(URL) is None
    runtime.mkdir(exist_ok=True)
    runtime.chmod(0o777)
    with generated_admin_key(PORT) as (key, file):  # the next place will do
        assert file.parent != runtime
        assert find_admin_key(URL) == key


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    with generated_admin_key(PORT) as (_, file):
        link = file.with_name(f"{PORT - 1}.key")
        link.symlink_to(secret)
        assert find_admin_key(f"http://localhost:{PORT - 1}") is None
        link.unlink()


def test_the_file_of_a_node_that_was_killed_is_replaced(runtime: Path) -> None:
    code = (
        "from swiftkv.admin_key import generated_admin_key\n"
        f"with generated_admin_key({PORT}) as (key, _):\n    print(key, flush=True)\n    input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        key = node.stdout.readline().decode().strip()
        assert find_admin_key(URL) == key
        with pytest.raises(ConfigError, match=r"^node\.port: another node of this user has port 65535"):
            generated_admin_key(PORT).__enter__()
        assert find_admin_key(URL) == key
        node.send_signal(signal.SIGKILL)
    with generated_admin_key(PORT) as (new, _):
        assert find_admin_key(URL) == new != key
    assert not list(runtime.iterdir())


def test_nodes_that_start_at_the_same_moment_keep_their_keys(runtime: Path) -> None:
    """Each removes what killed nodes have left, also at the ports of the others."""
    ports = [PORT, PORT - 1, PORT - 2]
    together = threading.Barrier(len(ports))
    runtime.mkdir(mode=0o700)
    with ThreadPoolExecutor(len(ports)) as threads:
        for _ in range(100):
            for port in ports:
                (runtime / f"{port}.key").touch(mode=0o600)
            with ExitStack() as nodes:

                def start(port: int, nodes: ExitStack = nodes) -> str:
                    together.wait(60)
                    key, _ = nodes.enter_context(generated_admin_key(port))
                    return key

                keys = list(threads.map(start, ports))
                assert [find_admin_key(f"http://localhost:{port}") for port in ports] == keys


def test_a_key_that_cannot_be_written_is_a_mistake_with_a_cure() -> None:
    """No file of this process may have a byte, as on a disk that is full."""
    code = (
        "import resource\nfrom swiftkv.admin_key import generated_admin_key\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\ngenerated_admin_key({PORT}).__enter__()"
    )
    ended = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    message = ended.stderr.splitlines()[-1]
    assert message.startswith(
        "swiftkv.errors.ConfigError: node.admin_key_env: the admin key cannot be written to a file ("
    )
    assert "File too large" in message
    assert message.endswith("name its variable in node.admin_key_env")
    with generated_admin_key(PORT) as (_, file):  # nothing is left in the way
        assert [path.name for path in file.parent.iterdir()] == [file.name]
