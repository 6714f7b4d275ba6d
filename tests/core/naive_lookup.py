"""Prompt lookup in plain Python: guesses at the next tokens, copied from where the last ones occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lookup:
    num_speculative_tokens: int
    shortest: int
    longest: int

    def guess_next(self, tokens: Sequence[int]) -> list[int]:
        for length in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            for end in range(len(tokens) - 1, length - 1, -1):
                if tokens[end - length : end] == tokens[-length:]:
                    return self._copy_from(tokens, end)
        return []

    def _copy_from(self, tokens: Sequence[int], end: int) -> list[int]:
        copied = list(tokens)
        for i in range(self.num_speculative_tokens):
            copied.append(copied[end + i])
        return copied[len(tokens) :]
