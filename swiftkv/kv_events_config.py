"""The `kv_events_config` section of a model, with vLLM's keys: where routers get the events of its prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from swiftkv.config_fields import POSITIVE, Positive, Section

_ENDPOINT = "a ZeroMQ address such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/kv-events"


def _check_port(endpoint: str) -> str:
    """Raise `ValueError` for a port above 65535: ZeroMQ would listen on another one."""
    if endpoint.startswith("tcp:"):
        _ = urlsplit(endpoint).port
    return endpoint


Endpoint = Annotated[str, Field(pattern=r"^(tcp://[^/\s]+:\d{1,5}|ipc:///\S+)$"), AfterValidator(_check_port)]


class KVEventsConfig(Section):
    """KV events of one model: off unless they are enabled."""

    enable_kv_cache_events: bool = Field(False, description="true or false")
    publisher: Literal["zmq"] = Field("zmq", description="zmq")
    endpoint: Endpoint = Field("tcp://127.0.0.1:5557", description=_ENDPOINT)
    replay_endpoint: Endpoint | None = Field(None, description=f"{_ENDPOINT}, or null")
    buffer_steps: Positive = Field(10_000, description=POSITIVE)
    hwm: Positive = Field(100_000, description=POSITIVE)
    max_queue_size: Positive = Field(100_000, description=POSITIVE)
    topic: str = Field("", description="a text")
    encoding: Literal["map", "array"] = Field("map", description="map or array")

    @property
    def endpoints(self) -> dict[str, str]:
        """The addresses that are bound, by their keys; none if events are off."""
        if not self.enable_kv_cache_events:
            return {}
        named = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        return {key: address for key, address in named.items() if address is not None}


def host_of(endpoint: str) -> str | None:
    """Return the host that a TCP endpoint listens on; `None` for a socket in a directory of this machine."""
    return urlsplit(endpoint).hostname if endpoint.startswith("tcp:") else None
