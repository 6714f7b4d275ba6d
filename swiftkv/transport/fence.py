"""A moment in a device's work that the host can wait for."""

from __future__ import annotations

import time

import torch

from swiftkv.errors import EngineError

_POLL_S = 50e-6


class Fence:
    """Marks the end of what this thread has launched on its current CUDA stream, and of what that stream waits for."""

    def __init__(self, device: torch.device, timeout_s: float | None = None) -> None:
        """`timeout_s`: the longest that `wait` takes."""
        self._timeout_s = timeout_s
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # the processor has other engines to serve
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when that work is done; without a GPU it is done when launched.

        Raises `EngineError` after `timeout_s`.
        """
        if self._event is None:
            return
        if self._timeout_s is None:
            self._event.synchronize()
            return
        deadline_s = time.monotonic() + self._timeout_s
        while not self._event.query():
            if time.monotonic() > deadline_s:
                raise EngineError(f"a step did not end within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
