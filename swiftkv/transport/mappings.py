"""The mappings of peers' pools on our device, and the addresses of runs in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from swiftkv.errors import TransferError
from swiftkv.kernels.triton_copy import Int64Array, flatten_runs
from swiftkv.transport.base import Runs


@dataclass(frozen=True, slots=True)
class Mapping:
    address: int
    nbytes: int


class Mappings:
    """The mapped pools by link. The caller that adds a pool must keep its memory mapped until it removes it."""

    def __init__(self, pool: Tensor) -> None:
        """`pool` is our own, uint8 and flat."""
        self.pool = pool
        self._of_link: dict[int, Mapping] = {}

    def add(self, link: int, address: int, nbytes: int) -> None:
        """Add a pool of `nbytes` at an `address` that our device can read and write."""
        assert link not in self._of_link, f"link {link} is attached"
        self._of_link[link] = Mapping(address, nbytes)

    def remove(self, link: int) -> Mapping | None:
        return self._of_link.pop(link, None)

    def links(self) -> list[int]:
        return list(self._of_link)

    def address(self, link: int) -> int:
        return self._of_link[link].address

    def flatten(self, runs: Runs) -> Int64Array:
        """Return the list of layer blocks for `kernels.triton_copy`. Raises `TransferError` as `check` does."""
        self.check(runs)
        base = self.pool.data_ptr()
        distances = {link: mapping.address - base for link, mapping in self._of_link.items()}
        try:
            return flatten_runs(runs.runs, runs.width_bytes, runs.block_bytes, distances)
        except ValueError as error:
            raise TransferError(str(error)) from error

    def check(self, runs: Runs) -> None:
        """Raise `TransferError` for runs outside of the pools, because a kernel would read or write other memory."""
        links, peer_offsets, local_offsets, counts, staged = runs.runs.T
        missing = set(links.tolist()) - self._of_link.keys()
        if missing:
            raise TransferError(f"links {sorted(missing)} are not attached", missing)
        peer_ends = peer_offsets + counts * runs.block_bytes
        local_ends = local_offsets + counts * np.where(staged, runs.width_bytes, runs.block_bytes)
        peer_nbytes = np.array([self._of_link[link].nbytes for link in links.tolist()])
        outside = (peer_offsets < 0) | (local_offsets < 0) | (counts < 1)
        outside |= (peer_ends > peer_nbytes) | (local_ends > self.pool.numel())
        if outside.any():
            where = runs.runs[outside]
            raise TransferError(f"runs lie outside of the pools: {where.tolist()}", set(where[:, 0].tolist()))
