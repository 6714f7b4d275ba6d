"""Corrections of Triton's interpreter where it differs from a GPU in results that tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make conversions to bfloat16 round to nearest, as on a GPU and in torch; the interpreter truncates."""
    monkeypatch.setattr(interpreter, "_convert_float", _convert_rounding)


def _convert_rounding(data: Any, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> Any:
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(data, np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    return _convert_float(data, source, target, rounding_mode)
