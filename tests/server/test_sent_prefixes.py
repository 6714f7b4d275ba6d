"""A gateway remembers prompts, to know what an engine will have in its cache."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from swiftkv.server.sent_prefixes import Found, SentPrefixes

REQUEST_IDS = count(1000)


def prompt(*lengths: int, first: int = 0) -> bytes:
    """Parts of one token each, so that prompts begin alike as far as the same parts do."""
    return np.repeat(np.arange(first, first + len(lengths)), lengths).astype("<i4").tobytes()


def found(prefixes: SentPrefixes, tokens: bytes, salt: str = "") -> Found:
    return prefixes.find(prefixes.pieces(tokens, salt))


def cached(prefixes: SentPrefixes, tokens: bytes, salt: str = "") -> int:
    return found(prefixes, tokens, salt).num_cached


def begin(prefixes: SentPrefixes, tokens: bytes) -> None:
    """Send a prompt that the engine begins with at once."""
    request_id = next(REQUEST_IDS)
    prefixes.send(request_id, prefixes.pieces(tokens, ""))
    prefixes.begin(request_id)


def with_room(max_tokens: int, *prompts: bytes) -> SentPrefixes:
    prefixes = SentPrefixes()
    prefixes.max_tokens = max_tokens
    for tokens in prompts:
        begin(prefixes, tokens)
    return prefixes


def test_the_common_beginning_is_known_in_whole_pieces() -> None:
    prefixes = with_room(10_000, prompt(200, 300))
    assert cached(prefixes, prompt(200, 300)) == 496
    assert cached(prefixes, prompt(200, 100)) == 288
    assert cached(prefixes, prompt(100, 400)) == 96
    assert cached(prefixes, prompt(500, first=7)) == 0


def test_nothing_is_known_under_another_salt_or_after_a_restart() -> None:
    prefixes = with_room(10_000, prompt(500))
    prefixes.send(1, prefixes.pieces(prompt(500, 100), ""))
    assert found(prefixes, prompt(500, 100), "mine") == Found()
    prefixes.clear()
    assert found(prefixes, prompt(500, 100)) == Found()
    assert prefixes.begin(1) == {}
    assert found(prefixes, prompt(500, 100)) == Found()


def test_the_latest_prompts_are_remembered_as_far_as_there_is_room() -> None:
    first, second, third = (prompt(640, first=i) for i in range(3))
    prefixes = with_room(1280, first, second, first, third)
    assert [cached(prefixes, tokens) for tokens in (first, second, third)] == [640, 0, 640]
    begin(prefixes, prompt(64, first=9))
    assert cached(prefixes, first) == 576  # its end is forgotten first, and only as much as there is no room for


def test_an_engine_that_caches_nothing_is_expected_to_find_nothing() -> None:
    assert found(with_room(0, prompt(500)), prompt(500)) == Found()


def test_a_prompt_that_waits_is_not_in_the_cache_yet() -> None:
    prefixes = with_room(10_000, prompt(160))
    for request_id, tokens in enumerate((prompt(160, 320), prompt(160, 320, 160), prompt(160, 320, 160, 160))):
        prefixes.send(request_id, prefixes.pieces(tokens, ""))
    assert found(prefixes, prompt(160, 320, 160, 160)) == Found(160, 640)
    assert prefixes.begin(0) == {1: Found(480), 2: Found(480, 160)}  # which 1 will have left
    assert prefixes.begin(1) == {2: Found(640)}  # the rest is its own
    assert prefixes.begin(2) == {}
    assert found(prefixes, prompt(160, 320, 160, 160, 50)) == Found(800)


def test_one_that_overtakes_leaves_what_others_waited_for() -> None:
    prefixes = with_room(10_000)
    for request_id in range(3):
        prefixes.send(request_id, prefixes.pieces(prompt(320, 160, first=0), ""))
    assert prefixes.begin(2) == {1: Found(480)}
    assert prefixes.begin(0) == {}


@pytest.mark.parametrize("other_waits", [False, True])
def test_what_a_prompt_would_have_left_is_not_expected_once_it_is_given_up(other_waits: bool) -> None:
    prefixes = with_room(10_000)
    prefixes.send(0, prefixes.pieces(prompt(320), ""))
    if other_waits:
        prefixes.send(1, prefixes.pieces(prompt(320, 160), ""))
    prefixes.end(0)
    assert found(prefixes, prompt(320)) == Found()
    begin(prefixes, prompt(320))
    assert found(prefixes, prompt(320, 160)) == Found(320, 160 if other_waits else 0)


def test_nothing_is_kept_of_prompts_that_are_given_up() -> None:
    prefixes = with_room(10_000)
    for request_id in range(3):
        prefixes.send(request_id, prefixes.pieces(prompt(320, 160 * request_id), ""))
    for request_id in range(3):
        prefixes.end(request_id)
    assert not prefixes._waiting
    assert not prefixes._waiting_for


def test_a_prompt_that_was_forgotten_while_it_waited_is_in_the_cache_once_it_begins() -> None:
    prefixes = with_room(640)
    prefixes.send(0, prefixes.pieces(prompt(320), ""))
    begin(prefixes, prompt(640, first=5))
    assert found(prefixes, prompt(320)) == Found()
    prefixes.begin(0)
    assert cached(prefixes, prompt(320)) == 320
    assert cached(prefixes, prompt(640, first=5)) == 320
