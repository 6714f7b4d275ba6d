"""The `kv_events_config` section: off unless enabled, mistakes named with their keys, nobody else let in unasked."""

from __future__ import annotations

import pytest

from swiftkv.config import Config, parse_config
from swiftkv.errors import ConfigError


def config(*events: dict[str, object], **node: object) -> Config:
    models = [{"name": f"m{i}", "path": "somewhere", "kv_events_config": of_model} for i, of_model in enumerate(events)]
    return parse_config({"node": node, "models": models})


def enabled(endpoint: str, **options: object) -> dict[str, object]:
    return {"enable_kv_cache_events": True, "endpoint": endpoint, **options}


def test_events_are_off_unless_they_are_enabled() -> None:
    assert not config({}).models[0].kv_events_config.enable_kv_cache_events
    assert config({"endpoint": "tcp://*:5557"}).models[0].kv_events_config.endpoints == {}


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:1", "ipc:///run/kv-events"])
def test_an_address_of_this_machine_is_taken(endpoint: str) -> None:
    assert config(enabled(endpoint)).models[0].kv_events_config.endpoints == {"endpoint": endpoint}


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_address_that_others_reach_is_taken_only_where_everybody_is_let_in(endpoint: str, key: str) -> None:
    events = {**enabled("ipc:///run/a"), key: endpoint}
    with pytest.raises(ConfigError, match=rf"models\[0\]\.kv_events_config\.{key}: .*allow_unauthenticated"):
        config(events)
    config(events, allow_unauthenticated=True)


@pytest.mark.parametrize(
    ("events", "mistake"),
    [
        (enabled("127.0.0.1:5557"), "endpoint: '127.0.0.1:5557' is not a ZeroMQ address such as"),
        (enabled("tcp://127.0.0.1"), "endpoint: 'tcp://127.0.0.1' is not a ZeroMQ address such as"),
        (enabled("tcp://127.0.0.1:99999"), "endpoint: 'tcp://127.0.0.1:99999' is not a ZeroMQ address such as"),
        (enabled("ipc:///a", publisher="kafka"), "publisher: 'kafka' is not zmq"),
        (enabled("ipc:///a", encoding="json"), "encoding: 'json' is not map or array"),
        (enabled("ipc:///a", buffer_steps=0), "buffer_steps: 0 is not an integer of at least 1"),
        (enabled("ipc:///a", replay_endpoint="ipc:///a"), "replay_endpoint: ipc:///a is taken by"),
    ],
)
def test_a_mistake_is_told_with_its_key(events: dict[str, object], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(events)
    assert f"models[0].kv_events_config.{mistake}" in str(caught.value)


def test_two_models_do_not_share_an_address() -> None:
    with pytest.raises(ConfigError, match=r"models\[1\]\.kv_events_config\.endpoint: .* is taken by models\[0\]"):
        config(enabled("ipc:///a"), enabled("ipc:///a"))
