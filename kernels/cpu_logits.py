"""Edits of logits on the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.kernels.cpu_tensors import check


def forbid_tokens(logits: Tensor, rows: npt.NDArray[np.int32], bits: npt.NDArray[np.uint32]) -> None:
    """Set the logit of every token that a mask leaves out to minus infinity, in `logits` float32 [R, vocab].

    `rows` [M]; `bits` [M, ceil(vocab / 32)], the lowest bit for the first token of a word. Raises `ValueError` for
    masks of other sizes, and for rows that do not exist.
    """
    num_rows, vocab_size = logits.shape
    check(logits, torch.float32, (num_rows, vocab_size), "logits")
    _cpu.forbid_tokens(logits.data_ptr(), num_rows, vocab_size, rows, bits)
