"""The entries of block tables, as `cpp_ext/core/types.h` writes them and `kernels/triton_layout.py` reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def staged(layer_block: int) -> int:
    """Return the entry of a block that lies, layer by layer, in one layer block."""
    return ~layer_block


def layer_block_index(entries: Tensor, layer: int) -> Tensor:
    """Return the layer blocks that entries name at `layer` of their KV group: `entry + layer`, or the staged one."""
    return torch.where(entries < 0, ~entries, entries + layer)
