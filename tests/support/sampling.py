"""The tokens that sampling keeps, found by sorting, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swiftkv.kernels.triton_sampling import SlotParams


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0


def slot_params(all_filters: list[Filters], seeds: list[int], vocab_size: int, device: str = "cpu") -> SlotParams:
    params = SlotParams.empty(len(all_filters), vocab_size, device)
    for slot, (filters, seed) in enumerate(zip(all_filters, seeds, strict=True)):
        params.temperature[slot] = filters.temperature
        params.top_k[slot] = filters.top_k or vocab_size
        params.top_p[slot] = filters.top_p
        params.min_p[slot] = filters.min_p
        params.seeds[slot] = np.uint64(seed).astype(np.int64).item()
    return params


def kept_probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """Return the probabilities that min_p, top_k and top_p keep, by sorting, in float64; ties stay or go together."""
    weights = torch.exp((logits.double() - logits.max()) / filters.temperature)
    floor = filters.min_p
    if filters.top_k:
        floor = max(floor, float(weights.sort(descending=True).values[min(filters.top_k, len(weights)) - 1]))
    weights[weights < floor] = 0
    ordered = weights.sort(descending=True).values
    if filters.top_p < 1:
        last = int(torch.searchsorted(ordered.cumsum(0), filters.top_p * weights.sum()))
        weights[weights < ordered[min(last, len(ordered) - 1)]] = 0
    return weights / weights.sum()


def uniform(seed: int, position: int) -> float:
    """Draw from [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of seed and position, with integers of any size."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    return (mix((mix((seed + golden) % 2**64) + position * golden) % 2**64) >> 12) * 2.0**-52
