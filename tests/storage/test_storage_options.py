"""Options inline and from files; every mistake names its key and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftkv.errors import ConfigError
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import FileOptions, RedisOptions, parse_storage
from tests.support.storage import FINGERPRINT

SIZE = "a size such as 256MiB or 1GiB (1.074 GB), or a number of bytes"
FILE = {"path": "cache", "size": "1GiB"}

BACKENDS = "file, redis, mooncake, dynamic, dynamic_sglang, fault"
MISTAKES: list[tuple[object, str]] = [
    (None, f"tiers.storage: null is not a mapping with the key backend ({BACKENDS})"),
    ({"backend": "disk"}, f"tiers.storage.backend: 'disk' is not one of {BACKENDS}"),
    (
        {"backend": "file", "size": "1GiB"},
        "tiers.storage.path: missing; write a directory; it is made if it is not there",
    ),
    ({"path": "x"}, f"tiers.storage.size: missing; write {SIZE}"),
    (FILE | {"size": "1GB"}, f"tiers.storage.size: '1GB' is not {SIZE}"),
    (FILE | {"size": 0}, f"tiers.storage.size: 0 is not {SIZE}"),
    (FILE | {"fsnyc": "batch"}, "tiers.storage.fsnyc: unknown key; did you mean fsync?"),
    (FILE | {"fsync": "always"}, "tiers.storage.fsync: 'always' is not none or batch"),
    (FILE | {"max_calls": 0}, "tiers.storage.max_calls: 0 is not an integer from 1 to 64"),
    ({"backend": "redis", "url": "localhost"}, "tiers.storage.url: 'localhost' is not redis://HOST:PORT/DB"),
    (
        {"backend": "mooncake", "master_server_address": "somewhere"},
        "tiers.storage.master_server_address: 'somewhere' is not HOST:PORT of a mooncake_master",
    ),
    ({"backend": "dynamic", "module_path": "a b", "class_name": "C"}, "tiers.storage.module_path: 'a b' is not a mod"),
    (
        {"backend": "fault", "inner": FILE, "flip": 2},
        "tiers.storage.flip: 2 is not a share of calls from 0.0 to 1.0",
    ),
    ({"backend": "fault", "inner": {"path": "x"}}, f"tiers.storage.inner.size: missing; write {SIZE}"),
    (FILE | {"config": 3}, "tiers.storage.config: 3 is not the path of a .json, .toml, .yaml or .yml file"),
    (FILE | {"config": "x.ini"}, "tiers.storage.config: x.ini is not the path of a .json, .toml, .yaml or .yml file"),
    (FILE | {"config": "gone.json"}, "tiers.storage.config: gone.json cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("raw", "message"), MISTAKES, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_mistake_is_told_with_its_key(raw: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_storage(raw, "tiers.storage", tmp_path)
    assert str(raised.value).startswith(message)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_storage({"sise": 3}, "storage", tmp_path)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == [
        "storage.path",
        "storage.size",
        "storage.sise",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("options.json", json.dumps({"backend": "redis", "url": "redis://h:1/0", "ttl": "2h"})),
        ("options.toml", 'backend = "redis"\nurl = "redis://h:1/0"\nttl = "2h"\n'),
        ("options.yaml", "backend: redis\nurl: redis://h:1/0\nttl: 2h\n"),
    ],
)
def test_options_from_a_file_and_inline_ones_win(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    options = parse_storage({"config": name, "url": "redis://other:2/0"}, "storage", tmp_path)
    assert isinstance(options, RedisOptions)
    assert (options.url, options.ttl) == ("redis://other:2/0", 7200.0)


@pytest.mark.parametrize(("name", "text"), [("o.json", "{"), ("o.toml", "a = "), ("o.yaml", "{"), ("o.yml", "- a")])
def test_a_file_that_cannot_be_understood_is_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"^storage\.config: {name} "):
        parse_storage({"config": name}, "storage", tmp_path)


def test_relative_paths_start_where_the_yaml_file_lies(tmp_path: Path) -> None:
    options = parse_storage(FILE, "storage", tmp_path)
    assert isinstance(options, FileOptions)
    assert options.directory == tmp_path / "cache"


def test_a_password_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="NO_PASSWORD is not set"):
        RedisOptions(url="redis://h/0", password_env="NO_PASSWORD").password()


@pytest.mark.parametrize(
    ("module_path", "class_name", "options", "message"),
    [
        ("tests.support.nothing", "Medium", {}, "module_path: tests.support.nothing cannot be imported"),
        ("tests.support.storage", "Nothing", {}, "class_name: tests.support.storage has no class Nothing"),
        ("tests.support.storage", "soon", {}, "class_name: tests.support.storage has no class soon"),
        ("pathlib", "Path", {}, "class_name: Path has no method read"),
        ("tests.support.storage", "MemoryMedium", {"x": 1}, "options: MemoryMedium does not take these"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(
    module_path: str, class_name: str, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    raw = {"backend": "dynamic", "module_path": module_path, "class_name": class_name, "options": options}
    with pytest.raises(ConfigError) as raised:
        open_backend(parse_storage(raw, "storage", tmp_path), FINGERPRINT)
    assert str(raised.value).startswith(message)
