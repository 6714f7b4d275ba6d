"""The points of a forward pass at which KV is copied around a layer."""

from __future__ import annotations

from typing import Protocol


class KVStream(Protocol):
    """Follows a forward pass. Each call has the number of a layer, and layers come in turn."""

    def before_write(self, layer: int) -> None:
        """Return once all KV that the layer's attention reads is in the pool: it is about to be written and read."""

    def after_write(self, layer: int) -> None:
        """Note that the step's new KV of the layer is in the pool."""

    def after_attention(self, layer: int) -> None:
        """Note that nothing of the step reads the layer's KV any more."""


class NoStream:
    """Does nothing: all KV is in the pool."""

    def before_write(self, layer: int) -> None:
        pass

    def after_write(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        pass


NO_STREAM = NoStream()
