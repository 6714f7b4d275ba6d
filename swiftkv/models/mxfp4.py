"""MXFP4, the format of gpt-oss's experts: numbers of four bits, of which every thirty-two share a power of two.

OCP Microscaling Formats 1.0, sections 5.2 and 5.3: an element is e2m1 (sign, two bits of exponent, one of mantissa),
and a scale e8m0 (eight bits of exponent).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.weight_codes import MXFP4_GROUP, CodedMatrix, Coding

GROUP = MXFP4_GROUP
"""Elements that share a scale; two of them are in a byte, the first in its lower half."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
_CODING = Coding("four_bits", _VALUES)
_SCALE_BIAS = 127


def coded(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedMatrix:
    """Return the same numbers as `unpack`, still as codes."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)  # [rows, groups * GROUP]
    return CodedMatrix(codes, _CODING, torch.exp2(scales.float() - _SCALE_BIAS), None, dtype)


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of uint8 blocks [rows, groups, GROUP / 2] and scales [rows, groups], [rows, groups * GROUP].

    Every product of an element and a scale is exact in bfloat16 and float32. A byte is looked up as two numbers.
    """
    exact = torch.float32 if dtype == torch.float16 else dtype
    values = torch.tensor(_VALUES, dtype=exact, device=blocks.device)
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # [256, 2]
    numbers = F.embedding(blocks.int(), of_byte).flatten(-2)  # [rows, groups, GROUP]
    powers = torch.exp2(scales.float() - _SCALE_BIAS).to(exact)
    return numbers.mul_(powers.unsqueeze(-1)).flatten(-2).to(dtype)
