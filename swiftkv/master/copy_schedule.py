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


@dataclass(frozen=True, eq=False, slots=True)
class GroupLayer:
    """A layer, as one of its KV group. A schedule has one for each layer."""

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


class CopySchedule:
    """The order of copies in a model with these KV groups."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        """`groups` are all the KV groups of the model, in the order of its pool."""
        self._groups = [
            [GroupLayer(number, group, index) for index, number in enumerate(each.layers)]
            for group, each in enumerate(groups)
        ]
        layers = (layer for group in self._groups for layer in group)
        self._layers = {layer.number: layer for layer in sorted(layers, key=lambda layer: layer.number)}

    @contextmanager
    def copies(self, num_buffers: int, copier: Copier) -> Iterator[KVStream]:
        """Yield the hooks for one forward pass; on leaving, `copier` has waited for all stores."""
        for layer in self._layers.values():
            if layer.index < num_buffers:
                copier.load(layer)
        yield _Hooks(self, num_buffers, copier)
        copier.end()

    def layer(self, number: int) -> GroupLayer:
        return self._layers[number]

    def shifted(self, layer: GroupLayer, by: int) -> GroupLayer | None:
        """Return the layer so many layers of the group after `layer`; `None` if there is none."""
        group, index = self._groups[layer.group], layer.index + by
        return group[index] if 0 <= index < len(group) else None


@dataclass(frozen=True, slots=True)
class _Hooks:
    """The `KVStream` of one forward pass."""

    schedule: CopySchedule
    num_buffers: int
    copier: Copier

    def before_write(self, layer: int) -> None:
        here = self.schedule.layer(layer)
        self.copier.wait_to_write(here, self.schedule.shifted(here, -self.num_buffers))

    def after_write(self, layer: int) -> None:
        self.copier.store(self.schedule.layer(layer))

    def after_attention(self, layer: int) -> None:
        following = self.schedule.shifted(self.schedule.layer(layer), self.num_buffers)
        if following is not None:
            self.copier.load(following)
