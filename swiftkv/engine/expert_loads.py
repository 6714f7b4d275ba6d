"""Figures of how evenly a model's tokens spread over its experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_MIN_TOKENS = 32
"""The fewest tokens per expert for a figure: with fewer, chance decides which one has most."""


class ExpertLoads:
    """Watches the counts that the layers of a model keep."""

    def __init__(self, tokens_per_expert: Mapping[int, Tensor]) -> None:
        """`tokens_per_expert`: int64 [num_experts] by layer, on the host, which kernels add to."""
        self._counts = dict(tokens_per_expert)
        self._seen = {layer: counts.clone() for layer, counts in self._counts.items()}
        self._factors: dict[int, float] = {}

    def factors(self) -> dict[int, float]:
        """Return the mean over the maximum of tokens per expert, by layer; 1 is even.

        A figure covers the newest tokens, at least `_MIN_TOKENS` per expert.
        """
        for layer, counts in self._counts.items():
            new = (counts - self._seen[layer]).double()
            if new.mean() >= _MIN_TOKENS:
                self._factors[layer] = float(new.mean() / new.max())
                self._seen[layer] = counts.clone()
        return dict(self._factors)
