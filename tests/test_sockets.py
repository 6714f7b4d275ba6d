from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv.errors import ConfigError
from swiftkv.sockets import host_in_url, ipc_directory, listen_on


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of temporary files, by a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a b", "192.0.2.1"])
def test_an_address_of_another_machine_is_a_mistake_in_the_host(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^node.host: {host!r} is not an address of this machine: "):
        listen_on(host, 0, "node.port")


def test_addresses_stand_in_urls() -> None:
    assert [host_in_url(host) for host in ("127.0.0.1", "localhost", "::1")] == ["127.0.0.1", "localhost", "[::1]"]


def test_a_directory_for_sockets_that_cannot_be_made_is_the_users_to_mend(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    message = r"TMPDIR: cannot make a directory .* No such file .*; free space, or set TMPDIR"
    with pytest.raises(ConfigError, match=message), ipc_directory():
        pytest.fail("there is no directory")


def test_the_directory_of_a_node_that_was_killed_is_removed(temporary: Path) -> None:
    (temporary / "swiftkv-killed.ipc").mkdir()
    with ipc_directory() as first, ipc_directory() as second:
        assert sorted(temporary.iterdir()) == sorted([first, second])
        assert first.stat().st_mode & 0o777 == 0o700
    assert not list(temporary.iterdir())
