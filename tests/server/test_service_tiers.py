"""Service tiers: which one serves, what the answer says, and what the engine is told."""

from __future__ import annotations

import pytest
from echo_gateway import Gateway

from swiftkv.policies import ServiceTier
from swiftkv.server.tiers import WantedTier, priority_in, tier_of

PROMPT = {"model": "chat", "prompt": "one two", "max_tokens": 2}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("wanted", "highest", "served"),
    [
        (None, "priority", "default"),
        ("auto", "priority", "default"),
        ("default", "default", "default"),
        ("priority", "priority", "priority"),
        ("priority", "default", "default"),
        ("flex", "default", "flex"),
        ("batch", "default", "batch"),
        (None, "flex", "flex"),
        ("priority", "flex", "flex"),
        ("batch", "flex", "batch"),
        ("auto", "batch", "batch"),
    ],
)
def test_which_tier_serves(wanted: WantedTier | None, highest: ServiceTier, served: ServiceTier) -> None:
    assert tier_of(wanted, highest) == served


def test_tiers_come_before_priorities() -> None:
    most, least = -(2**31) + 1, 2**31 - 1
    tiers: tuple[ServiceTier, ...] = ("priority", "default", "flex", "batch")
    order = [priority_in(tier, priority) for tier in tiers for priority in (most, 0, least)]
    assert order == sorted(set(order))
    assert priority_in("default", 7) == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
def test_the_answer_names_the_tier_that_served(
    gateway: Gateway, path: str, body: dict[str, object], stream: bool
) -> None:
    with gateway.http() as http:
        for wanted, served in (("flex", "flex"), ("auto", "default"), ("priority", "default")):
            answer = http.post(path, json={**body, "service_tier": wanted, "stream": stream})
            assert answer.status_code == 200
            assert f'"service_tier":"{served}"' in answer.text
        assert "service_tier" not in http.post(path, json={**body, "stream": stream}).text
        refused = http.post(path, json={**body, "service_tier": "gold"})
    assert refused.status_code == 400
    assert "service_tier" in refused.json()["error"]["message"]
