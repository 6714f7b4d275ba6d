"""How evenly a model's tokens spread over its experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ExpertLoads:
    """Watches the counts that the layers of a model keep."""

    def __init__(self, tokens_per_expert: Mapping[int, Tensor]) -> None:
        """`tokens_per_expert`: int64 [num_experts] by layer, on the host, which kernels add to."""
        self._counts = dict(tokens_per_expert)
        self._seen = {layer: counts.clone() for layer, counts in self._counts.items()}
        self._factors: dict[int, float] = {}

    def factors(self) -> dict[int, float]:
        """Return the mean over the maximum of tokens per expert, by layer, since the last call with any; 1 is even."""
        if not self._counts:
            return {}
        now = {layer: counts.clone() for layer, counts in self._counts.items()}
        new = torch.stack([counts - self._seen[layer] for layer, counts in now.items()]).double()
        self._seen = now
        factors = (new.mean(-1) / new.amax(-1)).tolist()  # NaN where there was none
        self._factors |= {layer: factor for layer, factor in zip(now, factors, strict=True) if factor == factor}
        return dict(self._factors)
