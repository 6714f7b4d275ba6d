"""The mark of a node that is stopping: seen while its process lives, by those who start at the same port."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swiftkv.errors import ConfigError
from swiftkv.stopping import StoppingMark, wait_for_stopping

PORT = 65535
PATIENCE_S = 600.0


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that marks are in."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "swiftkv"


@contextmanager
def stopping_process(port: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has set the mark, and clears it when its standard input ends."""
    code = (
        "import sys\nfrom swiftkv.stopping import StoppingMark\n"
        f"with StoppingMark({port}) as mark:\n    mark.set()\n    print('set', flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        yield process
        process.kill()


def test_nobody_waits_before_a_node_stops_nor_after_it(runtime: Path) -> None:
    said: list[str] = []
    wait_for_stopping(PORT, PATIENCE_S, said.append)
    with StoppingMark(PORT) as mark:
        wait_for_stopping(PORT, PATIENCE_S, said.append)
        mark.set()
        mark.set()
        assert [file.name for file in runtime.iterdir()] == [f"{PORT}.stopping"]
        assert runtime.stat().st_mode & 0o777 == 0o700
        wait_for_stopping(PORT - 1, PATIENCE_S, said.append)
    wait_for_stopping(PORT, PATIENCE_S, said.append)
    assert not said
    assert not list(runtime.iterdir())


def test_a_node_is_waited_for_until_it_has_ended() -> None:
    said: list[str] = []
    has_said, has_ended = threading.Event(), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        has_said.set()

    def wait() -> None:
        wait_for_stopping(PORT, PATIENCE_S, say)
        has_ended.set()

    with stopping_process(PORT) as process:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert has_said.wait(PATIENCE_S)
        assert not has_ended.is_set()
        assert process.stdin is not None
        process.stdin.close()
        assert has_ended.wait(PATIENCE_S)
    assert said == [f"waiting up to 600 s for the node that had port {PORT} to stop"]


def test_who_waits_in_vain_is_told_for_which_process() -> None:
    with stopping_process(PORT) as process, pytest.raises(ConfigError) as caught:
        wait_for_stopping(PORT, 0.0, lambda text: None)
    assert str(caught.value).startswith(f"node.port: the node that had port {PORT} is still stopping after 0 s")
    assert f"process {process.pid} has ended" in str(caught.value)


def test_a_node_that_was_killed_is_not_waited_for(runtime: Path) -> None:
    with stopping_process(PORT) as process:
        process.kill()
        process.wait(PATIENCE_S)
        assert [file.name for file in runtime.iterdir()] == [f"{PORT}.stopping"]
        wait_for_stopping(PORT, PATIENCE_S, pytest.fail)
    assert not list(runtime.iterdir())


def test_a_node_at_any_free_port_has_no_mark(runtime: Path) -> None:
    with StoppingMark(0) as mark:
        mark.set()
        assert not runtime.exists()


def test_a_directory_that_others_may_touch_is_not_used(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    with StoppingMark(PORT - 2) as mark:
        mark.set()
        assert not list(runtime.iterdir())


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from swiftkv.output import detach_output\nfrom swiftkv.stopping import end_hanging_threads\n"
        "detach_output()\n"
        "with end_hanging_threads(0.1, print):\n"
        "    ThreadPoolExecutor(1).submit(threading.Event().wait)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    said = "a thread still ran 0.1 s after the end of the node, and was ended\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


def test_a_process_without_such_a_thread_ends_by_itself() -> None:
    code = "from swiftkv.stopping import end_hanging_threads\nwith end_hanging_threads(3600, print):\n    print('done')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
