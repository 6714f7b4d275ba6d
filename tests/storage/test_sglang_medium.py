"""Classes written for SGLang's `HiCacheStorage`, run unchanged. They are ours: SGLang itself is not installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Status
from tests.support.storage import check_got, key_of, opened, put

KEYS = [key_of(i) for i in range(8)]


def options(directory: Path, class_name: str = "DirectoryStorage") -> dict[str, object]:
    return {
        "backend": "dynamic_sglang",
        "module_path": "tests.support.sglang_backends",
        "class_name": class_name,
        "model_name": "tiny",
        "extra_config": {"directory": str(directory)},
    }


def test_keys_and_rank_reach_the_backend_as_sglang_gives_them(tmp_path: Path) -> None:
    with opened(options(tmp_path)) as backend:
        put(backend, KEYS[:1])
    assert (tmp_path / f"{KEYS[0].hex()}_tiny_0_1.bin").exists()


def test_a_class_whose_second_argument_is_its_own_keeps_its_default(tmp_path: Path) -> None:
    with opened(options(tmp_path, "PositionalStorage")) as backend:
        assert put(backend, KEYS) == [Status.OK] * len(KEYS)
        assert check_got(backend, KEYS) == [Status.OK] * len(KEYS)


def test_a_page_that_changed_is_not_read_again(tmp_path: Path) -> None:
    """The interface cannot remove it."""
    with opened(options(tmp_path)) as backend:
        put(backend, KEYS[:1])
        page = tmp_path / f"{KEYS[0].hex()}_tiny_0_1.bin"
        data = bytearray(page.read_bytes())
        data[-1] ^= 1
        page.write_bytes(data)
        assert check_got(backend, KEYS[:1]) == [Status.CORRUPT]
        assert check_got(backend, KEYS[:1]) == [Status.MISSING]


def test_a_backend_without_calls_for_single_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not return what set stored"):
        opened(options(tmp_path, "ZeroCopyOnly")).__enter__()


def test_a_backend_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    raw = options(tmp_path) | {"extra_config": {}}
    with pytest.raises(ConfigError, match=r"extra_config: DirectoryStorage cannot be made"):
        opened(raw).__enter__()
