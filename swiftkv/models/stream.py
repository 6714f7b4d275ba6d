"""Where a forward pass lets KV move: the moments of a layer that copies have to know of."""

from __future__ import annotations

from typing import Protocol


class KVStream(Protocol):
    """Called with the model's layer number, for every layer in turn."""

    def before_write(self, layer: int) -> None:
        """The layer's KV is about to be written and read: what has to be in the pool must be there on return."""

    def after_write(self, layer: int) -> None:
        """The step's new KV of the layer is in the pool."""

    def after_attention(self, layer: int) -> None:
        """Nothing of the step reads the layer's KV any more."""


class NoStream:
    """All KV is in the pool."""

    def before_write(self, layer: int) -> None:
        pass

    def after_write(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        pass


NO_STREAM = NoStream()
