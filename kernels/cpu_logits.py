"""Edits of logits on the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swiftkv import _cpu
from swiftkv.arithmetic import ceil_div
from swiftkv.kernels.cpu_tensors import check


def forbid_tokens(logits: Tensor, rows: npt.NDArray[np.int32], bits: npt.NDArray[np.uint32]) -> None:
    """Give every token that a mask leaves out the logit minus infinity, in `logits` float32 [R, vocab].

    `rows` [M]; `bits` [M, ceil(vocab / 32)], the lowest bit for the first token of a word. Raises `ValueError` for
    arrays of other shapes, and for rows that are not there.
    """
    num_rows, vocab_size = logits.shape
    check(logits, torch.float32, (num_rows, vocab_size), "logits")
    if bits.shape != (len(rows), ceil_div(vocab_size, 32)) or not (bits.flags.c_contiguous and rows.flags.c_contiguous):
        raise ValueError(f"bits: got {bits.shape} for {len(rows)} rows of {vocab_size} tokens")
    if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows:
        raise ValueError(f"rows: not all of them are in 0 to {num_rows - 1}")
    _cpu.forbid_tokens(logits.data_ptr(), vocab_size, rows.ctypes.data, bits.ctypes.data, len(rows))
