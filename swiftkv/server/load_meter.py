"""Measures how much of its weights an engine has loaded, from its progress page."""

from __future__ import annotations

import time

from swiftkv.server.engine_state import EngineState
from swiftkv.server.node_views import Loading

_LOADS = (EngineState.STARTING, EngineState.RESTARTING, EngineState.WAKING)


class LoadMeter:
    """Counts the bytes of one engine's weights that are loaded, and expects the rest to come as fast."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._gives_way_until_s = 0.0  # monotonic
        self._begun_s = 0.0  # monotonic: when the load began

    def give_way(self, patience_s: float) -> None:
        """Note that a load begins, which gives way to other models for `patience_s` at most."""
        self._gives_way_until_s = time.monotonic() + patience_s

    def forget(self) -> None:
        """Note that the weights are gone: the next look at the page may be a while away."""
        self._loaded_bytes = 0

    def observe(self, loaded_bytes: int) -> None:
        """Take over the loaded bytes from the page."""
        if loaded_bytes == 0 or loaded_bytes < self._loaded_bytes:
            self._begun_s = time.monotonic()
        self._loaded_bytes = loaded_bytes

    def view(self, state: EngineState) -> Loading | None:
        """Return what `/ready` shows; `None` for an engine that does not load."""
        if state not in _LOADS:
            return None
        loaded_bytes = min(self._loaded_bytes, self._total_bytes)
        left_s = None
        if loaded_bytes:
            left_s = (time.monotonic() - self._begun_s) * (self._total_bytes - loaded_bytes) / loaded_bytes
        return Loading(loaded_bytes, self._total_bytes, left_s, time.monotonic() < self._gives_way_until_s)
