"""The directory of what outlives a node."""

from __future__ import annotations

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftkv.config import Config, parse_config
from swiftkv.errors import ConfigError
from swiftkv.state import state_directory


def config(**node: object) -> Config:
    return parse_config({"node": node, "models": [{"name": "chat", "path": "somewhere"}]})


def test_the_default_is_named_by_the_port_and_goes_when_nothing_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with state_directory(config(port=8123)) as (directory, why_not):
        assert (directory, why_not) == (tmp_path / "swiftkv" / "8123", None)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with state_directory(config(port=8123)) as (second, why_not):
            assert second is None
            assert "another node uses" in (why_not or "")
    assert not directory.exists()
    with state_directory(config(port=8123)) as (directory, _):
        assert directory is not None
        (directory / "kept").touch()
    assert directory.exists()


def test_a_node_that_starts_while_another_ends_has_a_directory_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that ends removes the directory, for nothing is in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    same = config(port=8123)

    def start_and_end_often() -> set[str]:
        seen = set()
        for _ in range(300):
            with state_directory(same) as (directory, why_not):
                seen.add(why_not if directory is None else "there" if directory.exists() else "gone")
        return seen

    with ThreadPoolExecutor(3) as threads:
        seen = set.union(*(node.result() for node in [threads.submit(start_and_end_often) for _ in range(3)]))
    taken = f"node.state_dir: another node uses {tmp_path / 'swiftkv' / '8123'}; give each node its own"
    assert "there" in seen
    assert seen <= {"there", taken}


def test_a_directory_may_be_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with state_directory(config(state_dir=str(tmp_path / "link"))) as (directory, _):
        assert directory == tmp_path / "link"


def test_without_a_state_home_it_is_under_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    with state_directory(config(port=8123)) as (directory, _):
        assert directory == tmp_path / ".local" / "state" / "swiftkv" / "8123"


def test_a_node_on_any_free_port_keeps_nothing_unless_told_where(tmp_path: Path) -> None:
    with state_directory(config(port=0)) as (directory, why_not):
        assert (directory, why_not) == (None, None)
    with state_directory(config(port=0, state_dir=str(tmp_path / "a" / "b"))) as (directory, _):
        assert directory == tmp_path / "a" / "b"
    assert directory.exists()


def test_a_default_that_cannot_be_used_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        (tmp_path / "swiftkv").mkdir(exist_ok=True)
        (tmp_path / "swiftkv" / "8123").touch()
        with state_directory(config(port=8123)) as (directory, why_not):
            assert directory is None
            assert "cannot be used: Not a directory" in (why_not or "")


def test_a_directory_that_is_named_must_be_private_and_free(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700 it"), state_directory(config(state_dir=str(tmp_path))):
        pass
    tmp_path.chmod(0o700)
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another node uses"), state_directory(config(state_dir=str(tmp_path))):
        pass
    os.close(lock)
