"""The restarts of an engine that died: how often they come, and how soon."""

from __future__ import annotations

import pytest

from swiftkv.node_config import RestartConfig
from swiftkv.restarts import Restarts


def restarts(limit: int = 5, window: str = "10m", backoff: str = "1s") -> Restarts:
    return Restarts(RestartConfig.model_validate({"limit": limit, "window": window, "backoff": backoff}))


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    history = restarts(limit=2000)
    delays_s = [history.next_delay_s(float(i) / 100) for i in range(2000)]
    assert delays_s == [1, 2, 4, 8, 16, *[30] * 1995]


@pytest.mark.parametrize("backoff", ["30s", "1m"])
def test_a_long_delay_stays_as_it_is(backoff: str) -> None:
    history = restarts(backoff=backoff)
    first_s = history.next_delay_s(0)
    assert first_s == {"30s": 30, "1m": 60}[backoff]
    assert [history.next_delay_s(1), history.next_delay_s(2)] == [first_s, first_s]


def test_no_more_restarts_than_the_limit_until_one_leaves_the_window() -> None:
    history = restarts(limit=2, window="10s")
    assert [history.next_delay_s(now_s) for now_s in (0, 4, 5)] == [1, 2, None]
    assert len(history) == 2
    assert history.next_delay_s(11) == 2  # the second is still in the window
    assert history.next_delay_s(11) is None


def test_an_engine_that_is_started_by_hand_begins_anew() -> None:
    history = restarts(limit=1)
    assert history.next_delay_s(0) == 1
    assert history.next_delay_s(1) is None
    history.forget()
    assert history.next_delay_s(2) == 1
