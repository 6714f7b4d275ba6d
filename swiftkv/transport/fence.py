"""A moment in a device's work that the host can wait for."""

from __future__ import annotations

import torch


class Fence:
    """Marks all work that was launched on the device so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # the processor has other engines to serve
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when that work is done; without a GPU it is done when launched."""
        if self._event is not None:
            self._event.synchronize()
