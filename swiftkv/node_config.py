"""The `node` section of the YAML file: the process that owns the ports, its keys, and what all models share."""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from swiftkv.config_fields import (
    DURATION,
    LIMIT,
    PORT,
    POSITIVE,
    SIZE,
    VARIABLE,
    Duration,
    Limit,
    Port,
    Positive,
    Section,
    Size,
    Variable,
)
from swiftkv.errors import ConfigError
from swiftkv.policies import IoBackend, LogLevel
from swiftkv.tenant_config import TenantConfig
from swiftkv.tier_config import TiersConfig

_MIN_KEY_LENGTH = 16


class RestartConfig(Section):
    """The bounds within which an engine that died is started again."""

    limit: Annotated[int, Field(ge=0)] = Field(5, description="a number of restarts within the window, at least 0")
    window: Duration = Field(600.0, description=DURATION)
    backoff: Duration = Field(1.0, description=f"{DURATION}; it doubles with every restart in the window, up to 30 s")


def _read_switch(value: object) -> object:
    """Return a boolean for `on` and `off`; PyYAML does so itself unless they are quoted."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _read_node_lending(value: object) -> object:
    """Read `lending: off` as short for `lending: {enabled: off}`."""
    switch = _read_switch(value)
    return {"enabled": switch} if isinstance(switch, bool) else value


class NodeLendingConfig(Section):
    """Lending between the models of this node; each worker's own section says what it lends."""

    enabled: Annotated[bool, BeforeValidator(_read_switch)] = Field(True, description="on or off")
    transport: Literal["auto", "shm", "peer", "p2p"] = Field("auto", description="auto, shm, peer or p2p")
    io_backend: IoBackend = Field("kernel", description="kernel or direct")
    stream_buffers: Literal[1, 2] = Field(2, description="1 or 2")
    max_programs: Positive | None = Field(None, description=POSITIVE)
    max_wait: Duration = Field(30.0, description=DURATION)


class BatchesConfig(Section):
    """The files and batches that a node keeps in its `state_dir`, and how much of a model they may take."""

    max_file: Size = Field(200 << 20, description=SIZE)
    max_requests: Positive = Field(50_000, description=POSITIVE)
    max_storage: Size = Field(10 << 30, description=SIZE)
    max_in_flight: Positive | None = Field(None, description=POSITIVE)


class OtlpConfig(Section):
    """The collector that traces of requests are sent to."""

    endpoint: str = Field(pattern=r"^https?://[^/]+/.+", description="a URL such as http://localhost:4318/v1/traces")


class NodeConfig(Section):
    """The process that owns the ports."""

    host: str = Field("127.0.0.1", min_length=1, description="an address to listen on, such as 127.0.0.1 or 0.0.0.0")
    port: Port = Field(8000, description=PORT)
    api_key_env: Variable | None = Field(None, description=VARIABLE)
    admin_key_env: Variable | None = Field(None, description=VARIABLE)
    tenants: Annotated[tuple[TenantConfig, ...], Field(strict=False)] = Field(
        (), description="a list of mappings with name and api_key_env"
    )
    shutdown_timeout: Duration = Field(30.0, description=DURATION)
    allow_unauthenticated: bool = Field(False, description="true or false")
    protect_metrics: bool = Field(False, description="true or false")
    allowed_hosts: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="a list of host names without ports"
    )
    max_connections: Positive = Field(4096, description=POSITIVE)
    max_body: Size = Field(16 << 20, description=SIZE)
    max_bodies: Size = Field(128 << 20, description=SIZE)
    watchdog: Limit = Field(120.0, description=LIMIT)
    load_timeout: Limit = Field(600.0, description=LIMIT)
    show_cached_tokens: Literal["always", "salted", "never"] = Field("always", description="always, salted or never")
    allow_priority: bool = Field(False, description="true or false")
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    request_log: str | None = Field(None, min_length=1, description="a file to append to, or null")
    otlp: OtlpConfig | None = Field(None, description="a mapping")
    state_dir: str | None = Field(None, min_length=1, description="a directory, or null")
    batches: BatchesConfig = Field(default_factory=BatchesConfig, description="a mapping")
    restart: RestartConfig = Field(default_factory=RestartConfig, description="a mapping")
    lending: Annotated[NodeLendingConfig, BeforeValidator(_read_node_lending)] = Field(
        default_factory=NodeLendingConfig, description="on, off or a mapping"
    )
    tiers: TiersConfig = Field(default_factory=TiersConfig, description="a mapping")

    def api_key(self) -> str | None:
        """Return the key of the OpenAI routes, from the environment.

        Raises `ConfigError` if it is named but not set, or too short.
        """
        return _key_in("api_key_env", self.api_key_env)

    def admin_key(self) -> str | None:
        """Return the configured key of `/admin`.

        Raises `ConfigError` if it is named but not set, too short, or also a key of the OpenAI routes.
        """
        key = _key_in("admin_key_env", self.admin_key_env)
        others = {self.api_key(): self.api_key_env}
        others |= {other: tenant.api_key_env for other, tenant in self.tenant_keys().items()}
        if key is not None and key in others:
            raise ConfigError(
                f"node.admin_key_env: {self.admin_key_env} holds the same key as {others[key]}, which must not "
                "open /admin; set another"
            )
        return key

    @property
    def key_variables(self) -> tuple[str, ...]:
        """The environment variables that hold the keys of the OpenAI routes."""
        own = () if self.api_key_env is None else (self.api_key_env,)
        return (*own, *(tenant.api_key_env for tenant in self.tenants))

    def tenant_keys(self) -> dict[str, TenantConfig]:
        """Return the tenants by their keys, which are in the environment.

        Raises `ConfigError` for a key that is not set, too short, or another tenant's.
        """
        tenants: dict[str, TenantConfig] = {}
        for i, tenant in enumerate(self.tenants):
            option = f"tenants[{i}].api_key_env"
            key = _key_in(option, tenant.api_key_env)
            assert key is not None
            if key in tenants:
                raise ConfigError(
                    f"node.{option}: {tenant.api_key_env} holds the same key as {tenants[key].api_key_env}; give each "
                    "tenant its own"
                )
            tenants[key] = tenant
        return tenants

    def check_access(self) -> None:
        """Raise `ConfigError` if a key is not right, or if other machines can reach the node and it has no key."""
        self.admin_key()
        if not self.key_variables and not self.is_loopback and not self.allow_unauthenticated:
            raise ConfigError(
                f"node.host: {self.host} can be reached from other machines, and the node has no API key; name the "
                "environment variable that holds one in node.api_key_env, or let everybody in with "
                "node.allow_unauthenticated: true (swiftkv serve --allow-unauthenticated)"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the node."""
        return is_loopback(self.host)

    @property
    def checked_hosts(self) -> tuple[str, ...] | None:
        """The host names, beside this machine's own, that requests may be sent to; `None` allows any.

        A browser that is misled about a name sends no key, so a node with keys allows any name.
        """
        is_keyless = not self.key_variables and self.is_loopback
        return self.allowed_hosts if is_keyless or self.allowed_hosts else None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine and cannot be reached from others."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key_in(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"node.{option}: the environment variable {variable} is not set; "
            f"export {variable}=… first{'' if option.startswith('tenants') else ', or write null for no key'}"
        )
    if len(key) < _MIN_KEY_LENGTH:
        raise ConfigError(
            f"node.{option}: the key in {variable} has {len(key)} characters, which can be guessed; it must have at "
            f"least {_MIN_KEY_LENGTH}, for example from: openssl rand -hex 16"
        )
    return key
