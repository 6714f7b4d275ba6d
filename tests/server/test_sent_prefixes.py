"""A gateway remembers prompts, to know what an engine will have in its cache."""

from __future__ import annotations

import numpy as np

from swiftkv.server.sent_prefixes import SentPrefixes


def prompt(*lengths: int, first: int = 0) -> bytes:
    """Parts of one token each, so that prompts begin alike as far as the same parts do."""
    return np.repeat(np.arange(first, first + len(lengths)), lengths).astype("<i4").tobytes()


def known(prefixes: SentPrefixes, tokens: bytes, salt: str = "") -> int:
    return prefixes.num_known(prefixes.pieces(tokens, salt))


def with_sent(max_tokens: int, *prompts: bytes) -> SentPrefixes:
    prefixes = SentPrefixes()
    prefixes.max_tokens = max_tokens
    for tokens in prompts:
        prefixes.add(prefixes.pieces(tokens, ""))
    return prefixes


def test_the_common_beginning_is_known_in_whole_pieces() -> None:
    prefixes = with_sent(10_000, prompt(200, 300))
    assert known(prefixes, prompt(200, 300)) == 496
    assert known(prefixes, prompt(200, 100)) == 288
    assert known(prefixes, prompt(100, 400)) == 96
    assert known(prefixes, prompt(500, first=7)) == 0


def test_nothing_is_known_under_another_salt_or_after_a_restart() -> None:
    prefixes = with_sent(10_000, prompt(500))
    assert known(prefixes, prompt(500), "mine") == 0
    prefixes.clear()
    assert known(prefixes, prompt(500)) == 0


def test_the_latest_prompts_are_remembered_as_far_as_there_is_room() -> None:
    first, second, third = (prompt(640, first=i) for i in range(3))
    prefixes = with_sent(1280, first, second, first, third)
    assert [known(prefixes, tokens) for tokens in (first, second, third)] == [640, 0, 640]
    prefixes.add(prefixes.pieces(prompt(64, first=9), ""))
    assert known(prefixes, first) == 576  # its end is forgotten first, and only as much as there is no room for


def test_an_engine_that_caches_nothing_is_expected_to_find_nothing() -> None:
    assert known(with_sent(0, prompt(500)), prompt(500)) == 0
