"""The tokens that grammars allow in the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swiftkv.kernels.cpu_logits import forbid_tokens


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

    def forbid(self, logits: torch.Tensor) -> None:
        """Give every other token of these rows the logit minus infinity, in `logits` [R, vocab] on the CPU."""
        forbid_tokens(logits, self.rows, self.bits)
