"""Corrections of Triton's interpreter where it differs from a GPU in results that tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_LANES = 32

_convert_float = interpreter._convert_float


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make conversions to bfloat16 round to nearest, as on a GPU and in torch; the interpreter truncates."""
    monkeypatch.setattr(interpreter, "_convert_float", _convert_rounding)


def _convert_rounding(data: Any, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> Any:
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(data, np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    return _convert_float(data, source, target, rounding_mode)


def add_up_in_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make running sums of one axis round as on a GPU: a warp's lanes add in a tree; the interpreter adds in order."""
    monkeypatch.setattr(interpreter.ScanOps, "cumsum", _running_sums)


def _running_sums(self: Any, values: Any) -> list[Any]:
    data = values.handle.data
    lanes = np.pad(data, (0, -len(data) % _LANES)).reshape(-1, _LANES)
    for step in (1, 2, 4, 8, 16):
        lanes = lanes + np.pad(lanes, ((0, 0), (step, 0)))[:, :_LANES]
    warps = np.pad(lanes[:-1, -1], (1, 0)).cumsum()
    return [self.to_tensor((lanes + warps[:, None]).ravel()[: len(data)], values.dtype)]
