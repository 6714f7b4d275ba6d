"""The names of blocks in storage. An engine finds another's block only if its own block would have the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec

from swiftkv._core import blake3
from swiftkv.cache.geometry import KVGroup

KV_VERSION = 2
"""The version of a block's bytes: to be raised when kernels or models change their order or their rounding."""

BLOCK_KEY_BYTES = 32


class ObjectKeys:
    """Names blocks by weights, data type, layout, KV group and rank, beside the tokens and the salt."""

    def __init__(self, groups: Sequence[KVGroup], weights: str, rounding: str, num_ranks: int = 1) -> None:
        """`weights` is the fingerprint of the weights, `rounding` names how the kernels that write KV round.

        `groups` are those of one rank.
        """
        common = [KV_VERSION, weights, rounding]
        parts = [[]] if num_ranks == 1 else [[rank, num_ranks] for rank in range(num_ranks)]
        self.num_ranks = num_ranks
        self._domains = [
            [blake3(msgspec.json.encode([*common, asdict(group), *part])) for group in groups] for part in parts
        ]
        self.fingerprint = blake3(b"".join(domain for of_rank in self._domains for domain in of_rank))[:16]
        """The first 16 bytes of a hash that names all groups together."""

    def of(self, block_key: bytes, group: int, rank: int = 0) -> bytes:
        """Return the name of a rank's part of one group's block."""
        return blake3(self._domains[rank][group] + block_key)


def split_keys(block_keys: bytes) -> Iterator[bytes]:
    """Yield the keys that the core returns as one string of bytes."""
    for start in range(0, len(block_keys), BLOCK_KEY_BYTES):
        yield block_keys[start : start + BLOCK_KEY_BYTES]
