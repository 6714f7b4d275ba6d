"""Settings of every property test: no limit on time, for a test never asserts it; the same examples each time in CI.

Triton's kernels run in its interpreter where there is no GPU. That has to be said before any test imports one.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
