"""Warns of kernels that Triton compiles too late: a compilation takes seconds, for which a whole engine waits."""

from __future__ import annotations

import logging
from typing import Any

import triton

log = logging.getLogger(__name__)


def warn_of_compilations() -> None:
    """Log a warning whenever Triton compiles a kernel in this process from now on, or fetches one from its cache."""
    triton.knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, repr: str, is_manual_warmup: bool, **_: Any) -> None:
    if not is_manual_warmup:
        log.warning("a kernel was compiled while requests waited; the warm-up should have compiled it: %s", repr)
