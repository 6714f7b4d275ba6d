"""Tenants and flows: the client on whose behalf a request comes, and the share of an engine that it takes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

from swiftkv.policies import ServiceTier

if TYPE_CHECKING:
    from swiftkv.tenant_config import TenantConfig

_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")  # llm-d's name, and its older
_NUM_FAIRNESS_FLOWS = 64


@dataclass(frozen=True, slots=True)
class Sender:
    """The origin of a request.

    Attributes:
        flow: The flow whose share of an engine it takes.
        weight: How large that share is beside others'.
        name: The name of the tenant; `None` where there are no tenants.
        part: Its part of the sum of all tenants' weights; 1 where there are no tenants.
        max_tier: The highest service tier that it gets; `None`: what the node allows.
        is_private: Whether it shares no cached prefixes with other tenants.
    """

    flow: int = 0
    weight: float = 1.0
    name: str | None = None
    part: float = 1.0
    max_tier: ServiceTier | None = None
    is_private: bool = False

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt of a request. No `cache_salt` from a client makes it equal to another tenant's.

        Names have no NUL, so the first NUL ends the part that the node wrote.
        """
        given = cache_salt or ""
        if self.name is None or not (self.is_private or given):
            return given
        return f"tenant {self.name}\0{given}" if self.is_private else f"shared\0{given}"


ANYBODY = Sender()


def senders_by_key(tenants: Mapping[str, TenantConfig]) -> dict[str, Sender]:
    """Return senders by key; `tenants` are all tenants of the node, by key."""
    total = sum(tenant.weight for tenant in tenants.values())
    return {
        key: Sender(
            flow=number,
            weight=tenant.weight,
            name=tenant.name,
            part=tenant.weight / total,
            max_tier=tenant.max_service_tier,
            is_private=tenant.cache == "private",
        )
        for number, (key, tenant) in enumerate(tenants.items())
    }


def sender_of(request: Request) -> Sender:
    """Return the tenant whose key a request has; where there are no tenants, the flow that a header names."""
    known: Sender = getattr(request.state, "sender", ANYBODY)
    return named_flow(request.headers) if known.name is None else known


def named_flow(headers: Mapping[str, str]) -> Sender:
    """Return the flow that a fairness id names, one of a fixed number: two ids may share a flow."""
    for name in _FAIRNESS_HEADERS:
        if fairness_id := headers.get(name):
            return Sender(flow=1 + zlib.crc32(fairness_id.encode("latin-1")) % _NUM_FAIRNESS_FLOWS)
    return ANYBODY
