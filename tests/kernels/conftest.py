"""Triton kernels run in its interpreter here: it has to be switched on before they are imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
