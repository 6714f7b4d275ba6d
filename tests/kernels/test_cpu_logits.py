from __future__ import annotations

import numpy as np
import pytest
import torch

from swiftkv.kernels.cpu_logits import forbid_tokens


@pytest.mark.parametrize("vocab_size", [1, 7, 31, 32, 33, 64, 95, 1000, 151_931])
@pytest.mark.parametrize("part_allowed", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_the_tokens_that_a_mask_leaves_out_are_forbidden_and_no_others(vocab_size: int, part_allowed: float) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = np.array([3, 0, 2], np.int32)
    allowed = rng.random((len(rows), vocab_size)) < part_allowed
    padded = np.ones((len(rows), -(-vocab_size // 32) * 32), bool)  # bits past the last token say nothing
    padded[:, :vocab_size] = allowed
    padded[1, vocab_size:] = False
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    # One row more on either side: whoever writes past the end of a row is seen.
    before = torch.from_numpy(rng.normal(size=(6, vocab_size)).astype(np.float32))
    logits = before.clone()
    forbid_tokens(logits[1:5], rows, bits)
    expected = before.clone()
    for row, allowed_in_row in zip(rows, allowed, strict=True):
        expected[1 + row, torch.from_numpy(~allowed_in_row)] = -torch.inf
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_rows_and_masks_that_are_not_there_are_refused() -> None:
    logits, bits = torch.zeros(2, 40), np.zeros((1, 2), np.uint32)
    for rows in ([2], [-1]):
        with pytest.raises(ValueError, match="rows"):
            forbid_tokens(logits, np.array(rows, np.int32), bits)
    for wrong in (bits[:, :1], np.zeros((1, 3), np.uint32), np.zeros((2, 2), np.uint32)):
        with pytest.raises(ValueError, match="bits"):
            forbid_tokens(logits, np.array([0], np.int32), wrong)
