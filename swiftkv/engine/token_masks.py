"""The tokens that grammars and rules allow in the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.kernels.cpu_logits import forbid_tokens

MASK_BITS = 32
"""The number of tokens in one word of a mask."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens for some rows; other rows may have any token."""

    rows: npt.NDArray[np.int32]  # [M] rows of the step's logits, rising
    bits: npt.NDArray[np.uint32]  # [M, ceil(vocab / 32)] the lowest bit of a word is the first of 32 tokens

    def of(self, part: slice) -> TokenMasks:
        """Return the masks of a part of the rows, which count from its start."""
        begin, end = np.searchsorted(self.rows, (part.start, part.stop))
        return TokenMasks(self.rows[begin:end] - np.int32(part.start), self.bits[begin:end])

    def beside(self, others: TokenMasks) -> TokenMasks:
        """Return these masks and those of other rows."""
        rows = np.concatenate([self.rows, others.rows])
        order = np.argsort(rows)
        return TokenMasks(rows[order], np.concatenate([self.bits, others.bits])[order])

    def words_of(self, row: int, num_words: int) -> npt.NDArray[np.uint32]:
        """Return a copy of a row's mask [num_words]; if it has none, a mask that allows every token."""
        index = int(np.searchsorted(self.rows, row))
        if index < len(self.rows) and self.rows[index] == row:
            words: npt.NDArray[np.uint32] = self.bits[index].copy()
            return words
        return np.full(num_words, 0xFFFF_FFFF, np.uint32)

    def forbid(self, logits: torch.Tensor) -> None:
        """Set the logits of all other tokens of these rows to minus infinity, in `logits` [R, vocab] on the CPU."""
        forbid_tokens(logits, self.rows, self.bits)

    def replaced(self, others: TokenMasks) -> TokenMasks:
        """Return these masks, replaced by `others` in the rows for which `others` has one."""
        stay = ~np.isin(self.rows, others.rows)
        return TokenMasks(self.rows[stay], self.bits[stay]).beside(others)


def forbid_unless_needed(words: npt.NDArray[np.uint32], token_ids: npt.NDArray[np.int32]) -> None:
    """Take tokens out of a mask, unless it allows no other tokens."""
    rest = words.copy()
    np.bitwise_and.at(rest, token_ids // MASK_BITS, ~(np.uint32(1) << (token_ids % MASK_BITS).astype(np.uint32)))
    if rest.any():
        words[:] = rest
