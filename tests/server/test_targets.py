"""Targets in headers: what they mean, and what is refused."""

from __future__ import annotations

import pytest
from echo_gateway import Gateway

from swiftkv.server.errors import ApiError
from swiftkv.server.targets import target_ttft_s

BODY = {"model": "chat", "prompt": "one two", "max_tokens": 2}


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({}, None),
        ({"x-llm-d-slo-ttft-ms": "500"}, 0.5),
        ({"x-slo-ttft-ms": "1500.5"}, 1.5005),
        ({"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "250"}, 0.25),
    ],
)
def test_when_the_first_token_is_wanted(headers: dict[str, str], expected_s: float | None) -> None:
    assert target_ttft_s(headers) == expected_s


@pytest.mark.parametrize("text", ["-1", "0", "soon", "", "nan", "inf", "1_000", "1e3", "+5", " 5", "9" * 400])
def test_a_target_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match=r"header x-slo-ttft-ms: .* is not a number of milliseconds above 0") as caught:
        target_ttft_s({"x-slo-ttft-ms": text})
    assert caught.value.status == 400


def test_requests_with_a_target_are_answered(gateway: Gateway) -> None:
    with gateway.http() as http:
        answered = http.post("/v1/completions", json=BODY, headers={"x-llm-d-slo-ttft-ms": "500"})
        refused = http.post("/v1/completions", json=BODY, headers={"x-llm-d-slo-ttft-ms": "soon"})
    assert answered.status_code == 200
    assert refused.status_code == 400
    assert "'soon' is not a number" in refused.json()["error"]["message"]
