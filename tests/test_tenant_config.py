"""The `node.tenants` section: what it means, and one clear line for each mistake in it."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv.config import Config, parse_config
from swiftkv.errors import ConfigError
from swiftkv.fleet import engine_environment

KEYS = {"KEY_A": "a" * 16, "KEY_B": "b" * 16, "KEY_ADMIN": "c" * 16}
A = {"name": "a", "api_key_env": "KEY_A"}
B = {"name": "b", "api_key_env": "KEY_B", "weight": 3, "max_service_tier": "flex", "cache": "shared"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


def config(tenants: list[Any], **node: object) -> Config:
    return parse_config({"node": {"tenants": tenants, **node}, "models": [{"name": "a", "path": "b"}]})


def test_tenants_are_found_by_their_keys() -> None:
    node = config([A, B]).node
    tenants = node.tenant_keys()
    assert [(key, tenant.name) for key, tenant in tenants.items()] == [("a" * 16, "a"), ("b" * 16, "b")]
    first, second = tenants.values()
    assert (first.weight, first.max_service_tier, first.cache) == (1.0, None, "private")
    assert (second.weight, second.max_service_tier, second.cache) == (3.0, "flex", "shared")
    assert config([]).node.tenant_keys() == {}


def test_tenants_keys_are_keys_of_the_node() -> None:
    with_tenants = config([A], host="0.0.0.0")
    with_tenants.node.check_access()
    assert config([A]).node.checked_hosts is None
    environment = engine_environment(with_tenants)
    assert "KEY_A" not in environment
    assert "KEY_B" in environment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": 0}, r"node\.tenants\[0\]\.weight: 0 is not a number from 0\.01 to 100"),
        ({"weight": float("nan")}, r"node\.tenants\[0\]\.weight: nan is not a number from 0\.01 to 100"),
        ({"weight": "much"}, r"node\.tenants\[0\]\.weight: 'much' is not a number from 0\.01 to 100"),
        ({"max_service_tier": "gold"}, r"max_service_tier: 'gold' is not priority, default, flex, batch or null"),
        ({"cache": "none"}, r"node\.tenants\[0\]\.cache: 'none' is not private or shared"),
        ({"name": "a\tb"}, r"node\.tenants\[0\]\.name: .* is not a name of letters, digits"),
        ({"api_key_env": "sk-123"}, r"api_key_env: 'sk-123' is not the name of an environment variable$"),
        ({"api_key": "k"}, r"node\.tenants\[0\]\.api_key: unknown key; did you mean api_key_env\?"),
    ],
)
def test_each_mistake_names_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config([{**A, **changes}])


def test_what_is_missing_and_what_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"^node\.tenants\[0\]\.api_key_env: missing; write the name of an env"):
        config([{"name": "a"}])
    with pytest.raises(ConfigError, match=r"^node\.tenants\[0\]: 'a' is not a mapping with the keys of a tenant$"):
        config(["a"])


@pytest.mark.parametrize(
    ("tenants", "node", "message"),
    [
        ([A, {**B, "name": "a"}], {}, r"node\.tenants\[1\]\.name: 'a' is taken by node\.tenants\[0\]\.name"),
        (
            [A, {**B, "api_key_env": "KEY_A"}],
            {},
            r"tenants\[1\]\.api_key_env: 'KEY_A' is taken by node\.tenants\[0\]",
        ),
        ([A], {"api_key_env": "KEY_B"}, r"node\.api_key_env: a node with tenants takes their keys only"),
        (
            [{**A, "name": f"t{i}", "api_key_env": f"K{i}"} for i in range(65)],
            {},
            r"tenants: 65 are more than 64",
        ),
    ],
)
def test_tenants_that_do_not_go_together(tenants: list[Any], node: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tenants, **node)


def test_every_key_must_be_there_and_another(monkeypatch: pytest.MonkeyPatch) -> None:
    node = config([A, B]).node
    monkeypatch.setenv("KEY_B", KEYS["KEY_A"])
    with pytest.raises(ConfigError, match=r"^node\.tenants\[1\]\.api_key_env: KEY_B holds the same key as KEY_A; give"):
        node.check_access()
    monkeypatch.setenv("KEY_B", "short")
    with pytest.raises(ConfigError, match=r"^node\.tenants\[1\]\.api_key_env: the key in KEY_B has 5 characters"):
        node.check_access()
    monkeypatch.delenv("KEY_B")
    with pytest.raises(ConfigError, match=r"tenants\[1\]\.api_key_env: the .* KEY_B is not set; export KEY_B=… first$"):
        node.check_access()


def test_no_tenants_key_opens_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    node = config([A, B], admin_key_env="KEY_ADMIN").node
    assert node.admin_key() == KEYS["KEY_ADMIN"]
    monkeypatch.setenv("KEY_ADMIN", KEYS["KEY_B"])
    with pytest.raises(ConfigError, match=r"^node\.admin_key_env: KEY_ADMIN holds the same key as KEY_B"):
        node.admin_key()
