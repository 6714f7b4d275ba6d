"""The points of a forward pass at which KV is copied around a layer."""

from __future__ import annotations

from typing import Protocol


class KVStream(Protocol):
    """Follows a forward pass. Each call has the number of a layer, and layers come in order."""

    def before_write(self, layer: int) -> None:
        """Wait until the pool has all earlier KV that the layer's attention reads. New KV is written next."""

    def after_write(self, layer: int) -> None:
        """Note that the step's new KV of the layer is in the pool."""

    def after_attention(self, layer: int) -> None:
        """Note that the step no longer reads the layer's KV."""


class NoStream:
    """Does nothing: all KV is in the pool."""

    def before_write(self, layer: int) -> None:
        pass

    def after_write(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        pass


NO_STREAM = NoStream()
