"""The beginnings of prompts that an engine was sent lately, which it is expected to find in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swiftkv._core import block_keys

_PIECE_TOKENS = 16  # as many as a block usually has, so that little of a conversation's next turn counts as new
_KEY_BYTES = 32
_NOBODY = -1
_MAX_TOKENS = 64 << 10  # in one prompt: hashing more would take longer than a millisecond


@dataclass(frozen=True, slots=True)
class Found:
    """The tokens of a prompt's beginning that the engine was sent before.

    Attributes:
        num_cached: The tokens of prompts that it has begun, which it should have in its cache.
        num_coming: The tokens after those, of prompts that wait: it will have them once these prompts have begun.
    """

    num_cached: int = 0
    num_coming: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The pieces of a waiting prompt, from the first that is not cached on."""

    num_cached_pieces: int
    pieces: Sequence[bytes]


class SentPrefixes:
    """Remembers the latest tokens, as many as the engine's memory holds.

    An engine may find more, because it also keeps answers, or less, because it evicts in an order of its own.
    """

    def __init__(self) -> None:
        self.max_tokens = 0
        """The number of tokens that are remembered; 0 for an engine that caches nothing."""
        # For each piece, the waiting prompt that had it first, or `None` once a prompt with it has begun. The latest
        # piece is the last.
        self._first: dict[bytes, int | None] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_for: dict[bytes, list[int]] = {}  # waiting prompts by their first piece that is not cached

    def pieces(self, prompt: bytes, salt: str) -> list[bytes]:
        """Return the keys of the beginnings of a prompt (int32 token ids), one for each whole piece."""
        if not self.max_tokens:
            return []
        token_ids = np.frombuffer(prompt, "<i4", count=min(len(prompt) // 4, _MAX_TOKENS))
        keys = block_keys(salt.encode("utf-8", "surrogatepass"), token_ids, _PIECE_TOKENS)
        return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]

    def find(self, pieces: Sequence[bytes], request_id: int = _NOBODY) -> Found:
        """Return how much of a prompt was sent before, in whole pieces, by others than this request."""
        num_cached = 0
        while num_cached < len(pieces) and self._first.get(pieces[num_cached], _NOBODY) is None:
            num_cached += 1
        num_sent = num_cached
        while num_sent < len(pieces) and self._first.get(pieces[num_sent], request_id) != request_id:
            num_sent += 1
        return Found(num_cached * _PIECE_TOKENS, (num_sent - num_cached) * _PIECE_TOKENS)

    def send(self, request_id: int, pieces: Sequence[bytes]) -> Found:
        """Remember a prompt that is sent, and waits from now on. Return how much of it was sent before."""
        found = self.find(pieces)
        for piece in reversed(pieces):  # ends are forgotten first
            self._first[piece] = self._first.pop(piece, request_id)
        self._forget_old()
        num_cached = found.num_cached // _PIECE_TOKENS
        self._wait(request_id, _Waiting(num_cached, pieces[num_cached:]))
        return found

    def begin(self, request_id: int) -> dict[int, Found]:
        """Note that the engine has begun a prompt. Return what waiting prompts will find now, if that has changed."""
        prompt = self._stop_waiting(request_id)
        freed: list[int] = []
        for piece in reversed(prompt.pieces if prompt else ()):
            self._first.pop(piece, None)
            self._first[piece] = None
            freed += self._waiting_for.pop(piece, ())
        self._forget_old()
        return {each: self._find_again(each) for each in freed}

    def end(self, request_id: int) -> None:
        """Forget a prompt that ends while it waits: pieces that it alone has will not be cached."""
        prompt = self._stop_waiting(request_id)
        for piece in prompt.pieces if prompt else ():
            if self._first.get(piece) == request_id:
                del self._first[piece]

    def clear(self) -> None:
        """Forget everything: the engine is a new one."""
        self._first.clear()
        self._waiting.clear()
        self._waiting_for.clear()

    def _forget_old(self) -> None:
        while len(self._first) * _PIECE_TOKENS > self.max_tokens:
            del self._first[next(iter(self._first))]

    def _wait(self, request_id: int, prompt: _Waiting) -> None:
        self._waiting[request_id] = prompt
        if prompt.pieces:
            self._waiting_for.setdefault(prompt.pieces[0], []).append(request_id)

    def _stop_waiting(self, request_id: int) -> _Waiting | None:
        prompt = self._waiting.pop(request_id, None)
        if prompt is not None and prompt.pieces:
            alike = self._waiting_for[prompt.pieces[0]]
            alike.remove(request_id)
            if not alike:
                del self._waiting_for[prompt.pieces[0]]
        return prompt

    def _find_again(self, request_id: int) -> Found:
        prompt = self._waiting[request_id]
        found = self.find(prompt.pieces, request_id)
        num_more = found.num_cached // _PIECE_TOKENS
        prompt = _Waiting(prompt.num_cached_pieces + num_more, prompt.pieces[num_more:])
        self._wait(request_id, prompt)
        return Found(prompt.num_cached_pieces * _PIECE_TOKENS, found.num_coming)
