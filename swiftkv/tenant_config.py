"""The `node.tenants` section of the YAML file: clients with keys of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from swiftkv.config_fields import Section, Variable
from swiftkv.policies import ServiceTier

MAX_TENANTS = 64


class TenantConfig(Section):
    """A client with a key, and its share of every engine."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=64,
        description="a name of letters, digits, '.', '_' and '-', at most 64 (the request log shows it)",
    )
    api_key_env: Variable = Field(description="the name of an environment variable")
    weight: Annotated[float, Field(ge=0.01, le=100)] = Field(1.0, description="a number from 0.01 to 100")
    max_service_tier: ServiceTier | None = Field(None, description="priority, default, flex, batch or null")
    cache: Literal["private", "shared"] = Field("private", description="private or shared")


def mistakes_about_tenants(tenants: Sequence[TenantConfig], api_key_env: str | None) -> Iterator[str]:
    """Yield the mistakes about the tenants of a node, which has no key of its own beside theirs."""
    if len(tenants) > MAX_TENANTS:
        yield f"node.tenants: {len(tenants)} are more than {MAX_TENANTS}; let some of them share a key"
    if tenants and api_key_env is not None:
        yield (
            "node.api_key_env: a node with tenants takes their keys only; drop this, or make it the api_key_env of a "
            "tenant"
        )
    seen: dict[str, str] = {}
    for i, tenant in enumerate(tenants):
        for option, value in (("name", tenant.name), ("api_key_env", tenant.api_key_env)):
            key = f"node.tenants[{i}].{option}"
            if taken_by := seen.get(f"{option} {value}"):
                yield f"{key}: '{value}' is taken by {taken_by}; give each its own"
            seen.setdefault(f"{option} {value}", key)
