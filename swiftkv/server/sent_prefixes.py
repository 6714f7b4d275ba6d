"""The beginnings of prompts that an engine was sent of late: what it is expected to find in its cache."""

from __future__ import annotations

import numpy as np

from swiftkv._core import block_keys

_PIECE_TOKENS = 16  # as many as a block usually has, so that little of a conversation's next turn counts as new
_KEY_BYTES = 32
_MAX_TOKENS = 64 << 10  # in one prompt: hashing more would take longer than a millisecond


class SentPrefixes:
    """Remembers as many tokens as the engine's memory holds, the latest ones.

    An engine also keeps answers, and forgets in an order of its own, so that it may find more or less.
    """

    def __init__(self) -> None:
        self.max_tokens = 0
        """The number of tokens that are remembered; 0 for an engine that caches nothing."""
        self._known: dict[bytes, None] = {}  # the latest last

    def pieces(self, prompt: bytes, salt: str) -> list[bytes]:
        """Return the names of a prompt's beginnings, of int32 token ids, one for each length that is remembered."""
        if not self.max_tokens:
            return []
        token_ids = np.frombuffer(prompt, "<i4", count=min(len(prompt) // 4, _MAX_TOKENS))
        keys = block_keys(salt.encode("utf-8", "surrogatepass"), token_ids, _PIECE_TOKENS)
        return [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]

    def num_known(self, pieces: list[bytes]) -> int:
        """Return how many tokens of a prompt were sent before, in whole pieces."""
        count = 0
        while count < len(pieces) and pieces[count] in self._known:
            count += 1
        return count * _PIECE_TOKENS

    def add(self, pieces: list[bytes]) -> None:
        """Remember a prompt that is sent."""
        for piece in reversed(pieces):  # ends are forgotten first
            self._known.pop(piece, None)
            self._known[piece] = None
        while len(self._known) * _PIECE_TOKENS > self.max_tokens:
            del self._known[next(iter(self._known))]

    def clear(self) -> None:
        """Forget everything: the engine is another one."""
        self._known.clear()
