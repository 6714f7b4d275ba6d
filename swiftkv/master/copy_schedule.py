"""The order of copies around the layers of a step (SwiftCache, sections 3.2 and 3.3).

Within one KV group, with B layer-stream buffers, layers counted within the group:

    at the start      spill and load layers 0 to B - 1
    before write(l)   wait for the load of l; if there is none, for the store of layer l - B from the same buffer
    after write(l)    store l
    attention(l) done spill and load layer l + B, into the buffer that l used
    at the end        wait for all stores

Jobs run one after the other in this order, so a buffer is stored before it is loaded again, and blocks that leave the
pool are copied before anything is written in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from swiftkv.cache.geometry import KVGroup
from swiftkv.models.stream import KVStream


@dataclass(frozen=True, slots=True)
class GroupLayer:
    """A layer, as one of its KV group."""

    number: int  # in the model
    group: int  # the index of the group
    index: int  # in the group


class Copier(Protocol):
    """Makes the copies of one step, one after the other in the order of the calls."""

    def load(self, layer: GroupLayer) -> None:
        """Begin to spill and load a layer."""

    def store(self, layer: GroupLayer) -> None:
        """Begin to store a layer."""

    def wait_to_write(self, layer: GroupLayer, previous: GroupLayer | None) -> None:
        """Wait for the load of `layer`; if there is none, for the store of `previous`, which used the same buffer.

        `previous` is `None` if `layer` is the first in its buffer.
        """

    def end(self) -> None:
        """Wait for all stores."""


@contextmanager
def scheduled_copies(groups: Sequence[KVGroup], num_buffers: int, copier: Copier) -> Iterator[KVStream]:
    """Yield the hooks for one forward pass; on leaving, `copier` has waited for all stores.

    `groups` are all the KV groups of the model, in the order of its pool.
    """
    schedule = _Schedule(groups, num_buffers, copier)
    schedule.begin()
    yield schedule
    copier.end()


class _Schedule:
    """The hooks of one forward pass."""

    def __init__(self, groups: Sequence[KVGroup], num_buffers: int, copier: Copier) -> None:
        self._num_buffers = num_buffers
        self._copier = copier
        self._groups = [
            [GroupLayer(number, group, index) for index, number in enumerate(each.layers)]
            for group, each in enumerate(groups)
        ]
        self._layers = {layer.number: layer for layers in self._groups for layer in layers}

    def begin(self) -> None:
        for _, layer in sorted(self._layers.items()):
            if layer.index < self._num_buffers:
                self._copier.load(layer)

    def before_write(self, layer: int) -> None:
        here = self._layers[layer]
        self._copier.wait_to_write(here, self._in_same_buffer(here, -1))

    def after_write(self, layer: int) -> None:
        self._copier.store(self._layers[layer])

    def after_attention(self, layer: int) -> None:
        following = self._in_same_buffer(self._layers[layer], 1)
        if following is not None:
            self._copier.load(following)

    def _in_same_buffer(self, layer: GroupLayer, turns: int) -> GroupLayer | None:
        """Return the layer that uses the buffer so many turns after `layer`; `None` if there is none."""
        layers, index = self._groups[layer.group], layer.index + turns * self._num_buffers
        return layers[index] if 0 <= index < len(layers) else None
