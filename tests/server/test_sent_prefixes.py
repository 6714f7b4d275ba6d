"""A gateway remembers prompts, to know what an engine will have in its cache."""

from __future__ import annotations

import random
from collections.abc import Iterable
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
    assert prefixes.begin(2) == {0: Found(480), 1: Found(480)}
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


def covered(pieces: list[bytes], others: Iterable[list[bytes]]) -> int:
    """Return how many of the first pieces are among those of others."""
    known = {piece for other in others for piece in other}
    return next((i for i, piece in enumerate(pieces) if piece not in known), len(pieces))


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_knows_at_any_time_how_much_of_it_others_have_begun_with(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = with_room(1 << 40)
    waiting: dict[int, list[bytes]] = {}
    told: dict[int, Found] = {}
    begun: list[list[bytes]] = []
    for request_id in range(300):
        if rng.random() < 0.6 or not waiting:
            parts = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]  # short, so that many begin alike
            tokens = np.repeat(parts, rng.choice([16, 32])).astype("<i4").tobytes()
            pieces = prefixes.pieces(tokens, "")
            assert prefixes.find(pieces).num_coming == 16 * (covered(pieces, [*begun, *waiting.values()])) - (
                16 * covered(pieces, begun)
            )
            told[request_id] = prefixes.send(request_id, pieces)
            waiting[request_id] = pieces
        elif rng.random() < 0.8:
            begins = rng.choice(list(waiting))
            begun.append(waiting.pop(begins))
            told |= prefixes.begin(begins)
        else:  # with all that begin like it: what they have in common is forgotten with the first
            ends = rng.choice(list(waiting))
            alike = [other for other, pieces in waiting.items() if pieces[0] == waiting[ends][0]]
            for other in alike:
                prefixes.end(other)
                del waiting[other]
        for other, pieces in waiting.items():
            assert told[other].num_cached == 16 * covered(pieces, begun)
            assert prefixes.find(pieces, other).num_cached == told[other].num_cached
